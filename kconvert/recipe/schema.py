"""What a recipe may say: the models, the kinds of kernel reference, and the rules between keys.

Decided here: which keys exist at which level, which values they take, and which combinations make sense
without looking at a model.  Unknown keys, values of another type (nothing is converted), contradictions
between keys and empty values are refused.  Not decided here: whether a kernel exists, whether a pattern
matches anything, and whether claims overlap; the planner does that and points to the lines kept here.

Rules raise `RuleError`, which says what, the way out, and which key below the model it is about; `load`
adds file and line.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PrivateAttr,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # `pydantic` has it from 2.8 on

from kconvert.errors import RecipeError
from kconvert.patterns import PathPattern

__all__ = ["EMPTY", "KernelRef", "Patch", "PlacedDict", "Recipe", "RuleError", "Target"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUILTIN = re.compile(r"[a-z][a-z0-9_]*")
_LOCAL = re.compile(r"\.{1,2}(?:/.*)?|/.*")
_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_KERNEL_KINDS = "write a built-in ID (cuda_fused_swiglu), ./folder:ClassName or owner/repo:ClassName"

Loc = tuple[str | int, ...]


class _Empty:
    """The value of a key with nothing behind it (`replace:`); no field accepts it."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY = _Empty()


class RuleError(RecipeError):
    """A rule of this module is broken; `at` leads from the value being checked to the part at fault."""

    def __init__(self, what: str, *, fix: str, at: Loc = ()) -> None:
        self.at = at
        super().__init__(what, fix=fix)


class PlacedDict(dict[str, Any]):
    """A mapping of the recipe file together with the place where it starts."""

    def __init__(self, line: int, where: str) -> None:
        self.line, self.where = line, where
        super().__init__()


@dataclass(frozen=True)
class KernelRef:
    """A kernel as a recipe names it.

    Attributes:
        kind: `builtin` (an ID of the registry), `local` (a package folder) or `hub` (a Hub repository).
        text: as written in the recipe.
        source: the ID, the folder (as written, relative to the recipe file), or `owner/repo`.
        class_name: the class inside the package; None for a built-in ID.
    """

    kind: Literal["builtin", "local", "hub"]
    text: str
    source: str
    class_name: str | None = None

    @property
    def is_package(self) -> bool:
        return self.kind != "builtin"

    @classmethod
    def parse(cls, text: str) -> KernelRef:
        """Parse `cuda_fused_swiglu`, `./folder:ClassName` or `owner/repo:ClassName`.

        Raises:
            RuleError: none of the three kinds, or a class name that is no Python identifier.
        """
        if _BUILTIN.fullmatch(text):
            return cls("builtin", text, text)
        source, colon, class_name = text.rpartition(":")
        if not text.isprintable() or text != text.strip():
            raise RuleError(f"kernel {text!r} has blanks around it or control characters", fix=_KERNEL_KINDS)
        if not colon and (_LOCAL.fullmatch(text) or _HUB.fullmatch(text)):
            raise RuleError(f"kernel {text!r} names no class", fix=f"write {text}:ClassName")
        kind: Literal["local", "hub"] = "local" if _LOCAL.fullmatch(source) else "hub"
        if kind == "hub" and (_HUB.fullmatch(source) is None or ".." in source or "--" in source):
            raise RuleError(f"kernel {text!r} is neither a built-in ID nor a package reference", fix=_KERNEL_KINDS)
        return cls(kind, text, source, _check_class_name(class_name))


def _check_class_name(text: str) -> str:
    if not (text.isascii() and text.isidentifier()) or keyword.iskeyword(text):
        raise RuleError(f"class name {text!r} is no Python identifier", fix="write the bare class name, e.g. Qwen3MLP")
    return text


def _check_name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise RuleError(
            f"name {text!r} is no simple name",
            fix="use letters, digits, '.', '_' and '-', and start with a letter or digit",
        )
    return text


def _check_revision(text: str) -> str:
    if not text or not text.isprintable() or any(char.isspace() for char in text):
        raise RuleError(f"revision {text!r} is empty or holds blanks", fix="write a branch, a tag or a commit")
    return text


