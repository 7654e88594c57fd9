"""RMSNorm on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRMSNorm"]


@register_kernel
class NpuFusedRMSNorm(LayoutKernel):
    """RMSNorm in one Ascend NPU kernel."""

    _kernel_id = "npu_fused_rmsnorm"
    _device = DeviceType.NPU
    layout = RMSNormLayout
