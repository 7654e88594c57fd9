"""kconvert: compile a Hugging Face checkpoint, once and offline, into the form that fast kernels want.

`load_converted` is looked up when first used, so that `import kconvert` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.runtime import load_converted

__all__ = ["__version__", "load_converted"]

__version__ = "0.1.0"

_LAZY = {"load_converted": "kconvert.runtime"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
