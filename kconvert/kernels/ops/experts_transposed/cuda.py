"""Experts with transposed weights on CUDA: the kernel of `experts`, which takes weights of either form."""

from __future__ import annotations

from kconvert.kernels.ops.experts.cuda import CudaFusedMoE
from kconvert.kernels.ops.experts_transposed.layout import TransposedExpertsLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedMoETransposed"]


@register_kernel
class CudaFusedMoETransposed(CudaFusedMoE):
    """All experts of a mixture, over weights `[E, inputs, outputs]`."""

    _kernel_id = "cuda_fused_moe_transposed"
    layout = TransposedExpertsLayout
    default = False
