"""Experts in plain torch, by its `grouped_mm`: what a compiler is shown in place of device code, and a CPU's fast way.

No number is read from a device, so a model is traced whole, and compiled once for all choices of a router.
"""

from __future__ import annotations

import torch

from kconvert.kernels.gated_variant import gated_formula
from kconvert.kernels.grouped_mm import grouped_mm
from kconvert.kernels.ops.experts.layout import ExpertsCall

__all__ = ["grouped_experts"]


def grouped_experts(call: ExpertsCall) -> torch.Tensor:
    """`[T, n]`; see the layout.

    A choice at or past the number of experts adds nothing.
    """
    hidden_states, top_k_index, top_k_weights, params, variant = call
    params = params if variant.is_transposed else params.transposed()
    num_experts, top_k = params.down.shape[0], top_k_index.shape[1]
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    is_left_out = (ids >= num_experts)[:, None]
    # on the CPU it costs nothing to look; and past the last row of the last expert nothing is written
    has_left_out = ids.device.type != "cpu" or torch.compiler.is_compiling() or bool(is_left_out.any())
    last = ids.clamp(max=num_experts - 1)

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = grouped_mm(rows, weight, offs=ends)
        if has_left_out:
            made = made.masked_fill(is_left_out, 0.0)
        return made if bias is None else made + bias[last]

    rows, weights = hidden_states[order // top_k], top_k_weights.reshape(-1)[order][:, None]
    if has_left_out:
        rows, weights = rows.masked_fill(is_left_out, 0.0), weights.masked_fill(is_left_out, 0.0)
    both = linear(rows, params.gate_up, params.gate_up_bias)
    made = linear(gated_formula(both, variant.gate), params.down, params.down_bias) * weights
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return made[places].view(-1, top_k, hidden_states.shape[1]).sum(dim=1).to(hidden_states.dtype)
