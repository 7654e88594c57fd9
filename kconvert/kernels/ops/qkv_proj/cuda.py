"""Packed attention projections on CUDA: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedQKV"]


@register_kernel
class CudaFusedQKV(LayoutKernel):
    """The stock attention with q, k and v from one CUDA projection."""

    _kernel_id = "cuda_fused_qkv"
    _device = DeviceType.CUDA
    layout = QKVProjLayout
