"""The choice of experts by the operators of `torch_npu` for it, which take float32 and have no gradient.

Both choose the first of equal experts and give the choices in order.  `npu_moe_gating_top_k` always divides by the sum of the weights;
that of a softmax does not.  Weights by a softmax over the chosen logits are those of one over all, divided.
"""

from __future__ import annotations

import torch

from kconvert.kernels.npu import npu_ops
from kconvert.kernels.router_variant import RouterVariant

__all__ = ["choose_experts", "why_not"]


def why_not(variant: RouterVariant) -> str | None:
    """Why no operator computes a variant, or None."""
    if variant.scores != "sigmoid":
        has_more = variant.has_bias or variant.groups is not None
        return "no operator has a bias or groups behind a softmax" if has_more else None
    if variant.eps is None:
        return "the operator divides weights by their sum"
    if variant.groups is not None and variant.groups.masks_with_zero:
        return "the operator chooses from the best groups alone"
    return None


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices `[T, k]` of logits `[T, E]`; see `router_formula`, whose arguments these are."""
    wide = logits.float()
    if variant.scores == "sigmoid":
        groups = variant.groups
        weights, index, _ = npu_ops().npu_moe_gating_top_k(
            wide,
            variant.top_k,
            bias=None if bias is None else bias.float(),
            k_group=1 if groups is None else groups.num_kept,
            group_count=1 if groups is None else groups.num_groups,
            group_select_mode=0 if groups is None else int(groups.by_two),
            renorm=0,
            norm_type=1,
            out_flag=False,
            routed_scaling_factor=variant.factor,
            eps=variant.eps,
        )
    else:
        weights, index, _ = npu_ops().npu_moe_gating_top_k_softmax(wide, None, variant.top_k)
        if variant.scores == "logits":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if variant.eps is not None:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + variant.eps)
        weights = weights * variant.factor
    scored = logits.dtype if variant.scores == "logits" else torch.float32
    return weights.to(dtype if variant.casts else scored), index.long()
