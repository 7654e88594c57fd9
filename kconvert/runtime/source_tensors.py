"""The tensors that the source's files had: for `save_pretrained` in the stock layout, and for `load_state_dict`.

transformers writes a model back in the form that it was loaded from, by the reverse of the rules that it used.
A converted directory holds module names and needs no rule to load, so the way back is read off the manifest.  What
was saved so, in a checkpoint of Trainer, comes back as a state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, WeightConverter

from kconvert.kernels.packing import Packing, packings_of_targets, unpack_state
from kconvert.manifest import Manifest, PartRecord

__all__ = ["file_packings", "loadable", "source_tensors"]


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


def file_packings(manifest: Manifest) -> tuple[Packing, ...]:
    """The stock model's tensors out of those of the source's files: those that are not the same, and not computed."""
    exact = [record for record in manifest.tensors if record.exact]  # of what was computed, no way leads back
    parts: dict[str, PartRecord] = {part.source: part for record in exact for part in record.parts}
    shapes = {origin.file_name: origin.shape for part in parts.values() for origin in part.origins}
    packings = packings_of_targets({name: part.stored() for name, part in parts.items()}, shapes)
    return tuple(packing for packing in packings if not packing.is_identity)


def loadable(packings: Iterable[Packing], manifest: Manifest) -> tuple[Packing, ...]:
    """Those by which a state dict under the files' names can be told from one under the model's own.

    A file's name that is also one of the model's, for another tensor, means the model's.
    """
    own = {part.source for record in manifest.tensors for part in record.parts}
    carried = {*manifest.carried}
    return tuple(
        packing for packing in packings if not own & packing.sources.keys() and not carried & packing.targets.keys()
    )


def source_tensors(packings: Iterable[Packing]) -> list[WeightConverter]:
    """What to give transformers as the conversions of a loaded model; empty where the files had the model's tensors."""
    by_name = {name: packing for packing in packings for name in packing.targets}
    return [_SourceTensors(by_name)] if by_name else []
