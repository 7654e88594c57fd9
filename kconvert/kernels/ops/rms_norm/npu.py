"""RMSNorm on Ascend NPU, by the fused operators for it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.ascend.rms_norm import add_rms_norm, rms_norm
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRMSNorm"]


def _takes(weight: torch.Tensor | None, hidden: torch.Tensor) -> bool:
    """Whether the operators take this input: of their dtypes, two to eight dimensions, and not empty."""
    is_same = weight is None or weight.dtype == hidden.dtype
    return is_same and hidden.is_floating_point() and 2 <= hidden.dim() <= 8 and hidden.numel() > 0


@register_kernel
class NpuFusedRMSNorm(NpuKernel):
    """RMSNorm, with or without a weight, in one operator."""

    _kernel_id = "npu_fused_rmsnorm"
    layout = RMSNormLayout
    operators = ("npu_rms_norm",)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., n]`; the result has the dtype that the stock forward gives."""
        norm = cast("Any", module)
        has_weight, _, eps, offset, _ = norm.kconvert_arithmetic
        weight = norm.weight if has_weight else None
        if not _takes(weight, hidden_states):
            return cast("torch.Tensor", norm.reference(hidden_states))
        return rms_norm(hidden_states, weight, eps=eps, offset=offset)

    @staticmethod
    def add_forward(
        module: nn.Module, residual: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + hidden_states`, both `[..., n]` and of one dtype, and the norm of that, in one operator where that can be."""
        norm = cast("Any", module)
        has_weight, _, eps, offset, _ = norm.kconvert_arithmetic
        weight = norm.weight if has_weight else None
        inputs = (residual, hidden_states, weight)
        needs_grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
        if weight is None or offset != 0.0 or needs_grad or not _takes(weight, hidden_states):
            total = residual + hidden_states
            return total, NpuFusedRMSNorm.forward(module, total)
        normed, total = add_rms_norm(hidden_states, residual, weight, eps=eps)
        return total, normed

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("RMSNormLayout", module).variant.why_not
