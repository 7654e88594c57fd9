"""The class of a converted model: the stock model class plus what a packed model has to do differently.

A model is made converted by giving the instance a subclass of its own class, under the same name; the
stock class is not touched.  `save_pretrained` then writes the stock layout, so that every other tool keeps
working, and packed names never reach a stock file name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.kernels.classes import become, derived_class
from kconvert.kernels.packing import Packing, pack_on_load, unpack_for_outer, unpack_state
from kconvert.kernels.report import Report, build_report
from kconvert.names import MANIFEST_NAME, VARIANT

__all__ = ["ConvertedModel", "adopt_model", "converted_class"]


class ConvertedModel:
    """Mixin put before a `PreTrainedModel` class."""

    kconvert_packings: tuple[Packing, ...] = ()

    @property
    def kconvert_file_packings(self) -> tuple[Packing, ...]:
        """The model's stock tensors, out of those of the files it came from; none where these had the same names."""
        return ()

    @property
    def kconvert_report(self) -> Report:
        """Which kernel runs in which patched module, and why the others do not."""
        return build_report(cast("nn.Module", self))

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`PreTrainedModel.save_pretrained`, in the stock layout.

        With `variant="kconvert"` a model that came from `load_converted` is saved packed, with its manifest.
        """
        if kwargs.get("variant") != VARIANT and (Path(save_directory) / MANIFEST_NAME).exists():
            raise UsageError(
                f"{save_directory} holds a converted checkpoint, which stock weights beside it would contradict",
                fix=f"save to another directory, or packed with variant={VARIANT!r}",
            )
        state = self._whole_state(state_dict)
        if kwargs.get("variant") == VARIANT:
            return self._save_packed(save_directory, is_main_process, state, kwargs)
        self._check_undoable()
        stock = unpack_state(self.kconvert_packings, state)
        parent = cast("Any", super())
        return parent.save_pretrained(save_directory, is_main_process=is_main_process, state_dict=stock, **kwargs)

    def _check_undoable(self) -> None:
        """Refuse where stock tensors cannot be made of packed ones; in memory they always can."""

    def _whole_state(self, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """The state dict with offloaded tensors read back."""
        model = cast("Any", self)
        found = dict(model.state_dict() if state is None else state)
        offloaded = [name for name, tensor in found.items() if tensor.is_meta]
        if offloaded:
            from transformers.integrations.accelerate import load_offloaded_parameter

            for name in offloaded:
                found[name] = load_offloaded_parameter(model, name)
        return found

    def _save_packed(self, directory: Any, is_main_process: bool, state: Any, kwargs: dict[str, Any]) -> Any:
        raise UsageError(
            f"save_pretrained(variant={VARIANT!r}) needs a manifest, and this model was patched in memory",
            fix="save without variant and run `kconvert apply` on the result",
        )

    def load_adapter(self, peft_model_id: Any, *args: Any, **kwargs: Any) -> Any:
        """`load_adapter`, refused where the adapter names a projection that is packed here.

        Raises:
            UsageError: the adapter would silently lose these parts, or cannot be looked at.
        """
        if isinstance(peft_model_id, str | Path):
            _check_adapter(self.kconvert_packings, Path(peft_model_id))
        return cast("Any", super()).load_adapter(peft_model_id, *args, **kwargs)


def _check_adapter(packings: Iterable[Packing], directory: Path) -> None:
    from safetensors import safe_open

    file = directory / "adapter_model.safetensors"
    advice = "merge the adapter into the stock model first, and convert the result"
    if not file.is_file():
        raise UsageError(
            "no adapter_model.safetensors here to compare with the packed names", where=str(directory), fix=advice
        )
    with safe_open(str(file), framework="pt") as opened:
        keys = [key.removeprefix("base_model.model.") for key in opened.keys()]  # noqa: SIM118  # not a dict
    for packing in packings:
        for name in packing.sources:
            module = name.rpartition(".")[0]
            if not packing.is_identity and any(key.startswith(f"{module}.") for key in keys):
                raise UsageError(
                    f"the adapter changes {module!r}, which is packed into {next(iter(packing.targets))!r}",
                    where=str(file),
                    fix=advice,
                )


def converted_class(*bases: type) -> type[Any]:
    """The class of a converted model: mixins, then the stock model class, whose name it has."""
    return cast("type[Any]", derived_class(converted_class, bases))


def adopt_model(model: Any, packings: Iterable[Packing]) -> None:
    """Make a live model a converted one, or add packings to one that is.

    So does every transformers model inside it that holds a packed module: `model.model.save_pretrained` must
    not write packed names either.
    """
    added = tuple(packings)
    for path, inner in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        here = tuple(packing.below(prefix) for packing in added if next(iter(packing.targets)).startswith(prefix))
        if path and not (here and hasattr(inner, "save_pretrained")):
            continue
        if not isinstance(inner, ConvertedModel):
            become(inner, converted_class(ConvertedModel, type(inner)))
        if "kconvert_packings" not in inner.__dict__:
            inner.kconvert_packings = ()
            inner.kconvert_is_inner = bool(path)
            inner.register_load_state_dict_pre_hook(pack_on_load)
            inner.register_state_dict_post_hook(unpack_for_outer)
        inner.kconvert_packings = (*inner.kconvert_packings, *here)
