"""The runtime: converted directories as transformers models.

`load_converted` is looked up when first used: what only looks at the machine (`environment`) must not load torch.  Where a
torch backend is installed and broken, torch is imported without it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from kconvert.backends import hide_broken_backends

if TYPE_CHECKING:
    from kconvert.runtime.loader import load_converted

__all__ = ["load_converted"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for backend, reason in hide_broken_backends().items():
            message = f"{backend} is installed but does not import ({reason}); going on without it"
            warnings.warn(message, stacklevel=3)
        from kconvert.runtime import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
