"""Packed attention projections on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedQKV"]


@register_kernel
class NpuFusedQKV(LayoutKernel):
    """The stock attention with q, k and v from one Ascend NPU projection."""

    _kernel_id = "npu_fused_qkv"
    _device = DeviceType.NPU
    layout = QKVProjLayout
