"""What kernels of Liger have in common: its functions of tensors, adapted to our layouts, to choose and to compare.

Only functions are called.  Liger's own way, which replaces classes and names of transformers for the whole process, is not used.
"""

from __future__ import annotations

from importlib.util import find_spec

from kconvert.kernels.cuda import CudaKernel

__all__ = ["LigerKernel"]


class LigerKernel(CudaKernel):
    """A kernel of a layout whose device code is in the installed `liger-kernel`."""

    default = False
    can_torch_compile = False

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        missing = "liger-kernel is not installed: pip install liger-kernel"
        return super().check_deps() or (missing if find_spec("liger_kernel") is None else None)
