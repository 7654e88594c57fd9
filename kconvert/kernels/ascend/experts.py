"""A mixture's experts: tokens sorted by `npu_moe_token_permute`, two `npu_grouped_matmul`, and `npu_moe_token_unpermute`.

`npu_grouped_matmul` wants weights as `[experts, inputs, outputs]`, and has no gradient.
"""

from __future__ import annotations

from typing import cast

import torch

from kconvert.kernels.ascend.gated_act import gated_act
from kconvert.kernels.expert_weights import ExpertWeights
from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.npu import npu_ops

__all__ = ["experts"]

_SORTED_ROWS = 0
"""Groups are runs of rows."""
_ENDS = 0
"""The list of groups holds where each one ends."""
_ONE_RESULT = 2


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    gate: GatedVariant,
) -> torch.Tensor:
    """The weighted sum of the chosen experts of each token.

    Args:
        hidden_states: `[tokens, hidden]`, not empty.
        top_k_index: `[tokens, k]`; one at or past the number of experts adds nothing.
        top_k_weights: `[tokens, k]`.
        weights: `[E, inputs, outputs]`, in the dtype of `hidden_states`.
        gate: what is between the two products.
    """
    ops, num_experts = npu_ops(), weights.down.shape[0]
    rows, places = ops.npu_moe_token_permute(hidden_states, top_k_index)
    chosen = top_k_index.reshape(-1)
    ids = torch.empty_like(chosen).scatter_(0, places.long(), chosen)
    numbers = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, numbers, right=True)
    is_left_out = (ids >= num_experts)[:, None]  # nothing is written there
    last = ids.clamp(max=num_experts - 1)

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        (made,) = ops.npu_grouped_matmul(
            [rows],
            [weight],
            group_list=ends,
            split_item=_ONE_RESULT,
            group_type=_SORTED_ROWS,
            group_list_type=_ENDS,
        )
        made = made.masked_fill(is_left_out, 0.0)
        return cast("torch.Tensor", made if bias is None else made + bias[last])

    both = linear(rows, weights.gate_up, weights.gate_up_bias)
    made = linear(gated_act(both, gate), weights.down, weights.down_bias)
    shares = top_k_weights.masked_fill(top_k_index >= num_experts, 0.0).to(made.dtype)
    return cast("torch.Tensor", ops.npu_moe_token_unpermute(made, places, probs=shares))
