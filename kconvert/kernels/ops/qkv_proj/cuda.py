"""Packed attention projections on CUDA: one GEMM, then norms and rotation of q and k in one Triton kernel.

Where a compiler traces the model, or the forward has no rotary embedding that is known, only the projections are joined.
"""

from __future__ import annotations

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout, RotatingKernel
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedQKV"]


@register_kernel
class CudaFusedQKV(RotatingKernel, CudaKernel):
    """The stock forward with q, k and v from one projection, and q and k normed and rotated in one kernel."""

    _kernel_id = "cuda_fused_qkv"
    layout = QKVProjLayout
