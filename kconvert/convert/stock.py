"""The stock model on meta: what the planner has to know of it.

The model of `config.json` is built without memory.  It gives the class of every module, and `bake` its tensors out of
those of the files.  Code that lies in the checkpoint is never run.  Tensors that the config ties and the
checkpoint stores with different values are warned of: transformers keeps both, so both are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kconvert.checkpoint import Checkpoint, have_equal_bytes
from kconvert.convert.bake import bake
from kconvert.errors import CheckpointError, TrustError
from kconvert.names import CONFIG_NAME
from kconvert.plan import COPY, ModuleTensor
from kconvert.runtime.modelclass import build_meta_model, load_config, model_class

__all__ = ["StockModel", "build_stock_model"]


@dataclass(frozen=True)
class StockModel:
    """The stock model on meta, with what the planner needs of it."""

    model: Any
    config: Any
    classes: Mapping[str, str]
    tensors: tuple[ModuleTensor, ...]
    warnings: tuple[str, ...]


def build_stock_model(checkpoint: Checkpoint) -> StockModel:
    """Build the model of `config.json` on meta and find its tensors in the checkpoint.

    Raises:
        CheckpointError: no such class, or tensors that do not make the model's.
        TrustError: the class is defined by code in the directory, which is never run here.
    """
    directory = checkpoint.model_dir
    try:
        cls = model_class(directory, checkpoint.config)
    except TrustError as error:
        raise TrustError(
            error.what,
            where=error.where,
            fix="it is never run here: convert with --no-model-check, names are checked at load",
        ) from error
    try:
        config = load_config(directory, cls)
        model = build_meta_model(cls, config)
        unchanged = (directory / CONFIG_NAME).read_bytes() == checkpoint.config_bytes
    except Exception as error:  # whatever a model's or config's own __init__ raises, huggingface_hub's strict types too
        if hasattr(error, "exit_code"):
            raise
        raise CheckpointError(
            f"the model cannot be built from config.json ({type(error).__name__}: {error})",
            where=str(directory),
            fix="check config.json, or skip the check with --no-model-check",
        ) from error
    if not unchanged:
        raise CheckpointError(
            "config.json has changed since it was read",
            where=str(directory),
            fix="leave the source alone, and start again",
        )
    classes = {path: type(module).__name__ for path, module in model.named_modules() if path}
    tensors = bake(checkpoint, model)
    return StockModel(model, config, classes, tensors, _tie_warnings(checkpoint, model, tensors))


def _tie_warnings(checkpoint: Checkpoint, model: Any, tensors: Iterable[ModuleTensor]) -> tuple[str, ...]:
    """Of tensors that the config ties, both stored, that differ; equal ones transformers ties, as if one were stored."""
    stored = {tensor.name: checkpoint.tensors[tensor.stored.sources[0]] for tensor in tensors if tensor.op == COPY}
    return tuple(
        f"{target} and {source} are stored with different values, though the config ties them; both are kept"
        for target, source in sorted((getattr(model, "all_tied_weights_keys", None) or {}).items())
        if target in stored and source in stored and not have_equal_bytes(checkpoint, stored[target], stored[source])
    )
