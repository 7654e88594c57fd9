"""Experts with transposed weights on Ascend NPU: the kernel of `experts`, which takes weights of either form."""

from __future__ import annotations

from kconvert.kernels.ops.experts.npu import NpuFusedMoE
from kconvert.kernels.ops.experts_transposed.layout import TransposedExpertsLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedMoETransposed"]


@register_kernel
class NpuFusedMoETransposed(NpuFusedMoE):
    """All experts of a mixture, over weights `[E, inputs, outputs]`."""

    _kernel_id = "npu_fused_moe_transposed"
    layout = TransposedExpertsLayout
    default = False
