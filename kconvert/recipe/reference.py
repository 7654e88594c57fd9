"""How a recipe names a kernel: the three kinds of reference.

`cuda_fused_swiglu` is an ID of the registry, `./folder:ClassName` a class of a kernel package on disk, and
`owner/repo:ClassName` one of a package on the Hub.  Refused: a package without a class, a class name that is no
Python identifier, repository names that the Hub has not, and blanks.  Whether the kernel exists is not decided
here.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Literal

from kconvert.errors import RecipeError

__all__ = ["KernelRef", "check_class_name"]

_BUILTIN = re.compile(r"[a-z][a-z0-9_]*")
_LOCAL = re.compile(r"\.{1,2}(?:/.*)?|/.*")
_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_KINDS = "write a built-in ID (cuda_fused_swiglu), ./folder:ClassName or owner/repo:ClassName"


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
            RecipeError: none of the three kinds, or a class name that is no Python identifier.
        """
        if _BUILTIN.fullmatch(text):
            return cls("builtin", text, text)
        if not text.isprintable() or text != text.strip():
            raise RecipeError(f"kernel {text!r} has blanks around it or control characters", fix=_KINDS)
        source, colon, class_name = text.rpartition(":")
        if not colon and (_LOCAL.fullmatch(text) or _HUB.fullmatch(text)):
            raise RecipeError(f"kernel {text!r} names no class", fix=f"write {text}:ClassName")
        if _LOCAL.fullmatch(source):
            return cls("local", text, source, check_class_name(class_name))
        if _HUB.fullmatch(source) and ".." not in source and "--" not in source:
            return cls("hub", text, source, check_class_name(class_name))
        raise RecipeError(f"kernel {text!r} is neither a built-in ID nor a package reference", fix=_KINDS)


def check_class_name(text: str) -> str:
    """`text`, where it can be the name of a Python class.

    Raises:
        RecipeError: it cannot.
    """
    if not (text.isascii() and text.isidentifier()) or keyword.iskeyword(text):
        raise RecipeError(
            f"class name {text!r} is no Python identifier", fix="write the bare class name, e.g. Qwen3MLP"
        )
    return text
