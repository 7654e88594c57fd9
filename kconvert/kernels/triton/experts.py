"""The experts of a mixture, on stacked weights, forward and backward.

    out[t] = sum over the choices j of t of  weights[t, j] * down_e( gate( gate_up_e(x[t]) ) ),    e = index[t, j]

with `gate_up_e(x) = x @ gate_up[e].T + gate_up_bias[e]`, and the same of `down`.

The choices are sorted by expert; the projections are grouped GEMMs over them, in one of two ways: in Triton, which
reads the tokens where they are and applies the gate before it writes anything; or by torch's own `grouped_mm`, which
takes bfloat16 without biases and wants the rows in order.  The rows of a token are weighted and added up last, in
float32 and in a fixed order.

Backward, with dy the gradient of `out`, and g[r] = dy[t] @ down[e] for row r of token t, from which
`expert_rows.gate_backward` makes `dboth`, `scaled` and the gradients of the weights of the choices:

    dgate_up[e] = sum of outer(dboth[r], x[t])
    ddown[e] = sum of outer(dy[t], scaled[r])
    dx[t] = sum of dboth[r] @ gate_up[e]

What is kept is the input and both halves of every row; the activation is computed again.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from kconvert.kernels.expert_weights import ExpertWeights
from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.grouped_mm import grouped_mm, grouped_mm_reason
from kconvert.kernels.triton.expert_gemm import Tiles, gate_up_gemm, rows_gemm, tiles_for
from kconvert.kernels.triton.expert_grads import bias_grad, weight_grad
from kconvert.kernels.triton.expert_routing import Routing, route
from kconvert.kernels.triton.expert_rows import combine_rows, gate_backward, gather_rows
from kconvert.kernels.triton.gated_act import gated_act

__all__ = ["ExpertsFunction", "Way", "choose_way", "experts", "torch_way_reason"]

Way = Literal["triton", "torch"]

_TORCH_FROM_ROWS = 64
"""Rows of an expert, on average, from which torch's GEMM is the faster one where gradients are needed.

On one H200, 128 experts of 2048 x 768 and 256 rows each: forward 0.79 ms in Triton and 0.86 by torch; with the backward
2.77 and 2.68.
"""


def torch_way_reason(hidden_states: torch.Tensor, params: ExpertWeights) -> str | None:
    """Why torch's `grouped_mm` cannot be used, or None."""
    if params.gate_up_bias is not None or params.down_bias is not None:
        return "it adds no biases"
    if hidden_states.dtype != torch.bfloat16:
        return "it is used in bfloat16 only"
    return grouped_mm_reason(hidden_states, params.gate_up, params.down)


def choose_way(hidden_states: torch.Tensor, num_rows: int, params: ExpertWeights, *, needs_grad: bool) -> Way:
    """The way that is faster for a number of sorted rows, of those that can be used."""
    if not needs_grad or num_rows < _TORCH_FROM_ROWS * params.down.shape[0]:
        return "triton"
    return "triton" if torch_way_reason(hidden_states, params) is not None else "torch"


class _Made(NamedTuple):
    """A forward: its result, how the choices were sorted, and both halves of every row where they are kept."""

    out: torch.Tensor
    routing: Routing
    both: torch.Tensor | None


def _tiles(hidden_states: torch.Tensor, num_rows: int, num_experts: int) -> Tiles:
    return tiles_for(hidden_states.dtype, hidden_states.device, num_rows=num_rows, num_experts=num_experts)


def _run_forward(
    hidden_states: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    params: ExpertWeights,
    variant: GatedVariant,
    way: Way,
    *,
    is_transposed: bool,
    keeps_both: bool,
) -> _Made:
    num_rows, top_k, num_experts = ids.numel(), ids.shape[1], params.down.shape[0]
    tiles = _tiles(hidden_states, num_rows, num_experts)
    routing = route(ids, num_experts=num_experts, block_rows=tiles.rows)
    gate_up, down = _inputs_first(params, is_transposed=is_transposed)
    both: torch.Tensor | None
    if way == "torch":
        both = cast(
            "torch.Tensor", grouped_mm(gather_rows(hidden_states, routing, top_k=top_k), gate_up, offs=routing.ends)
        )
        y = grouped_mm(gated_act(both, variant), down, offs=routing.ends)
    else:
        made, both = gate_up_gemm(
            hidden_states,
            gate_up,
            params.gate_up_bias,
            variant,
            routing,
            tiles,
            top_k=top_k,
            keeps_both=keeps_both,
        )
        y = rows_gemm(made, down, params.down_bias, routing, tiles)
    return _Made(combine_rows(y, weights, routing, top_k=top_k), routing, both)


