"""RMSNorm with a gate on Ascend NPU: the norm by an operator, the gate around it."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from kconvert.kernels.ascend.gated_rms_norm import gated_rms_norm
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.gated_rms_norm.layout import GatedRMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedGatedRMSNorm"]


@register_kernel
class NpuFusedGatedRMSNorm(NpuKernel):
    """RMSNorm and its gate, with the norm in one operator."""

    _kernel_id = "npu_fused_gated_rmsnorm"
    layout = GatedRMSNormLayout
    operators = ("npu_rms_norm",)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden_states` `[..., n]` and `gate` of the same shape; the result has the stock forward's dtype and shape."""
        norm = cast("GatedRMSNormLayout", module)
        takes = 2 <= hidden_states.dim() <= 7 and hidden_states.numel() > 0
        if not takes or norm.needs_reference(hidden_states, gate):
            return cast("torch.Tensor", norm.reference(hidden_states, gate))
        variant = norm.variant
        normed = gated_rms_norm(
            hidden_states,
            gate,
            norm.weight,
            eps=variant.eps,
            num_groups=variant.num_groups,
            is_silu=variant.activation == "silu",
            gate_first=variant.gate_first,
            cast_first=variant.cast_first,
        )
        return normed.squeeze(1) if variant.squeezes and normed.dim() == 3 else normed

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("GatedRMSNormLayout", module).variant.why_not
