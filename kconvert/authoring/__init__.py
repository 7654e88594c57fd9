"""For people who write kernels: a package to start from, and checks of what they wrote.

`new_kernel` writes a working two-class package; `check_kernel` holds a package against the modules that it is to
replace.  Importing this loads no torch: a function's module is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.authoring.check import check_kernel
    from kconvert.authoring.report import Check, CheckReport, Outcome
    from kconvert.authoring.scaffold import NewKernel, new_kernel

__all__ = ["Check", "CheckReport", "NewKernel", "Outcome", "check_kernel", "new_kernel"]

_HOMES = {
    "Check": "report",
    "CheckReport": "report",
    "NewKernel": "scaffold",
    "Outcome": "report",
    "check_kernel": "check",
    "new_kernel": "scaffold",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