def _inputs_first(params: ExpertWeights, *, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights as views `[E, n, 2 * m]` and `[E, m, n]`."""
    if is_transposed:
        return params.gate_up, params.down
    return params.gate_up.transpose(1, 2), params.down.transpose(1, 2)


def _weight_grad_by_torch(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor, routing: Routing) -> torch.Tensor:
    """As `weight_grad`, of sorted rows."""
    if like.stride(2) == 1:
        return cast("torch.Tensor", grouped_mm(a.t(), b, offs=routing.ends))
    return cast("torch.Tensor", grouped_mm(b.t(), a, offs=routing.ends)).transpose(1, 2)


class ExpertsFunction(torch.autograd.Function):
    """The experts and the gradients of the tokens, of the routing weights and of all parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        ids: torch.Tensor,
        variant: GatedVariant,
        way: Way,
        is_transposed: bool,
    ) -> torch.Tensor:
        """As `experts`, of contiguous inputs."""
        params = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        made = _run_forward(
            hidden_states, ids, weights, params, variant, way, is_transposed=is_transposed, keeps_both=True
        )
        *sorted_rows, ctx.block_rows = made.routing
        ctx.save_for_backward(hidden_states, weights, *params, ids, made.both, *sorted_rows)
        ctx.variant, ctx.way, ctx.is_transposed = variant, way, is_transposed
        return made.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Of what asks for a gradient."""
        hidden_states, weights, *rest = ctx.saved_tensors
        params, (ids, both, order, places, ends, blocks) = ExpertWeights(*rest[:4]), rest[4:]
        routing = Routing(order, places, ends, blocks, ctx.block_rows)
        dx, dweights, *dparams = _run_backward(
            dy.contiguous(),
            hidden_states,
            weights,
            params,
            ids,
            both,
            routing,
            ctx.variant,
            ctx.way,
            is_transposed=ctx.is_transposed,
            needs=ctx.needs_input_grad,
        )
        return dx, dweights, *dparams, None, None, None, None


def _run_backward(
    dy: torch.Tensor,
    hidden_states: torch.Tensor,
    weights: torch.Tensor,
    params: ExpertWeights,
    ids: torch.Tensor,
    both: torch.Tensor,
    routing: Routing,
    variant: GatedVariant,
    way: Way,
    *,
    is_transposed: bool,
    needs: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """The gradients of tokens, weights and the four parameters; `needs` says of each whether it is asked for."""
    needs_x, _, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, *_ = needs
    top_k, num_experts = ids.shape[1], params.down.shape[0]
    tiles = _tiles(hidden_states, ids.numel(), num_experts)
    gate_up, down = _inputs_first(params, is_transposed=is_transposed)
    by_torch = way == "torch"
    sorted_dy = gather_rows(dy, routing, top_k=top_k) if by_torch else dy
    if by_torch:
        g = grouped_mm(sorted_dy, down.transpose(1, 2), offs=routing.ends)
    else:
        g = rows_gemm(dy, down.transpose(1, 2), None, routing, tiles, top_k=top_k)
    scaled, dboth, dweights = gate_backward(both, g, weights, params.down_bias, dy, ids, variant, routing)
    found: list[torch.Tensor | None] = [None, dweights, None, None, None, None]
    if needs_x:
        if by_torch:
            dx = grouped_mm(dboth, gate_up.transpose(1, 2), offs=routing.ends)
        else:
            dx = rows_gemm(dboth, gate_up.transpose(1, 2), None, routing, tiles)
        found[0] = combine_rows(dx, None, routing, top_k=top_k)
    if needs_gate_up:
        if by_torch:
            made = _weight_grad_by_torch(gather_rows(hidden_states, routing, top_k=top_k), dboth, gate_up, routing)
        else:
            made = weight_grad(hidden_states, dboth, gate_up, routing, a_top_k=top_k)
        found[2] = made if is_transposed else made.transpose(1, 2)
    if needs_down:
        if by_torch:
            made = _weight_grad_by_torch(scaled, sorted_dy, down, routing)
        else:
            made = weight_grad(scaled, dy, down, routing, b_top_k=top_k)
        found[3] = made if is_transposed else made.transpose(1, 2)
    if needs_gate_up_bias:
        found[4] = bias_grad(dboth, None, routing)
    if needs_down_bias:
        found[5] = bias_grad(dy, weights, routing, top_k=top_k)
    return found


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    params: ExpertWeights,
    variant: GatedVariant,
    *,
    is_transposed: bool,
    way: Way | None = None,
) -> torch.Tensor:
    """`[T, n]` through `k` experts for each token, to `[T, n]`.

    Args:
        hidden_states: `[T, n]`, of the dtype of the parameters.
        top_k_index: `[T, k]`, integers; a choice that is not in `range(E)` adds nothing.
        top_k_weights: `[T, k]`, of any float dtype.
        params: the weights and biases.
        variant: what the gate computes.
        is_transposed: whether the weights are `[E, inputs, outputs]`.
        way: how the GEMMs are done; None chooses.
    """
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    ids, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    biases = (None if bias is None else bias.contiguous() for bias in (params.gate_up_bias, params.down_bias))
    params = ExpertWeights(params.gate_up, params.down, *biases)
    inputs = (hidden_states, weights, *params)
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    if way is None:
        way = choose_way(hidden_states, ids.numel(), params, needs_grad=needs_grad)
    if needs_grad:
        made: torch.Tensor = ExpertsFunction.apply(*inputs, ids, variant, way, is_transposed)
        return made
    return _run_forward(
        hidden_states, ids, weights, params, variant, way, is_transposed=is_transposed, keeps_both=False
    ).out
