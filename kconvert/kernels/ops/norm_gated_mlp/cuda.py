"""RMSNorm and packed gated MLP on CUDA: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedRMSNormSwiGLU"]


@register_kernel
class CudaFusedRMSNormSwiGLU(LayoutKernel):
    """RMSNorm and silu(gate) * up as one CUDA path."""

    _kernel_id = "cuda_fused_rmsnorm_swiglu"
    _device = DeviceType.CUDA
    layout = NormGatedMLPLayout
    default = False
