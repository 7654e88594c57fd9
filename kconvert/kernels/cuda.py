"""What all kernels for NVIDIA GPUs share: their device, and what they need beside it.

Their device code is in Triton, which is looked for without importing it: it is imported when a kernel first runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

from kconvert.kernels.base import DeviceType, LayoutKernel

__all__ = ["CudaKernel"]


class CudaKernel(LayoutKernel):
    """A kernel of a layout whose device code is in Triton."""

    _device: ClassVar[DeviceType] = DeviceType.CUDA

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        reason = super().check_deps()
        if reason is None and find_spec("triton") is None:
            reason = "Triton is not installed: pip install triton"
        return reason
