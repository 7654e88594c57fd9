"""What all kernels for Ascend NPUs share: their device, and the operators of `torch_npu` that they call.

`torch_npu` is imported when a kernel is asked for, and never before: where the CANN libraries are missing it does not import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from kconvert.kernels.base import DeviceType, LayoutKernel

__all__ = ["NpuKernel", "npu_ops"]


def npu_ops() -> Any:
    """`torch_npu`, which has the operators as functions."""
    return import_module("torch_npu")


class NpuKernel(LayoutKernel):
    """A kernel of a layout on fused operators of `torch_npu`.

    Class attributes:
        operators: those that it cannot do without.
    """

    _device: ClassVar[DeviceType] = DeviceType.NPU
    operators: ClassVar[tuple[str, ...]] = ()
    can_torch_compile = False  # not tried: a compiled model runs the reference
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32"})

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        reason = super().check_deps()
        if reason is not None:
            return reason
        missing = [name for name in cls.operators if not hasattr(npu_ops(), name)]
        return f"this torch_npu has no {missing[0]}" if missing else None
