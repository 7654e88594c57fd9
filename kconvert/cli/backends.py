"""torch backends that are installed and broken, as `torch_npu` is without the CANN libraries.

torch then fails to import, and transformers fails where it asks for NPUs.  A command of ours can go on
without: in its own process the backend is hidden, and one line says so.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from kconvert.cli.output import warn
from kconvert.errors import one_line
from kconvert.runtime.environment import TORCH_BACKENDS

__all__ = ["prepare_torch"]


def prepare_torch() -> None:
    """Make torch importable in this process; call it before anything imports torch."""
    present = [name for name in TORCH_BACKENDS if name not in sys.modules and find_spec(name) is not None]
    if not present or "torch" in sys.modules:
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    for name in present:
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken installation raises what it likes
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say: not importable
            warn(f"{name} is installed but does not import ({one_line(error)}); going on without it")
