"""Packed gated MLP on Ascend NPU: the IDs, so that recipes can name them; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedGeGLU", "NpuFusedSwiGLU"]


@register_kernel
class NpuFusedSwiGLU(LayoutKernel):
    """silu(gate) * up in one Ascend NPU kernel on the packed projection."""

    _kernel_id = "npu_fused_swiglu"
    _device = DeviceType.NPU
    layout = GatedMLPLayout


@register_kernel
class NpuFusedGeGLU(LayoutKernel):
    """gelu(gate) * up in one Ascend NPU kernel on the packed projection."""

    _kernel_id = "npu_fused_geglu"
    _device = DeviceType.NPU
    layout = GatedMLPLayout
