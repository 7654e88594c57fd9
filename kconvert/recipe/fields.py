"""What the value of a single key may be: names, versions, dtypes, lists of kernels, path patterns.

Every function takes a value as it was read and gives back what the models keep.  Refused, with `RuleError`: another
type (nothing is converted), empty lists, duplicates, and names that no file or model has.  What a key means beside
other keys is decided in `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from kconvert.errors import RecipeError
from kconvert.names import DEVICES, near_misses
from kconvert.patterns import PathPattern
from kconvert.recipe.reference import KernelRef
from kconvert.recipe.values import Loc, describe, retype

__all__ = [
    "RuleError",
    "check_device",
    "check_name",
    "check_revision",
    "check_version",
    "parse_devices",
    "parse_dtype",
    "parse_kernels",
    "parse_model_types",
    "parse_path",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_T = TypeVar("_T")


class RuleError(RecipeError):
    """A rule about recipes is broken; `at` leads from the value being checked to the part at fault."""

    def __init__(self, what: str, *, fix: str | None, at: Loc = ()) -> None:
        self.at = at
        super().__init__(what, fix=fix)


def check_name(text: str) -> str:
    """The name of a recipe."""
    if _NAME.fullmatch(text) is None:
        raise RuleError(
            f"name {text!r} is no simple name",
            fix="use letters, digits, '.', '_' and '-', and start with a letter or digit",
        )
    return text


def check_revision(text: str) -> str:
    """A branch, tag or commit of the Hub."""
    if not text or not text.isprintable() or " " in text:
        raise RuleError(f"revision {text!r} is empty or holds blanks", fix="write a branch, a tag or a commit")
    return text


def parse_devices(value: object) -> tuple[str, ...]:
    """The value of `for`: one device type or a list."""
    return _parse_strings(value, "for", check_device)


def check_device(text: str) -> str:
    """A device type that there are kernels for."""
    if text not in DEVICES:
        near = near_misses(text.lower(), DEVICES)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RuleError(f"unknown device {text!r}", fix=f"{hint}known devices: {', '.join(DEVICES)}")
    return text


def parse_dtype(text: str) -> str:
    """The value of `dtype`, as safetensors names it: `BF16` for `bfloat16`."""
    if text not in _DTYPES:
        near = near_misses(text.lower(), _DTYPES)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RuleError(f"unknown dtype {text!r}", fix=f"{hint}known dtypes: {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _check_model_type(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        fix = "write the model_type of the model's config.json, e.g. qwen3"
        raise RuleError(f"model type {text!r} is no simple name", fix=fix)
    return text


def _parse_strings(value: object, key: str, parse: Callable[[str], _T]) -> tuple[_T, ...]:
    """One string or a list of strings, each parsed; an empty list, other items and duplicates are refused."""
    items, listed = (value, True) if isinstance(value, tuple | list) else ((value,), False)
    parsed: dict[str, _T] = {}
    for number, item in enumerate(items):
        at: Loc = (number,) if listed else ()
        if not isinstance(item, str):
            what = f"{key!r} must be a string or a list of strings, not {describe(item)}"
            raise RuleError(what, fix=retype(item), at=at)
        if item in parsed:
            raise RuleError(f"{key!r} lists {item!r} twice", fix="keep one", at=at)
        try:
            parsed[item] = parse(item)
        except RecipeError as error:
            raise RuleError(error.what, fix=error.fix, at=at) from None
    if not parsed:
        raise RuleError(f"{key!r} is an empty list", fix="name at least one")
    return tuple(parsed.values())


def parse_model_types(value: object) -> tuple[str, ...]:
    """The value of `model_type`: one or a list."""
    return _parse_strings(value, "model_type", _check_model_type)


def parse_kernels(value: object) -> tuple[KernelRef, ...]:
    """The value of `kernel`: one reference or a list, best first."""
    return _parse_strings(value, "kernel", KernelRef.parse)


def parse_path(value: object) -> PathPattern:
    """The value of `path`."""
    if isinstance(value, PathPattern):
        return value
    if not isinstance(value, str):
        raise RuleError(f"'path' must be a string, not {describe(value)}", fix=retype(value))
    return PathPattern.parse(value)


def check_version(value: object) -> object:
    """The version of the recipe format: 1."""
    if value != 1 or isinstance(value, bool):
        raise RuleError(
            f"'recipe' must be the version 1, not {describe(value)}",
            fix="write `recipe: 1`, or use a kconvert that knows this version",
        )
    return value
