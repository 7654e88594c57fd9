"""The tensors that the source's files had, for `save_pretrained` in the stock layout.

transformers writes a model back in the form that it was loaded from, by the reverse of the rules that it used.
A converted directory holds module names and needs no rule to load, so the way back is read off the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, WeightConverter

from kconvert.kernels.packing import Packing, packings_of_targets, unpack_state
from kconvert.manifest import Manifest, PartRecord

__all__ = ["source_tensors"]


class _SourceTensors(WeightConverter):
    """A rule in transformers' list whose reverse, which is all that is ever used, follows the manifest.

    It takes the tensors of each packing together, whole names only, and gives those that the files had.
    """

    def __init__(self, packings: Mapping[str, Packing]) -> None:
        # a converter has to have an operation; `convert` below never calls it
        super().__init__(list(packings), "a tensor of the source", operations=[Concatenate()])
        self.by_name = dict(packings)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        packing = self.by_name.get(source_key)
        return (source_key, None) if packing is None else (next(iter(packing.targets)), source_key)

    def reverse_transform(self) -> _SourceTensors:
        return self

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        packing = self.by_name[layer_name]
        state = {name: tensors[0] for name, tensors in self.materialize_tensors().items()}
        return unpack_state([packing], state)

    def __deepcopy__(self, memo: Any) -> _SourceTensors:
        return _SourceTensors(self.by_name)  # transformers copies a rule for each of its groups


def source_tensors(manifest: Manifest) -> list[WeightConverter]:
    """What to give transformers as the conversions of a loaded model; empty where the files had the model's tensors."""
    parts: dict[str, PartRecord] = {part.source: part for record in manifest.tensors for part in record.parts}
    shapes = {origin.file_name: origin.shape for part in parts.values() for origin in part.origins}
    packings = packings_of_targets({name: part.stored() for name, part in parts.items()}, shapes)
    changed = [packing for packing in packings if not packing.is_identity]
    return [_SourceTensors({name: packing for packing in changed for name in packing.targets})] if changed else []
