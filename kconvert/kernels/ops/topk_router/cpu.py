"""A router on the CPU: the stock operations, without those that only make masks of groups."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.topk_router.layout import Routed, TopKRouterLayout
from kconvert.kernels.registry import register_kernel
from kconvert.kernels.router_variant import router_formula

__all__ = ["CpuFusedRouter"]


@register_kernel
class CpuFusedRouter(LayoutKernel):
    """Scores, top-k and weights in plain torch, with the bits of stock."""

    _kernel_id = "cpu_fused_router"
    _device = DeviceType.CPU
    layout = TopKRouterLayout

    @staticmethod
    def forward(
        module: nn.Module, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor | None = None
    ) -> Routed:
        """`hidden_states` `[..., n]` to logits `[T, E]`, weights and indices `[T, k]`, in the dtypes of the stock forward."""
        return cast("TopKRouterLayout", module).kconvert_route(hidden_states, e_score_correction_bias, router_formula)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        variant = cast("TopKRouterLayout", module).variant
        return variant if isinstance(variant, str) else None
