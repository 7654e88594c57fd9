"""The gated activation of a packed projection: `[..., 2 * n]` to `[..., n]` in one pass, without a copy of the halves.

    y = act(gate) * up                                   act: silu, gelu (erf) or gelu_tanh
    y = (up + 1) * gate * sigmoid(alpha * gate)          `swiglu_oai`, as gpt-oss has it

`kconvert.kernels.gated_variant` says what varies.  With a limit, gate and up are clamped before anything else.

Values are float32 inside (float64 for float64).  In narrower types the forward rounds where the stock models do, which
run one torch operation after another: `act(gate)` before the multiply, and each of the five steps of `swiglu_oai`.
So the result is nearly always theirs bit for bit.  The backward rounds its results only.

Backward, with both gradients in one tensor `[..., 2 * n]` that is written once, and `act(gate)` computed again:

    dgate = dy * up * act'(gate),    dup = dy * act(gate),    0 where a clamp was at work
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kconvert.errors import UsageError
from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.triton.launch import Kernel, Launch
from kconvert.kernels.triton.rows import MOST_LAYOUTS, Rows, row_starts, rows_of

__all__ = ["ACTIVATIONS", "GatedActFunction", "gated_act"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")

_TILE_ELEMENTS = 2048
"""Results of one program: with four warps, two accesses of 16 bytes to each half for every thread."""
_MOST_WASTE = 1.125
"""Of a row's blocks, how much longer than the row they may be together."""

# Interpreted, these have to stand on the right of a tensor.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
_THREE_CUBIC = tl.constexpr(0.134145)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    # comparisons, because a minimum may lose a NaN
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        found = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        found = gate * 0.5 * (1.0 + tl.erf(gate * _SQRT_HALF))
    else:
        # 1 + tanh(z), and not 2 * sigmoid(2 * z): in its tail torch rounds as coarsely
        tanh = 2.0 * _sigmoid((gate + gate * gate * gate * _CUBIC) * _TWICE_SQRT_2_OVER_PI) - 1.0
        found = 0.5 * gate * (1.0 + tanh)
    return found


