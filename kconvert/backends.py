"""torch backends that are installed and broken, as `torch_npu` is without the CANN libraries.

torch then fails to import, and transformers fails where it asks for NPUs.  kconvert can go on without: in this process the
backend is hidden before torch is imported.  Importing this loads no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from kconvert.errors import one_line

__all__ = ["BROKEN", "TORCH_BACKENDS", "hide_broken_backends"]

TORCH_BACKENDS = ("torch_npu",)
"""Import names of what torch loads by itself, and cannot be imported with where it is broken."""

BROKEN: dict[str, str] = {}
"""What was hidden in this process, and why."""


def hide_broken_backends() -> Mapping[str, str]:
    """Make torch importable in this process; call it before anything imports torch, else it does nothing.

    Torch is told not to load backends by itself (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`); those that work are loaded here.

    Returns:
        The backends that are hidden from now on, and why they do not import.
    """
    present = [name for name in TORCH_BACKENDS if name not in sys.modules and find_spec(name) is not None]
    if not present or "torch" in sys.modules:
        return {}
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    hidden: dict[str, str] = {}
    for name in present:
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken installation raises what it likes
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say: not importable
            hidden[name] = one_line(error)
    BROKEN.update(hidden)
    return hidden
