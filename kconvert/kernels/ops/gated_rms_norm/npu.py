"""RMSNorm with a gate on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_rms_norm.layout import GatedRMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedGatedRMSNorm"]


@register_kernel
class NpuFusedGatedRMSNorm(LayoutKernel):
    """RMSNorm and its gate in one Ascend NPU kernel."""

    _kernel_id = "npu_fused_gated_rmsnorm"
    _device = DeviceType.NPU
    layout = GatedRMSNormLayout
