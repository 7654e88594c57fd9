"""RMSNorm and packed gated MLP on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRMSNormSwiGLU"]


@register_kernel
class NpuFusedRMSNormSwiGLU(LayoutKernel):
    """RMSNorm and silu(gate) * up as one Ascend NPU path."""

    _kernel_id = "npu_fused_rmsnorm_swiglu"
    _device = DeviceType.NPU
    layout = NormGatedMLPLayout
    default = False
