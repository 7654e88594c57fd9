"""The rotary embedding of q and k on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.rope.layout import RopeLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRope"]


@register_kernel
class NpuFusedRope(LayoutKernel):
    """The stock attention with norms and rotation of q and k in one Ascend NPU kernel."""

    _kernel_id = "npu_fused_rope"
    _device = DeviceType.NPU
    layout = RopeLayout
