"""Experts with transposed weights on CPU: the kernel of `experts`, which takes weights of either form."""

from __future__ import annotations

from kconvert.kernels.ops.experts.cpu import CpuFusedMoE
from kconvert.kernels.ops.experts_transposed.layout import TransposedExpertsLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedMoETransposed"]


@register_kernel
class CpuFusedMoETransposed(CpuFusedMoE):
    """All experts of a mixture, over weights `[E, inputs, outputs]`."""

    _kernel_id = "cpu_fused_moe_transposed"
    layout = TransposedExpertsLayout
    default = False
