"""Packed attention projections on the CPU: one GEMM, then the stock forward's own attention."""

from __future__ import annotations

from kconvert.kernels.base import DeviceType
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedQKV"]


@register_kernel
class CpuFusedQKV(JoinedKernel):
    """The stock forward with q, k and v from one projection."""

    _kernel_id = "cpu_fused_qkv"
    _device = DeviceType.CPU
    layout = QKVProjLayout
