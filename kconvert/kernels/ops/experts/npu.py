"""Stacked experts on Ascend NPU: tokens sorted, grouped GEMMs, and weighted sums, each by an operator; for inference."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.ascend.experts import Weights, experts
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.experts.layout import ExpertsLayout, is_plain_call, prove_experts
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
        layout = cast("ExpertsLayout", module)
        inputs, (variant, _) = layout.kconvert_inputs(args, kwargs), layout.kconvert_variant
        parameters = module._parameters
        gate_up, down = (cast("torch.Tensor", parameters[name]) for name in ("gate_up_proj", "down_proj"))
        if inputs is None or variant is None or not is_plain_call(inputs, gate_up) or not inputs[1].numel():
            return cast("torch.Tensor", layout.reference(*args, **kwargs))
        if not variant.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        weights = Weights(gate_up, down, parameters.get("gate_up_proj_bias"), parameters.get("down_proj_bias"))
        return experts(*inputs, weights, variant.gate).to(inputs[0].dtype)
