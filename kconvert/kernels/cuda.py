"""What all kernels for NVIDIA GPUs share: their device, and what they need beside it.

Their device code is in Triton, which is looked for without importing it: it is imported when a kernel first runs.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from packaging.version import InvalidVersion, Version

from kconvert.kernels.base import DeviceType, LayoutKernel

__all__ = ["CudaKernel", "c_compiler"]


class CudaKernel(LayoutKernel):
    """A kernel of a layout whose device code is in Triton."""

    _device: ClassVar[DeviceType] = DeviceType.CUDA

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        return super().check_deps() or _triton_reason()


_OLDEST = "3.6"


def c_compiler() -> str | None:
    """The C compiler that Triton finds; without one it launches nothing."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def _triton_reason() -> str | None:
    """Why Triton cannot be used, or None; it is not imported."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if c_compiler() is None:
        return "Triton finds no C compiler: install gcc, or set CC"
    try:
        found = Version(version("triton"))
    except (PackageNotFoundError, InvalidVersion):  # a build of its own, under another name
        return None
    return None if found >= Version(_OLDEST) else f"Triton {found} is older than {_OLDEST}"
