"""RMSNorm on CUDA: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedRMSNorm"]


@register_kernel
class CudaFusedRMSNorm(LayoutKernel):
    """RMSNorm in one CUDA kernel."""

    _kernel_id = "cuda_fused_rmsnorm"
    _device = DeviceType.CUDA
    layout = RMSNormLayout
