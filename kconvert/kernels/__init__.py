"""Kernels: the registry, and how they are put into a live model.

Importing this package loads no torch.
"""

from __future__ import annotations

from typing import Any

from kconvert.kernels.base import BaseKernel, DeviceType, LayoutKernel
from kconvert.kernels.registry import Registry, register_kernel, scan_all_kernels

__all__ = [
    "BaseKernel",
    "DeviceType",
    "LayoutKernel",
    "Registry",
    "apply_default_kernels",
    "apply_kernel",
    "register_kernel",
    "scan_all_kernels",
]


def apply_kernel(kernel_id: str, **kwargs: Any) -> Any:
    """Put one kernel into a live model; see `kconvert.kernels.live.apply_kernel`."""
    from kconvert.kernels import live

    return live.apply_kernel(kernel_id, **kwargs)


def apply_default_kernels(model: Any, include_kernels: str | bool | None = None) -> Any:
    """Put kernels into a live model; see `kconvert.kernels.live.apply_default_kernels`."""
    from kconvert.kernels import live

    return live.apply_default_kernels(model, include_kernels)
