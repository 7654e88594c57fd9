"""Stacked experts on Ascend NPU: the ID, so that recipes can name it; the device code is still to come."""

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.experts.layout import ExpertsLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedMoE"]


@register_kernel
class NpuFusedMoE(LayoutKernel):
    """All experts of a mixture on an Ascend NPU."""

    _kernel_id = "npu_fused_moe"
    _device = DeviceType.NPU
    layout = ExpertsLayout
