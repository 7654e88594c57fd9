"""The runtime: converted directories as transformers models.

`load_converted` is looked up when first used: what only looks at the machine (`environment`) must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.runtime.loader import load_converted

__all__ = ["load_converted"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kconvert.runtime import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
