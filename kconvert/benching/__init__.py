"""How fast the kernels are on this machine: beside the stock forward, `torch.compile`, and Liger where it is installed.

`bench_kernels` first checks that a kernel gives what the stock forward gives, within the limits of `verify`, and times it
only then.  Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kconvert.benching.run import BenchReport, BenchRow, bench_kernels

__all__ = ["BenchReport", "BenchRow", "bench_kernels"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
