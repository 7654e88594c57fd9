"""`new_kernel`: a working two-class package to start from, with a test and a recipe that uses it.

The kernel lies in a folder of its own, because a package's digest covers every file of its folder.  What is written
comes from the templates beside this module, where `KernelName` stands for the class and `kernel_name` for the
folder.  Refused: a name that is no class name or would hide a module that the test imports, and a folder that holds
something already.
"""

from __future__ import annotations

import builtins
import importlib.resources
import re
import sys
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from kconvert.errors import OutputError, RecipeError, UsageError
from kconvert.recipe.reference import check_class_name

__all__ = ["NewKernel", "new_kernel", "snake_name"]

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SUFFIX = ".tmpl"
# Names that the templates use for something else.
_TAKEN_CLASSES = frozenset({"Any", "AutoModelForCausalLM", "Concatenate", "Path", "WeightConverter", "WeightRenaming"})
_TAKEN_MODULES = frozenset({"kconvert", "kernels", "pytest", "torch", "transformers"})


@dataclass(frozen=True)
class NewKernel:
    """What was written: the folder, the files in it (posix, sorted), and the kernel as a command names it."""

    directory: Path
    files: tuple[str, ...]
    kernel: str


def new_kernel(name: str, directory: Path | None = None, *, kind: Literal["replace", "fuse"] = "replace") -> NewKernel:
    """Write a package, its test, a recipe and a README into a new folder.

    Args:
        name: the class name of the kernel, e.g. `FastMLP`.
        directory: the folder to write, absent or empty; the name in snake case, in the working directory, if left out.
        kind: `replace` packs the MLP of Qwen3, `fuse` joins it with the norm before it.

    Raises:
        UsageError: `name` cannot be the class name of a kernel.
        OutputError: the folder holds something, or cannot be written.
    """
    _check_name(name)
    module = snake_name(name)
    target = directory if directory is not None else Path(module)
    files = {
        item.replace("kernel_name", module): text.replace("KernelName", name).replace("kernel_name", module)
        for item, text in _templates(kind).items()
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise OutputError(f"{target} is not empty", fix="name a new folder with -o DIR")
        for item, text in files.items():
            (target / item).parent.mkdir(exist_ok=True)
            (target / item).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{target} cannot be written ({error.strerror or error})", fix="name another folder with -o DIR"
        ) from None
    return NewKernel(target, tuple(sorted(files)), f"{target / module}:{name}")


def snake_name(name: str) -> str:
    """`FastMLP` as `fast_mlp`."""
    return _WORDS.sub("_", name).lower()


def _check_name(name: str) -> None:
    try:
        check_class_name(name)
    except RecipeError:
        raise UsageError(f"{name!r} is no class name", fix="give one such as FastMLP") from None
    if not name[0].isupper():
        raise UsageError(f"class name {name!r} begins with no capital", fix="give one such as FastMLP")
    if name.endswith("Layout"):
        raise UsageError(
            f"class name {name!r} ends in Layout, which is for the class that holds the parameters",
            fix=f"give the kernel's own name, e.g. {name.removesuffix('Layout') or 'FastMLP'}",
        )
    is_taken = name in _TAKEN_CLASSES or hasattr(builtins, name)
    module = snake_name(name)
    if is_taken or module in sys.stdlib_module_names or module in _TAKEN_MODULES:
        what = f"class name {name!r} is taken" if is_taken else f"the folder of {name!r} would hide module {module!r}"
        raise UsageError(what, fix=f"give another one, e.g. My{name}")


def _templates(kind: str) -> dict[str, str]:
    """The template files of a kind by name, without their suffix."""
    root = importlib.resources.files("kconvert.authoring") / "templates"
    return {**_read(root / "both", ""), **_read(root / kind, "")}


def _read(folder: Traversable, prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in folder.iterdir():
        if item.is_dir():
            found.update(_read(item, f"{prefix}{item.name}/"))
        elif item.name.endswith(_SUFFIX):
            found[f"{prefix}{item.name.removesuffix(_SUFFIX)}"] = item.read_text(encoding="utf-8")
    return found