def _string_list(value: object, key: str) -> tuple[str, ...]:
    """One string or a list of strings as a tuple; an empty list, other items and duplicates are refused."""
    items, listed = (tuple(value), True) if isinstance(value, tuple | list) else ((value,), False)
    if not items:
        raise RuleError(f"{key!r} is an empty list", fix="name at least one")
    seen: dict[str, None] = {}
    for number, item in enumerate(items):
        at: Loc = (number,) if listed else ()
        if not isinstance(item, str):
            what = f"{key!r} must be a string or a list of strings, not {describe(item)}"
            raise RuleError(what, fix=_retype(item), at=at)
        if item in seen:
            raise RuleError(f"{key!r} lists {item!r} twice", fix="keep one", at=at)
        seen[item] = None
    return tuple(seen)


def _parse_model_types(value: object) -> tuple[str, ...]:
    items = _string_list(value, "model_type")
    for number, item in enumerate(items):
        if _NAME.fullmatch(item) is None:
            raise RuleError(
                f"model type {item!r} is no simple name",
                fix="write the model_type of the model's config.json, e.g. qwen3",
                at=() if isinstance(value, str) else (number,),
            )
    return items


def _parse_kernels(value: object) -> tuple[KernelRef, ...]:
    refs: list[KernelRef] = []
    for number, item in enumerate(_string_list(value, "kernel")):
        try:
            refs.append(KernelRef.parse(item))
        except RuleError as error:
            at: Loc = () if isinstance(value, str) else (number,)
            raise RuleError(error.what, fix=error.fix or "", at=at) from None
    return tuple(refs)


def _parse_path(value: object) -> PathPattern:
    if isinstance(value, PathPattern):
        return value
    if not isinstance(value, str):
        raise RuleError(f"'path' must be a string, not {describe(value)}", fix=_retype(value))
    return PathPattern.parse(value)


class _Placed(BaseModel):
    """Base of the models: strict, frozen, no unknown keys, and aware of its place in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    _line: int = PrivateAttr(default=0)
    _where: str = PrivateAttr(default="recipe")

    @model_validator(mode="wrap")
    @classmethod
    def _keep_place(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, PlacedDict):
            made._line, made._where = data.line, data.where
        return made

    @property
    def line(self) -> int:
        """The line where this part of the recipe starts; 0 where it was not read from a file."""
        return self._line

    @property
    def where(self) -> str:
        """`file:line`, for error messages."""
        return self._where


class Target(_Placed):
    """Modules of one class that a patch entry takes: `{class: Qwen3MLP, path: "model.layers.*.mlp"}`."""

    class_name: Annotated[str, AfterValidator(_check_class_name)] = Field(alias="class")
    path: Annotated[InstanceOf[PathPattern], BeforeValidator(_parse_path)]


class Patch(_Placed):
    """One item of `patches`: kernels of one layout, best first, and the modules that get the layout.

    Refused: both or neither of `replace` and `fuse`; a package beside other kernels; `version` or
    `revision` without exactly one Hub kernel, or both; `trust_remote_code` where no package is named;
    fused paths that are not siblings.
    """

    kernels: Annotated[tuple[KernelRef, ...], BeforeValidator(_parse_kernels)] = Field(alias="kernel")
    replace: Target | None = None
    fuse: tuple[Target, ...] | None = None
    version: Annotated[int, Field(ge=1)] | None = None
    revision: Annotated[str, AfterValidator(_check_revision)] | None = None
    trust_remote_code: bool = False

    @property
    def targets(self) -> tuple[Target, ...]:
        """The fused targets in pair order, or the single replaced one."""
        return self.fuse if self.fuse is not None else (self.replace,) if self.replace is not None else ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self._check_kind()
        self._check_packages()
        self._check_fusion()
        return self

    def _check_kind(self) -> None:
        if self.replace is not None and self.fuse is not None:
            raise RuleError("'replace' and 'fuse' exclude each other", fix="make two patch entries of it", at=("fuse",))
        if self.replace is None and self.fuse is None:
            raise RuleError("the patch entry names no modules", fix="add 'replace' (one module) or 'fuse' (siblings)")

    def _check_packages(self) -> None:
        packages = [ref for ref in self.kernels if ref.is_package]
        if packages and len(self.kernels) > 1:
            raise RuleError(
                f"package {packages[0].text!r} stands in a list with other kernels",
                fix="give the package a patch entry of its own; only built-in IDs can share one",
                at=("kernel", self.kernels.index(packages[0])),
            )
        if not packages and "trust_remote_code" in self.model_fields_set:
            raise RuleError(
                "'trust_remote_code' on an entry that names only built-in kernels",
                fix="remove it; it is for kernel packages",
                at=("trust_remote_code",),
            )
        if self.version is not None and self.revision is not None:
            raise RuleError("'version' and 'revision' exclude each other", fix="keep one", at=("revision",))
        pinned = "version" if self.version is not None else "revision" if self.revision is not None else None
        if pinned and not (len(self.kernels) == 1 and self.kernels[0].kind == "hub"):
            raise RuleError(
                f"{pinned!r} beside {self._kernel_words()}",
                fix="remove it; it pins a single owner/repo:ClassName of the Hub",
                at=(pinned,),
            )

    def _kernel_words(self) -> str:
        if len(self.kernels) > 1:
            return "a list of kernels"
        only = self.kernels[0]
        return f"the {'local package' if only.kind == 'local' else 'built-in kernel'} {only.text!r}"

    def _check_fusion(self) -> None:
        if self.fuse is None:
            return
        if len(self.fuse) < 2:
            what = f"'fuse' needs two targets or more, not {len(self.fuse)}"
            raise RuleError(what, fix="use 'replace' for one module", at=("fuse",))
        first, seen = self.fuse[0].path, set[str]()
        for number, target in enumerate(self.fuse):
            path, at = target.path, ("fuse", number, "path")
            if path.last is None:
                raise RuleError(
                    f"fused path {path.text!r} does not end in a literal name", fix="name the child module", at=at
                )
            if path.parent != first.parent:
                raise RuleError(
                    f"fused path {path.text!r} has another parent than {first.text!r}",
                    fix="fuse only siblings: the same path up to the last segment",
                    at=at,
                )
            if path.last in seen:
                raise RuleError(f"fused path {path.text!r} appears twice", fix="name each sibling once", at=at)
            seen.add(path.last)


def _check_version(value: object) -> object:
    if value != 1 or isinstance(value, bool):
        raise RuleError(
            f"'recipe' must be the version 1, not {describe(value)}",
            fix="write `recipe: 1`, or use a kconvert that knows this version",
        )
    return value


def _check_patches(patches: tuple[Patch, ...]) -> tuple[Patch, ...]:
    if not patches:
        raise RuleError("'patches' is an empty list", fix="add an entry that starts with '- kernel:'")
    return patches


class Recipe(_Placed):
    """A whole recipe, with the text that it was read from."""

    recipe: Annotated[Literal[1], BeforeValidator(_check_version)]
    name: Annotated[str, AfterValidator(_check_name)]
    model_type: Annotated[tuple[str, ...], BeforeValidator(_parse_model_types)]
    patches: Annotated[tuple[Patch, ...], AfterValidator(_check_patches)]

    _text: str = PrivateAttr(default="")
    _path: Path | None = PrivateAttr(default=None)

    @property
    def text(self) -> str:
        """The file's text, verbatim."""
        return self._text

    @property
    def path(self) -> Path | None:
        """The file, or None where the recipe was parsed from text."""
        return self._path

    def keep_source(self, text: str, path: Path | None) -> None:
        """Remember where this recipe came from; the loader calls it once."""
        self._text, self._path = text, path


