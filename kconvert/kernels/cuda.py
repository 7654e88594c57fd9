"""What all kernels for NVIDIA GPUs share: their device, and what they need beside it.

Their device code is in Triton, which is looked for without importing it: it is imported when a kernel first runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from packaging.version import InvalidVersion, Version

from kconvert.kernels.base import DeviceType, LayoutKernel

__all__ = ["CudaKernel"]


class CudaKernel(LayoutKernel):
    """A kernel of a layout whose device code is in Triton."""

    _device: ClassVar[DeviceType] = DeviceType.CUDA

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        return super().check_deps() or _triton_reason()


_OLDEST = "3.6"


def _triton_reason() -> str | None:
    """Why Triton cannot be used, or None; it is not imported."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    try:
        found = Version(version("triton"))
    except (PackageNotFoundError, InvalidVersion):  # a build of its own, under another name
        return None
    return None if found >= Version(_OLDEST) else f"Triton {found} is older than {_OLDEST}"
