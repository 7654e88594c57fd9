"""What a router of a mixture computes, as data and as a formula in plain torch.

    s = softmax(logits) | sigmoid(logits) | logits
    c = s + bias, and where there are groups, only inside of the best of them
    index = where c is largest,    w = s[index], or its softmax where s are the logits
    weights = w / (sum(w) + eps) * factor, or w * factor

Nothing is decided here: the layout finds the variant of a stock class, kernels compute it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["Groups", "RouterVariant", "router_formula", "router_logits"]


class Groups(NamedTuple):
    """Experts in groups of one size, of which only the best are chosen from.

    Attributes:
        num_groups: how many there are.
        num_kept: how many are chosen from.
        by_two: a group is as good as its two best experts together, not as its best one.
        masks_with_zero: what stands for the experts of the others is 0, which is above a negative score, not -inf.
    """

    num_groups: int
    num_kept: int
    by_two: bool
    masks_with_zero: bool


class RouterVariant(NamedTuple):
    """What is computed.

    Attributes:
        top_k: how many experts a token gets.
        scores: what experts are compared by; `logits` are turned into weights by a softmax over those that are chosen.
        product: the logits are made in the dtype of the weight (`own`), and cast to float32 behind (`cast`), or of inputs
            cast to it (`wide`).
        eps: added to the sum by which weights are divided; None where they are not.
        factor: what weights are multiplied with last.
        casts: weights have the dtype of the hidden states, not that of the scores.
        has_bias: a bias of the scores decides which experts are chosen, and is not in the weights.
        groups: the groups of experts, or None.
        is_sorted: the stock forward asks for the choices in order.  Kernels give them so in any case.
        flattens: hidden states of more dimensions are taken as rows.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    product: Literal["own", "cast", "wide"] = "own"
    eps: float | None = None
    factor: float = 1.0
    casts: bool = True
    has_bias: bool = False
    groups: Groups | None = None
    is_sorted: bool = True
    flattens: bool = True


def router_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant
) -> torch.Tensor:
    """Hidden states `[..., n]` to logits `[T, E]`, `[..., E]` where the variant does not flatten; `weight` is `[E, n]`."""
    rows = hidden.reshape(-1, hidden.shape[-1]) if variant.flattens else hidden
    if variant.product == "wide":
        return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    logits = F.linear(rows, weight, bias)
    return logits.float() if variant.product == "cast" else logits


def router_formula(
    logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, E]` to weights and indices `[T, k]`, operation by operation as transformers writes it.

    Args:
        logits: any float dtype.
        bias: `[E]`, where the variant has one.
        variant: what is computed.
        dtype: that of the hidden states.
    """
    if variant.scores == "softmax":
        scores = F.softmax(logits, dtype=torch.float32, dim=-1)
    else:
        scores = logits.float().sigmoid() if variant.scores == "sigmoid" else logits
    choice = scores
    if variant.has_bias and bias is not None:
        choice = choice + bias
    if variant.groups is not None:
        choice = _in_best_groups(choice, variant.groups)
    chosen, index = torch.topk(choice, variant.top_k, dim=-1, sorted=variant.is_sorted)
    weights = chosen if choice is scores else scores.gather(-1, index)
    if variant.scores == "logits":
        weights = F.softmax(weights, dim=-1, dtype=weights.dtype)
    if variant.eps is not None:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + variant.eps if variant.eps else total)
    if variant.factor != 1.0:
        weights = weights * variant.factor
    return weights.to(dtype) if variant.casts else weights, index


def _in_best_groups(choice: torch.Tensor, groups: Groups) -> torch.Tensor:
    grouped = choice.view(choice.shape[0], groups.num_groups, -1)
    good = grouped.topk(2, dim=-1)[0].sum(dim=-1) if groups.by_two else grouped.max(dim=-1).values
    best = torch.topk(good, groups.num_kept, dim=-1, sorted=False)[1]
    is_kept = torch.zeros_like(good, dtype=torch.bool).scatter_(1, best, value=True)
    return grouped.masked_fill(~is_kept[:, :, None], 0.0 if groups.masks_with_zero else -torch.inf).flatten(1)
