"""Packed gated MLP on CUDA: the IDs, so that recipes can name them; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedGeGLU", "CudaFusedSwiGLU"]


@register_kernel
class CudaFusedSwiGLU(LayoutKernel):
    """silu(gate) * up in one CUDA kernel on the packed projection."""

    _kernel_id = "cuda_fused_swiglu"
    _device = DeviceType.CUDA
    layout = GatedMLPLayout


@register_kernel
class CudaFusedGeGLU(LayoutKernel):
    """gelu_tanh(gate) * up in one CUDA kernel on the packed projection."""

    _kernel_id = "cuda_fused_geglu"
    _device = DeviceType.CUDA
    layout = GatedMLPLayout
