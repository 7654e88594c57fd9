"""Stacked experts on the CPU: rows sorted by expert once, then a GEMM for each projection of each expert with rows.

torch's `grouped_mm` goes through the experts where it takes their sizes and dtype, and else a loop over those that have
rows.  The stock loop looks for the rows of every expert by itself.
The reference runs what is not the plain case, and under a compiler what `grouped_mm` does not take.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.gated_variant import gated_formula
from kconvert.kernels.grouped_mm import grouped_mm_reason
from kconvert.kernels.ops.experts.layout import ExpertsCall, ExpertsLayout, plain_call, prove_experts
from kconvert.kernels.ops.experts.plain import grouped_experts
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedMoE"]


def _loop(call: ExpertsCall) -> torch.Tensor:
    hidden_states, top_k_index, top_k_weights, params, variant = call
    top_k, num_experts = top_k_index.shape[1], params.down.shape[0]
    ids = top_k_index.reshape(-1)
    order = ids.argsort(stable=True)
    tokens = order // top_k
    rows = hidden_states[tokens]
    # not indexed: the gradient of each index would be as large as all experts
    gate_ups, downs = params.gate_up.unbind(), params.down.unbind()
    made, first = [], 0
    for expert, count in enumerate(torch.bincount(ids, minlength=num_experts)[:num_experts].tolist()):
        if not count:
            continue
        one, two = gate_ups[expert], downs[expert]
        if variant.is_transposed:
            one, two = one.t(), two.t()
        both = F.linear(
            rows[first : first + count], one, None if params.gate_up_bias is None else params.gate_up_bias[expert]
        )
        gated = gated_formula(both, variant.gate)
        made.append(F.linear(gated, two, None if params.down_bias is None else params.down_bias[expert]))
        first += count
    out = torch.zeros_like(hidden_states)
    if made:
        weighted = torch.cat(made) * top_k_weights.reshape(-1)[order[:first], None]
        out.index_add_(0, tokens[:first], weighted.to(out.dtype))
    return out


@register_kernel
class CpuFusedMoE(LayoutKernel):
    """All experts of a mixture, each with its rows at once."""

    _kernel_id = "cpu_fused_moe"
    _device = DeviceType.CPU
    layout = ExpertsLayout

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be the layout's formula with a gate that is known."""
        return prove_experts(cast("ExpertsLayout", module))

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tokens `[T, n]`, indices `[T, k]` and weights `[T, k]`, under the stock names, to `[T, n]`."""
        call = plain_call(module, args, kwargs)
        if call is None:
            return cast("torch.Tensor", cast("ExpertsLayout", module).reference(*args, **kwargs))
        if grouped_mm_reason(call.hidden_states, call.params.gate_up, call.params.down) is None:
            return grouped_experts(call)
        if torch.compiler.is_compiling():
            return cast("torch.Tensor", cast("ExpertsLayout", module).reference(*args, **kwargs))
        return _loop(call)
