"""The stock model on meta: what the planner has to know of it.

The model of `config.json` is built without memory.  It gives the class of every module, and transformers'
own conversion mapping gives each tensor's module name.  Code that lies in the checkpoint is never run, and
tensors that transformers would join or split while loading are refused.  Tensors that the config ties and the
checkpoint stores with different values are warned of: transformers keeps both, so both are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kconvert.checkpoint import Checkpoint, have_equal_bytes
from kconvert.errors import CheckpointError, TrustError
from kconvert.names import CONFIG_NAME
from kconvert.runtime.modelclass import build_meta_model, load_config, model_class

__all__ = ["StockModel", "build_stock_model"]


@dataclass(frozen=True)
class StockModel:
    """The stock model on meta, with what the planner needs of it."""

    model: Any
    config: Any
    classes: Mapping[str, str]
    module_names: Mapping[str, str]
    warnings: tuple[str, ...]


def build_stock_model(checkpoint: Checkpoint) -> StockModel:
    """Build the model of `config.json` on meta and translate the checkpoint's names.

    Raises:
        CheckpointError: no such class, or tensors that transformers would join or split while loading.
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
    names = _module_names(checkpoint, model)
    return StockModel(model, config, classes, names, _tie_warnings(checkpoint, model, names))


def _tie_warnings(checkpoint: Checkpoint, model: Any, names: Mapping[str, str]) -> tuple[str, ...]:
    """Of tensors that the config ties, both stored, that differ; equal ones transformers ties, as if one were stored."""
    file_names = {name: file_name for file_name, name in names.items()}
    stored = {name: checkpoint.tensors[file_name] for name, file_name in file_names.items()}
    return tuple(
        f"{target} and {source} are stored with different values, though the config ties them; both are kept"
        for target, source in sorted((getattr(model, "all_tied_weights_keys", None) or {}).items())
        if target in stored and source in stored and not have_equal_bytes(checkpoint, stored[target], stored[source])
    )


def _module_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """File name to module name, by the rules and in the order of transformers' loader."""
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for name in checkpoint.tensors:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None and renamed in state and renamed != name:
            raise CheckpointError(
                f"transformers joins or splits {name!r} into {renamed!r} while loading, which cannot be written yet",
                where=str(checkpoint.model_dir),
                fix="load the model with transformers and save it with save_original_format=False, then convert that",
            )
        names[name] = renamed
    return names
