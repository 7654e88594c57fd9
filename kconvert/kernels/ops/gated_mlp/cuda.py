"""Packed gated MLP on CUDA: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedSwiGLU"]


@register_kernel
class CudaFusedSwiGLU(LayoutKernel):
    """silu(gate) * up in one CUDA kernel on the packed projection."""

    _kernel_id = "cuda_fused_swiglu"
    _device = DeviceType.CUDA
    layout = GatedMLPLayout