def describe(value: object) -> str:
    """A value of a recipe in the words of an error message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {value}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple | list):
        return "a list"
    return "nothing" if value is EMPTY or value is None else repr(value)


def _retype(value: object) -> str:
    """The way out where a string was wanted."""
    if isinstance(value, int):
        return f"quote it: '{str(value).lower()}'"
    return "give it a value" if value is EMPTY else "write a string"


_LEVELS: dict[str, tuple[str, ...]] = {
    "the recipe": ("recipe", "name", "model_type", "patches"),
    "a patch entry": ("kernel", "replace", "fuse", "version", "revision", "trust_remote_code"),
    "a target": ("class", "path"),
}
_LEVEL_FIXES = {
    "the recipe": "move it to the top level of the recipe",
    "a patch entry": "move it into an item of 'patches'",
    "a target": "move it into 'replace' or into an item of 'fuse'",
}


def level_of(loc: Loc) -> str:
    """Which kind of mapping lies at `loc`: `the recipe`, `a patch entry` or `a target`."""
    return "the recipe" if not loc else "a patch entry" if len(loc) == 2 else "a target"


def known_keys(loc: Loc) -> tuple[str, ...]:
    """The keys that the mapping at `loc` may have."""
    return _LEVELS[level_of(loc)]


def proper_level(key: str) -> tuple[str, str] | None:
    """Where a key that stands at the wrong level belongs, and how to say so; None for an unknown key."""
    for level, keys in _LEVELS.items():
        if key in keys:
            return level, _LEVEL_FIXES[level]
    return None
