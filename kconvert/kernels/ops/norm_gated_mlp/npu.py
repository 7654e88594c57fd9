"""RMSNorm and packed gated MLP on Ascend NPU: the kernels of both layouts, one after the other."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.gated_mlp.npu import NpuFusedSwiGLU
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.kernels.ops.rms_norm.npu import NpuFusedRMSNorm
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRMSNormSwiGLU"]


@register_kernel
class NpuFusedRMSNormSwiGLU(NpuKernel):
    """The NPU kernels of both layouts in one call."""

    _kernel_id = "npu_fused_rmsnorm_swiglu"
    layout = NormGatedMLPLayout
    default = False
    operators = (*NpuFusedRMSNorm.operators, *NpuFusedSwiGLU.operators)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        fused = cast("Any", module)
        return NpuFusedSwiGLU.forward(fused.mlp, NpuFusedRMSNorm.forward(fused.norm, hidden_states))

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """What either kernel says."""
        fused = cast("NormGatedMLPLayout", module)
        return NpuFusedRMSNorm.supports(fused.norm) or NpuFusedSwiGLU.supports(fused.mlp)
