"""What lies around the GEMMs of experts: rows brought together, and added up again.

    gather_rows:    y[r] = x[order[r] // top_k]
    combine_rows:   out[t] = sum over the choices j of t of weights[t, j] * y[places[t, j]]
    gate_backward:  with g the gradient of gate(both) before its weight, w the weight of the row, and a = gate(both)
                        scaled = w * a      dboth = w * g * gate'(both)      dweight = sum(g * a)  (+ bias . dy)

A choice that is left out adds nothing.  Sums are in float32 (float64 for float64) and in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.triton.expert_routing import Routing, row_stride, wide
from kconvert.kernels.triton.gated_act import _activated_and_slope, _clamped, _constants
from kconvert.kernels.triton.launch import Kernel, Launch

__all__ = ["combine_rows", "gate_backward", "gather_rows"]

_TILE_ELEMENTS = 1024


@triton.jit
def _gather(
    x_ptr,
    y_ptr,
    order_ptr,
    ends_ptr,
    SIZE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < tl.load(ends_ptr + NUM_EXPERTS - 1)
    mask = inside[:, None] & (columns < SIZE)[None, :]
    read = (tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + read[:, None] * X_STRIDE + columns[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(
    y_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    num_tokens,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_column = tokens < num_tokens, columns < SIZE
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for choice in tl.static_range(TOP_K):
        # that of a choice left out is the number of all rows
        places = tl.load(places_ptr + tokens * TOP_K + choice, mask=is_token, other=0)
        is_row = is_token & (places < num_tokens * TOP_K)
        mask = is_row[:, None] & is_column[None, :]
        y = tl.load(y_ptr + places.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(WIDE)
        if weights_ptr is not None:
            y = y * tl.load(weights_ptr + tokens * TOP_K + choice, mask=is_row, other=0.0).to(WIDE)[:, None]
        total += y
    mask = is_token[:, None] & is_column[None, :]
    out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_backward(
    both_ptr,
    g_ptr,
    weights_ptr,
    bias_ptr,
    dy_ptr,
    ids_ptr,
    scaled_ptr,
    dboth_ptr,
    dweights_ptr,
    order_ptr,
    ends_ptr,
    HALF: tl.constexpr,
    HIDDEN: tl.constexpr,
    DY_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_UP_FIRST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    NARROW: tl.constexpr = dboth_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.load(ends_ptr + NUM_EXPERTS - 1)
    choices = tl.load(order_ptr + rows, mask=inside, other=0)
    weights = tl.load(weights_ptr + choices, mask=inside, other=0.0).to(WIDE)[:, None]
    places = rows.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for start in range(0, HALF, COLUMNS):
        columns = (start + tl.arange(0, COLUMNS))[None, :]
        mask = inside[:, None] & (columns < HALF)
        if IS_INTERLEAVED:
            one_places = places * (2 * HALF) + 2 * columns
            two_places = one_places + 1
        else:
            one_places = places * (2 * HALF) + columns
            two_places = one_places + HALF
        one = tl.load(both_ptr + one_places, mask=mask, other=0.0).to(WIDE)
        two = tl.load(both_ptr + two_places, mask=mask, other=0.0).to(WIDE)
        g = tl.load(g_ptr + places * HALF + columns, mask=mask, other=0.0).to(WIDE)
        if IS_UP_FIRST:
            raw_gate, raw_up = two, one
        else:
            raw_gate, raw_up = one, two
        gate, up = _clamped(raw_gate, raw_up, LIMIT)
        if ACTIVATION == "swiglu_oai":
            up = up + 1.0
        activated, slope = _activated_and_slope(gate, ACTIVATION, ALPHA)
        made = activated * up
        total += g * made
        tl.store(scaled_ptr + places * HALF + columns, (made * weights).to(NARROW), mask=mask)
        g = g * weights
        dgate = g * up * slope
        dup = g * activated
        if LIMIT is not None:
            dgate = tl.where(raw_gate <= LIMIT, dgate, 0.0)
            dup = tl.where((raw_up <= LIMIT) & (raw_up >= -LIMIT), dup, 0.0)
        if IS_UP_FIRST:
            done, dtwo = dup, dgate
        else:
            done, dtwo = dgate, dup
        tl.store(dboth_ptr + one_places, done.to(NARROW), mask=mask)
        tl.store(dboth_ptr + two_places, dtwo.to(NARROW), mask=mask)
    if bias_ptr is not None:
        experts = tl.load(ids_ptr + choices, mask=inside, other=0).to(tl.int64)[:, None]
        tokens = (choices // TOP_K).to(tl.int64)[:, None]
        for start in range(0, HIDDEN, COLUMNS):
            columns = (start + tl.arange(0, COLUMNS))[None, :]
            mask = inside[:, None] & (columns < HIDDEN)
            bias = tl.load(bias_ptr + experts * HIDDEN + columns, mask=mask, other=0.0).to(WIDE)
            total += bias * tl.load(dy_ptr + tokens * DY_STRIDE + columns, mask=mask, other=0.0).to(WIDE)
    dweights = tl.sum(total, axis=1)
    tl.store(dweights_ptr + choices, dweights.to(dweights_ptr.dtype.element_ty), mask=inside)


class _Tiled(NamedTuple):
    """A kernel, and the rows and columns of what one program works on at a time."""

    kernel: Kernel
    rows: int
    columns: int


def _tile(size: int) -> tuple[int, int]:
    """Rows and columns of what one program works on at a time."""
    columns = max(16, min(_TILE_ELEMENTS, triton.next_power_of_2(size)))
    return _TILE_ELEMENTS // columns, columns


@cache
def _gather_kernel(dtype: torch.dtype, size: int, stride: int, top_k: int, num_experts: int) -> _Tiled:
    rows, columns = _tile(size)
    return _Tiled(Kernel(_gather, (size, stride, top_k, num_experts, rows, columns), num_warps=4), rows, columns)


@cache
def _combine_kernel(dtype: torch.dtype, weights_dtype: torch.dtype | None, size: int, top_k: int) -> _Tiled:
    rows, columns = _tile(size)
    return _Tiled(Kernel(_combine, (size, top_k, rows, columns, wide(dtype)), num_warps=4), rows, columns)


@cache
def _gate_backward_kernel(
    dtypes: tuple[torch.dtype, ...], has_bias: bool, half: int, sizes: tuple[int, ...], variant: GatedVariant
) -> _Tiled:
    dtype = dtypes[0]
    rows, columns = _tile(half)
    constants = (half, *sizes, *_constants(variant, dtype), rows, columns, wide(dtype))
    return _Tiled(Kernel(_gate_backward, constants, num_warps=4), rows, columns)


def gather_rows(x: torch.Tensor, routing: Routing, *, top_k: int) -> torch.Tensor:
    """`x` `[T, n]`, rows of stride 1, as `[T * k, n]`, sorted by expert; rows past the last one are not written."""
    num_rows, size = routing.order.shape[0], x.shape[1]
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    kernel, rows, columns = _gather_kernel(x.dtype, size, row_stride(x), top_k, routing.ends.shape[0])
    launch = Launch(kernel, (triton.cdiv(num_rows, rows), triton.cdiv(size, columns), 1), ())
    launch(x, y, routing.order, routing.ends)
    return y


def combine_rows(y: torch.Tensor, weights: torch.Tensor | None, routing: Routing, *, top_k: int) -> torch.Tensor:
    """The rows of each token added up, weighted where there are weights.

    Args:
        y: `[T * k, n]`, sorted by expert, contiguous.
        weights: `[T, k]`, contiguous, or None.
        routing: where the rows are.
        top_k: how many choices a token has.
    """
    num_tokens, size = y.shape[0] // top_k, y.shape[1]
    out = torch.empty((num_tokens, size), dtype=y.dtype, device=y.device)
    kernel, rows, columns = _combine_kernel(y.dtype, None if weights is None else weights.dtype, size, top_k)
    launch = Launch(kernel, (triton.cdiv(num_tokens, rows), triton.cdiv(size, columns), 1), (num_tokens,))
    launch(y, weights, routing.places, out)
    return out


def gate_backward(
    both: torch.Tensor,
    g: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    ids: torch.Tensor,
    variant: GatedVariant,
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`scaled` `[T * k, m]`, `dboth` `[T * k, 2 * m]` and `dweights` `[T, k]`; see the module.

    Args:
        both: `[T * k, 2 * m]`, gate and up, sorted by expert, contiguous.
        g: `[T * k, m]`, contiguous.
        weights: `[T, k]`, contiguous.
        bias: `[E, n]` of the down projection, contiguous, or None.
        dy: `[T, n]`, rows of stride 1.
        ids: `[T, k]`, the expert of each choice, contiguous.
        variant: what the gate computes.
        routing: where the rows are.
    """
    num_rows, half = g.shape
    scaled, dboth, dweights = torch.empty_like(g), torch.empty_like(both), torch.zeros_like(weights)
    sizes = (dy.shape[1], row_stride(dy), weights.shape[1], routing.ends.shape[0])
    dtypes = (both.dtype, weights.dtype, ids.dtype)
    kernel, rows, _ = _gate_backward_kernel(dtypes, bias is not None, half, sizes, variant)
    launch = Launch(kernel, (triton.cdiv(num_rows, rows), 1, 1), ())
    launch(both, g, weights, bias, dy, ids, scaled, dboth, dweights, routing.order, routing.ends)
    return scaled, dboth, dweights
