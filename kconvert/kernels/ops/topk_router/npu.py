"""A router on Ascend NPU: its product, and the choice in one operator."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from kconvert.kernels.ascend.router import choose_experts, why_not
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.topk_router.layout import Routed, TopKRouterLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRouter"]


@register_kernel
class NpuFusedRouter(NpuKernel):
    """Scores, top-k and weights in one operator."""

    _kernel_id = "npu_fused_router"
    layout = TopKRouterLayout
    operators = ("npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax")
    has_backward = False

    @staticmethod
    def forward(
        module: nn.Module, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor | None = None
    ) -> Routed:
        """`hidden_states` `[..., n]` to logits `[T, E]`, weights and indices `[T, k]`, in the dtypes of the stock forward."""
        return cast("TopKRouterLayout", module).kconvert_route(hidden_states, e_score_correction_bias, choose_experts)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants that an operator computes."""
        variant = cast("TopKRouterLayout", module).variant
        return variant if isinstance(variant, str) else why_not(variant)
