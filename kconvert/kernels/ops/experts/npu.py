"""Stacked experts on Ascend NPU: tokens sorted, grouped GEMMs, and weighted sums, each by an operator; for inference."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.ascend.experts import experts
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.experts.layout import ExpertsLayout, plain_call, prove_experts
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedMoE"]


@register_kernel
class NpuFusedMoE(NpuKernel):
    """All experts of a mixture in two grouped GEMMs."""

    _kernel_id = "npu_fused_moe"
    layout = ExpertsLayout
    has_backward = False  # npu_grouped_matmul has none
    operators = ("npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute")

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be the layout's formula with a gate that is known."""
        return prove_experts(cast("ExpertsLayout", module))

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tokens `[T, n]`, indices `[T, k]` and weights `[T, k]`, under the stock names, to `[T, n]`."""
        call = plain_call(module, args, kwargs)
        if call is None or not call.top_k_index.numel():
            return cast("torch.Tensor", cast("ExpertsLayout", module).reference(*args, **kwargs))
        hidden_states, index, weights, params, variant = call
        params = params if variant.is_transposed else params.transposed()
        return experts(hidden_states, index, weights, params, variant.gate).to(hidden_states.dtype)
