"""The stock model behind a converted directory, on meta: its names, and what the forwards of its classes compute.

What the manifest says of a class has to hold in the transformers of this machine too.  Refused: a conversion whose
model was never checked, a model whose code comes with the directory, and a class that transformers cannot replace by
name because it is not an attribute of one of its own modules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kconvert.errors import KernelRefusedError, ManifestError, RecipeError
from kconvert.export.entries import ModelNames
from kconvert.manifest import LayoutRecord, Manifest, PackageRecord, load_manifest
from kconvert.names import parents
from kconvert.recipe import KernelRef
from kconvert.runtime.modelclass import build_meta_model, load_config, model_class, read_config

__all__ = ["Stock", "load_stock", "patchable_reason", "read_names"]

_HEX = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True)
class Stock:
    """A converted directory, its manifest, and the stock model on meta."""

    directory: Path
    manifest: Manifest
    model: Any

    @property
    def model_type(self) -> str:
        """As transformers has it: what the directory says may be anything."""
        return str(type(self.model).config_class.model_type)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return tuple(name for name, _ in self.model.named_parameters(remove_duplicate=False))

    def owner(self, path: str) -> PreTrainedModel:
        """The innermost model that holds a module; it fills the module's parameters where a file has none."""
        found = (self.model.get_submodule(parent) for parent in (*parents(path), ""))
        return next(module for module in found if isinstance(module, PreTrainedModel))

    def module(self, path: str) -> nn.Module:
        """A module of the model."""
        found: nn.Module = self.model.get_submodule(path)
        return found


def load_stock(directory: Path) -> Stock:
    """Read the manifest and build the model on meta.

    Raises:
        ManifestError: the directory is not whole, or names packages as kconvert does not.
        KernelRefusedError: it was converted without looking at the model.
        TrustError: the model's code comes with the directory.
    """
    manifest = load_manifest(directory)
    for patch in manifest.patches:
        if patch.layout.package is not None:
            _check_package(patch.layout, patch.layout.package, directory)
    if not manifest.model_checked:
        raise KernelRefusedError(
            "the model was not checked at the conversion, so what its classes compute is not known",
            where=str(directory),
            fix="convert again without --no-model-check",
        )
    raw, _ = read_config(directory)
    cls = model_class(directory, raw)
    return Stock(directory, manifest, build_meta_model(cls, load_config(directory, cls)))


def _check_package(layout: LayoutRecord, record: PackageRecord, directory: Path) -> None:
    """These names go into programs, and a manifest may say anything."""
    try:
        reference = KernelRef.parse(record.package_id)
    except RecipeError as error:
        raise ManifestError(error.what, where=str(directory), fix="do not use this checkpoint") from None
    names = (record.class_name, f"{record.class_name}Layout")
    digest = record.digest.removeprefix("sha256:")
    is_whole = (
        reference.class_name == record.class_name
        and layout.name in names
        and (reference.kind == "hub") == (record.commit is not None)
        and all(_HEX.fullmatch(text) for text in (digest, record.commit or digest))
    )
    if not is_whole:
        raise ManifestError(
            f"kernel package {record.package_id!r} is malformed", where=str(directory), fix="do not use this checkpoint"
        )


def read_names(model: nn.Module) -> ModelNames:
    """The names of a model for the routes."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    return ModelNames(
        classes={path: type(module).__name__ for path, module in modules.items()},
        models=frozenset(type(module).__name__ for module in modules.values() if isinstance(module, PreTrainedModel)),
        layers={
            type(module).__name__: name
            for module in modules.values()
            if (name := getattr(type(module), "kernel_layer_name", None)) is not None
        },
    )


def patchable_reason(model: nn.Module, class_name: str) -> str | None:
    """Why transformers cannot replace a class of this model by its name, or None.

    It sets attributes of its own loaded modules while the model is built, so the class has to be one that the model takes
    from there, and the only one of that name; a constructor that names its own class would call the replacement.
    """
    found = {type(module) for module in model.modules() if type(module).__name__ == class_name}
    if len(found) != 1:
        return f"the model has {len(found)} classes called {class_name}"
    (cls,) = found
    home = sys.modules.get(cls.__module__)
    if not cls.__module__.startswith("transformers.") or getattr(home, class_name, None) is not cls:
        return f"{class_name} is no class of transformers, which KernelConfig could replace"
    table = _table_with(cls, vars(home))
    if table is not None:
        return f"the model takes {class_name} from {table}, which KernelConfig does not change"
    code = getattr(cls.__init__, "__code__", None)
    if code is not None and class_name in code.co_names:
        return f"the constructor of {class_name} names its own class"
    return None


def _table_with(cls: type, names: Mapping[str, Any]) -> str | None:
    """What else of a module holds the class: a table (`GPTJ_ATTENTION_CLASSES`), or an attribute of another class."""
    for name, value in names.items():
        listed = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(item is cls for item in listed):
            return name
        if isinstance(value, type) and value is not cls and value.__module__ == cls.__module__:
            held = next((key for key, item in vars(value).items() if item is cls), None)
            if held is not None:
                return f"{name}.{held}"
    return None
