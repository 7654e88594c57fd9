"""Packed attention projections on Ascend NPU: one GEMM, then norms and rotation of q and k by operators."""

from __future__ import annotations

from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout, RotatingKernel
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedQKV"]


@register_kernel
class NpuFusedQKV(RotatingKernel, NpuKernel):
    """The stock forward with q, k and v from one projection, and q and k normed and rotated by operators."""

    _kernel_id = "npu_fused_qkv"
    layout = QKVProjLayout
    operators = ("npu_rotary_mul", "npu_rms_norm")