@triton.jit
def _activated_and_slope(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "silu":
        sigmoid = _sigmoid(gate)
        found = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(gate * _SQRT_HALF))
        found = gate * below
        slope = below + gate * tl.exp(-0.5 * gate * gate) * _INV_SQRT_2PI
    elif ACTIVATION == "gelu_tanh":
        square = gate * gate
        sigmoid = _sigmoid(gate * (1.0 + square * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
        found = gate * sigmoid
        inner_slope = (1.0 + square * _THREE_CUBIC) * _TWICE_SQRT_2_OVER_PI
        slope = sigmoid + gate * sigmoid * (1.0 - sigmoid) * inner_slope
    else:
        sigmoid = _sigmoid(gate * ALPHA)
        found = gate * sigmoid
        slope = sigmoid * (1.0 + gate * ALPHA * (1.0 - sigmoid))
    return found, slope


@triton.jit
def _loaded(
    row_places,
    columns,
    pairs,
    mask,
    pair_mask,
    size,
    IS_UP_FIRST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gate and up of a block.  Pairs are loaded as they lie and taken apart in registers."""
    if IS_INTERLEAVED:
        both = tl.load(row_places + pairs[None, :], mask=pair_mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [ROWS, COLUMNS, 2]))
    else:
        first = tl.load(row_places + columns[None, :], mask=mask, other=0.0)
        second = tl.load(row_places + size + columns[None, :], mask=mask, other=0.0)
    if IS_UP_FIRST:
        gate, up = second, first
    else:
        gate, up = first, second
    return gate, up


@triton.jit
def _block(num_rows, size, num_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a program, where its pairs lie if interleaved, and which of both there are."""
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = program % num_blocks
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    pairs = block * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    pair_mask = (rows < num_rows)[:, None] & (pairs < 2 * size)[None, :]
    return rows, columns, pairs, mask, pair_mask


@triton.jit(do_not_specialize=["num_rows", "size_units", "num_blocks", "inner", "outer_units", "inner_units"])
def _forward(
    packed_ptr,
    y_ptr,
    num_rows,
    size_units,
    num_blocks,
    inner,
    outer_units,
    inner_units,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_UP_FIRST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    NARROW: tl.constexpr = y_ptr.dtype.element_ty
    size = size_units * UNIT
    rows, columns, pairs, mask, pair_mask = _block(num_rows, size, num_blocks, ROWS, COLUMNS)
    row_places = packed_ptr + row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)[:, None]
    gate, up = _loaded(row_places, columns, pairs, mask, pair_mask, size, IS_UP_FIRST, IS_INTERLEAVED, ROWS, COLUMNS)
    gate, up = _clamped(gate.to(WIDE), up.to(WIDE), LIMIT)
    if ACTIVATION == "swiglu_oai":
        sigmoid = _sigmoid((gate * ALPHA).to(NARROW).to(WIDE)).to(NARROW).to(WIDE)
        activated = gate * sigmoid
        up = (up + 1.0).to(NARROW).to(WIDE)
    else:
        activated = _activated(gate, ACTIVATION)
    y = activated.to(NARROW).to(WIDE) * up
    tl.store(y_ptr + rows[:, None] * size_units * UNIT + columns[None, :], y.to(NARROW), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "size_units", "num_blocks", "inner", "outer_units", "inner_units"])
def _backward(
    dy_ptr,
    packed_ptr,
    dpacked_ptr,
    num_rows,
    size_units,
    num_blocks,
    inner,
    outer_units,
    inner_units,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_UP_FIRST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    NARROW: tl.constexpr = dpacked_ptr.dtype.element_ty
    size = size_units * UNIT
    rows, columns, pairs, mask, pair_mask = _block(num_rows, size, num_blocks, ROWS, COLUMNS)
    row_places = packed_ptr + row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)[:, None]
    raw_gate, raw_up = _loaded(
        row_places, columns, pairs, mask, pair_mask, size, IS_UP_FIRST, IS_INTERLEAVED, ROWS, COLUMNS
    )
    raw_gate, raw_up = raw_gate.to(WIDE), raw_up.to(WIDE)
    gate, up = _clamped(raw_gate, raw_up, LIMIT)
    if ACTIVATION == "swiglu_oai":
        up = up + 1.0
    activated, slope = _activated_and_slope(gate, ACTIVATION, ALPHA)
    dy = tl.load(dy_ptr + rows[:, None] * size_units * UNIT + columns[None, :], mask=mask, other=0.0).to(WIDE)
    dgate = dy * up * slope
    dup = dy * activated
    if LIMIT is not None:
        dgate = tl.where(raw_gate <= LIMIT, dgate, 0.0)
        dup = tl.where((raw_up <= LIMIT) & (raw_up >= -LIMIT), dup, 0.0)
    dgate, dup = dgate.to(NARROW), dup.to(NARROW)
    if IS_UP_FIRST:
        dfirst, dsecond = dup, dgate
    else:
        dfirst, dsecond = dgate, dup
    drow_places = dpacked_ptr + rows[:, None] * size_units * (2 * UNIT)
    if IS_INTERLEAVED:
        dboth = tl.reshape(tl.join(dfirst, dsecond), [ROWS, 2 * COLUMNS])
        tl.store(drow_places + pairs[None, :], dboth, mask=pair_mask)
    else:
        tl.store(drow_places + columns[None, :], dfirst, mask=mask)
        tl.store(drow_places + size + columns[None, :], dsecond, mask=mask)


@cache
def _tile(size: int) -> tuple[int, int]:
    """Rows and columns of what one program works on."""
    columns = max(16, min(_TILE_ELEMENTS, triton.next_power_of_2(size)))
    while columns > 256 and triton.cdiv(size, columns) * columns > _MOST_WASTE * size:
        columns //= 2
    return _TILE_ELEMENTS // columns, columns


@cache
def _constants(variant: GatedVariant, dtype: torch.dtype) -> tuple[Any, ...]:
    """The variant as the kernels take it, the limit as `dtype` holds it."""
    if variant.activation not in ACTIVATIONS:
        raise UsageError(f"no gated activation {variant.activation!r}", fix=f"use one of {', '.join(ACTIVATIONS)}")
    limit = variant.limit
    if limit is not None:
        if not limit >= 0:
            raise UsageError(f"a gated activation cannot be limited to {limit}", fix="use a limit of 0 or more")
        limit = float(torch.tensor(limit, dtype=dtype))
    return variant.activation, limit, float(variant.alpha), bool(variant.is_up_first), bool(variant.is_interleaved)


@cache
def _kernel(
    size: int, variant: GatedVariant, dtype: torch.dtype, is_flat: bool, unit: int, is_backward: bool
) -> tuple[Kernel, int, int]:
    """The kernel, rows of a program, and programs for a row."""
    rows, columns = _tile(size)
    wide = tl.float64 if dtype == torch.float64 else tl.float32
    constants = (*_constants(variant, dtype), is_flat, unit, rows, columns, wide)
    return Kernel(_backward if is_backward else _forward, constants, num_warps=4), rows, triton.cdiv(size, columns)


@lru_cache(maxsize=MOST_LAYOUTS)
def _launch_over(rows: Rows, size: int, variant: GatedVariant, dtype: torch.dtype, is_backward: bool) -> Launch:
    """The launch over `rows` of the packed tensor, whose halves have `size` columns."""
    kernel, tile_rows, num_blocks = _kernel(size, variant, dtype, rows.is_flat, rows.unit, is_backward)
    programs = -(-rows.num_rows // tile_rows) * num_blocks
    return Launch(kernel, (programs, 1, 1), (rows.num_rows, size // rows.unit, num_blocks, *rows.numbers))


def _run_forward(packed: torch.Tensor, variant: GatedVariant) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and `packed` as it was read."""
    width = packed.shape[-1]
    if width % 2:
        raise UsageError(f"gate and up cannot share a row of {width}", fix="pass [..., 2 * n]")
    size = width // 2
    packed, rows = rows_of(packed, size)
    y = torch.empty((*packed.shape[:-1], size), dtype=packed.dtype, device=packed.device)
    _launch_over(rows, size, variant, packed.dtype, False)(packed, y)
    return y, packed


class GatedActFunction(torch.autograd.Function):
    """The gated activation and its gradient; keeps its input only."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
        """`packed` `[..., 2 * n]`."""
        y, read = _run_forward(packed, variant)
        ctx.save_for_backward(read)
        ctx.variant = variant
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """The gradient of `packed`, contiguous."""
        if torch.is_grad_enabled():  # with `create_graph=True`, where the result would look like a constant
            raise UsageError("gated_act has no second derivative", fix='load the model with kernels="reference"')
        (packed,) = ctx.saved_tensors
        dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        size = dy.shape[-1]
        packed, rows = rows_of(packed, size)
        _launch_over(rows, size, ctx.variant, packed.dtype, True)(dy.contiguous(), packed, dpacked)
        return dpacked, None


def gated_act(packed: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    """`packed` `[..., 2 * n]`, in any float dtype and with any strides, to `[..., n]`, contiguous.

    Raises:
        UsageError: an odd last dimension, an unknown activation, or a limit below 0.
    """
    if packed.requires_grad and torch.is_grad_enabled():
        made: torch.Tensor = GatedActFunction.apply(packed, variant)
        return made
    return _run_forward(packed, variant)[0]
