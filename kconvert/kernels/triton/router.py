"""The choice of experts by a router's logits: scores, top-k and weights in one kernel, forward and backward.

    s = softmax(logits) | sigmoid(logits) | logits                          [T, E], float32
    c = s + bias, and where there are groups, only inside of the best of them
    index = the k largest of c, largest first; of equal ones that with the lower index
    w = s[index], or its softmax where s are the logits
    weights = w / (sum(w) + eps) * factor, or w * factor

A group is as good as its best c, or as the two best together.  NaN counts as largest, as in `torch.topk`, and shows in the
weights; an index is always that of an expert, and those of a token differ.

Backward, with g the gradient of the weights and u[j] = w[j] / (sum(w) + eps):

    dw[j] = factor * (g[j] - sum over l of g[l] * u[l]) / (sum(w) + eps)
    dlogits = s * (ds - sum(ds * s))  |  ds * s * (1 - s)  |  u * (g - sum(g * u)),    ds[index[j]] = dw[j], else 0
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.language.extra import libdevice

from kconvert.kernels.router_variant import RouterVariant
from kconvert.kernels.triton.launch import Kernel, Launch, is_interpreted
from kconvert.kernels.triton.rows import MOST_LAYOUTS

__all__ = ["choose_experts"]

_ELEMENTS = 512
"""Scores that a program has, of several tokens where experts are few: most were slower on an H200, fewer no faster."""


@triton.jit
def _sigmoid(x, IS_EXACT: tl.constexpr):
    """With the bits of torch's, where asked for: a bias and groups are chosen by what is a rounding apart."""
    if IS_EXACT:
        return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _scores(logits, inside, SCORES: tl.constexpr, IS_EXACT: tl.constexpr):
    if SCORES == "softmax":
        logits = tl.where(inside, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    elif SCORES == "sigmoid":
        scores = _sigmoid(logits, IS_EXACT)
    else:
        scores = logits
    return scores


@triton.jit
def _in_order(values):
    """Values as they are compared: NaN as the largest, and all above minus infinity, which marks what cannot be chosen."""
    values = tl.where(values != values, float("inf"), values)
    return tl.maximum(values, -3.0e38)


@triton.jit
def _best(values, places):
    """The place of the largest value of every row, the first of equal ones; and the values without it."""
    largest = tl.max(values, axis=1)
    best = tl.min(tl.where(values == largest[:, None], places[None, :], 2147483647), axis=1)
    return best, tl.where(places[None, :] == best[:, None], float("-inf"), values)


@triton.jit
def _in_best_groups(
    choice,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    BY_TWO: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`choice` `[ROWS, GROUPS * SIZE]`, with `MASKED` outside of the `KEPT` best groups."""
    grouped = tl.reshape(choice, (ROWS, GROUPS, SIZE))
    first = tl.max(grouped, axis=2)
    if BY_TWO:
        places = tl.arange(0, SIZE)
        place = tl.min(tl.where(grouped == first[:, :, None], places[None, None, :], SIZE), axis=2)
        first += tl.max(tl.where(places[None, None, :] == place[:, :, None], float("-inf"), grouped), axis=2)
    group_scores = _in_order(first)
    groups = tl.arange(0, GROUPS)
    kept = tl.zeros([ROWS, GROUPS], dtype=tl.int1)
    for _ in tl.static_range(KEPT):
        best, group_scores = _best(group_scores, groups)
        kept = kept | (groups[None, :] == best[:, None])
    return tl.reshape(tl.where(kept[:, :, None], grouped, MASKED), (ROWS, GROUPS * SIZE))


@triton.jit
def _weighed(weights, chosen, eps, SCORES: tl.constexpr, IS_NORMED: tl.constexpr):
    """Scores of the chosen experts as weights, without the factor: as softmax gives them, divided, and the divisor."""
    if SCORES == "logits":
        weights = _scores(weights, chosen, "softmax", False)
    divisor = tl.sum(tl.where(chosen, weights, 0.0), axis=1)[:, None] + eps
    divided = weights
    if IS_NORMED:
        divided = weights / divisor
    return weights, divided, divisor


@triton.jit(do_not_specialize=["num_tokens"])
def _forward(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    index_ptr,
    num_tokens,
    eps,
    factor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BY_TWO: tl.constexpr,
    MASKED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    inside = (rows < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + experts[None, :], mask=inside, other=0.0).to(tl.float32)
    scores = _scores(logits, (experts < NUM_EXPERTS)[None, :], SCORES, IS_EXACT)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    if GROUPS > 1:
        choice = _in_best_groups(choice, ROWS, GROUPS, EXPERTS // GROUPS, KEPT, BY_TWO, MASKED)
    choice = tl.where((experts < NUM_EXPERTS)[None, :], _in_order(choice), float("-inf"))
    index = tl.zeros([ROWS, CHOICES], dtype=tl.int32)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        best, choice = _best(choice, experts)
        score = tl.sum(tl.where(experts[None, :] == best[:, None], scores, 0.0), axis=1)
        index = tl.where(choices[None, :] == number, best[:, None], index)
        weights = tl.where(choices[None, :] == number, score[:, None], weights)
    chosen = (choices < TOP_K)[None, :]
    _, weights, _ = _weighed(weights, chosen, eps, SCORES, IS_NORMED)
    weights = weights * factor
    places = rows[:, None] * TOP_K + choices[None, :]
    mask = (rows < num_tokens)[:, None] & chosen
    tl.store(weights_ptr + places, weights.to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(index_ptr + places, index.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _backward(
    dweights_ptr,
    logits_ptr,
    index_ptr,
    dlogits_ptr,
    num_tokens,
    eps,
    factor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    inside = (rows < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    chosen = (choices < TOP_K)[None, :]
    mask = (rows < num_tokens)[:, None] & chosen
    logits = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + experts[None, :], mask=inside, other=0.0).to(tl.float32)
    places = rows[:, None] * TOP_K + choices[None, :]
    index = tl.load(index_ptr + places, mask=mask, other=-1)
    gradient = tl.load(dweights_ptr + places, mask=mask, other=0.0).to(tl.float32) * factor
    scores = _scores(logits, (experts < NUM_EXPERTS)[None, :], SCORES, IS_EXACT)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        place = tl.sum(tl.where(choices[None, :] == number, index, 0), axis=1)
        score = tl.sum(tl.where(experts[None, :] == place[:, None], scores, 0.0), axis=1)
        weights = tl.where(choices[None, :] == number, score[:, None], weights)
    weights, divided, divisor = _weighed(weights, chosen, eps, SCORES, IS_NORMED)
    if IS_NORMED:
        gradient = (gradient - tl.sum(tl.where(chosen, gradient * divided, 0.0), axis=1)[:, None]) / divisor
    if SCORES == "logits":
        gradient = weights * (gradient - tl.sum(tl.where(chosen, gradient * weights, 0.0), axis=1)[:, None])
    dscores = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        is_number = choices[None, :] == number
        place = tl.sum(tl.where(is_number, index, 0), axis=1)
        own = tl.sum(tl.where(is_number, gradient, 0.0), axis=1)
        dscores = tl.where(experts[None, :] == place[:, None], own[:, None], dscores)
    if SCORES == "softmax":
        dlogits = scores * (dscores - tl.sum(dscores * scores, axis=1)[:, None])
    elif SCORES == "sigmoid":
        dlogits = dscores * scores * (1.0 - scores)
    else:
        dlogits = dscores
    target = dlogits_ptr + rows[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(target, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@cache
def _kernel(
    variant: RouterVariant, num_experts: int, dtypes: tuple[torch.dtype | None, ...], is_backward: bool
) -> tuple[Kernel, int]:
    """The kernel, and how many tokens a program has; `dtypes` are those of logits, bias and weights, or of their gradient."""
    experts, choices = triton.next_power_of_2(num_experts), triton.next_power_of_2(variant.top_k)
    rows = max(1, _ELEMENTS // experts)
    is_exact = not is_interpreted(_forward)  # the interpreter has no libdevice
    sizes = (num_experts, experts, variant.top_k, choices, rows, variant.scores, variant.eps is not None, is_exact)
    if is_backward:
        return Kernel(_backward, sizes, num_warps=4), rows
    groups = (1, 1, False, 0.0)
    if variant.groups is not None:
        num_groups, num_kept, by_two, masks_with_zero = variant.groups
        groups = (num_groups, num_kept, by_two, 0.0 if masks_with_zero else float("-inf"))
    return Kernel(_forward, (*sizes, *groups), num_warps=4), rows


@lru_cache(maxsize=MOST_LAYOUTS)
def _launch(
    variant: RouterVariant,
    num_tokens: int,
    num_experts: int,
    dtypes: tuple[torch.dtype | None, ...],
    is_backward: bool,
) -> Launch:
    kernel, rows = _kernel(variant, num_experts, dtypes, is_backward)
    return Launch(kernel, (-(-num_tokens // rows), 1, 1), (num_tokens, variant.eps or 0.0, variant.factor))


def _run_forward(
    logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    scored = logits.dtype if variant.scores == "logits" else torch.float32
    result, bias_dtype = dtype if variant.casts else scored, None
    if bias is not None:
        bias, bias_dtype = bias.contiguous(), bias.dtype
    weights = torch.empty((num_tokens, variant.top_k), dtype=result, device=logits.device)
    index = torch.empty((num_tokens, variant.top_k), dtype=torch.int64, device=logits.device)
    launch = _launch(variant, num_tokens, num_experts, (logits.dtype, bias_dtype, result), False)
    launch(logits.contiguous(), bias, weights, index)
    return weights, index


class RouterFunction(torch.autograd.Function):
    """Weights and indices, and the gradient of the logits; see the module."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `choose_experts`."""
        weights, index = _run_forward(logits, bias, variant, dtype)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        ctx.variant = variant
        return weights, index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: torch.Tensor, _: Any) -> Any:
        """The gradient of the logits."""
        logits, index = ctx.saved_tensors
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        launch = _launch(ctx.variant, *logits.shape, (logits.dtype, dweights.dtype), True)
        launch(dweights.contiguous(), logits.contiguous(), index, dlogits)
        return dlogits, None, None, None


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices `[T, k]`, largest first, of logits `[T, E]`; `router_formula` in one kernel.

    Args:
        logits: bfloat16, float16 or float32.
        bias: `[E]`, of the choice, where the variant has one.
        variant: what is computed; groups, and experts where there are groups, are powers of two.
        dtype: that of the hidden states.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        made: tuple[torch.Tensor, torch.Tensor] = RouterFunction.apply(logits, bias, variant, dtype)
        return made
    return _run_forward(logits, bias, variant, dtype)
