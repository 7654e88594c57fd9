"""Grouped GEMMs over rows sorted by expert, each expert with a weight of its own.

    rows_gemm:    y[r] = a[r] @ w[e(r)]  (+ bias[e(r)])
    gate_up_gemm: y[r] = gate(a[r] @ w[e(r)] + bias[e(r)])

Rows may be read through `order`: then row r of the sorted ones is row `order[r] // top_k` of what is given, and no
sorted copy of it is made.  Weights are read by their strides, so a transposed one is no copy either.  Sums are in
float32 (float64 for float64), a float32 product is not rounded to fewer bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.triton.expert_routing import Routing, row_stride, wide
from kconvert.kernels.triton.gated_act import _activated, _activated_and_slope, _clamped, _constants
from kconvert.kernels.triton.launch import Kernel, Launch

__all__ = ["Tiles", "add_product", "gate_up_gemm", "rows_gemm", "tiles_for"]


class Tiles(NamedTuple):
    """How a grouped GEMM is cut up.

    Attributes:
        rows: rows of a block.
        columns: columns of a block of the result; of either half where gate and up are made together, half as many.
        depth: how much of the sum is taken at a time.
        warps, stages: as Triton means them.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_NARROW = {
    16: Tiles(16, 64, 128, 2, 3),
    32: Tiles(32, 128, 128, 4, 3),
    64: Tiles(64, 128, 64, 4, 4),
    128: Tiles(128, 256, 64, 8, 3),
}
"""For float16 and bfloat16, by rows of a block."""
_FLOAT32 = {16: Tiles(16, 64, 32, 4, 3), 64: Tiles(64, 64, 32, 4, 3)}
_FLOAT64 = {16: Tiles(16, 32, 16, 4, 1)}


@cache
def _shared_bytes(index: int) -> int:
    """What a program on a device may have of shared memory."""
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _fitted(tiles: Tiles, dtype: torch.dtype, shared_bytes: int) -> Tiles:
    """With as many stages as have room."""
    stage_bytes = tiles.depth * (tiles.rows + tiles.columns) * dtype.itemsize
    return tiles._replace(stages=max(1, min(tiles.stages, shared_bytes // stage_bytes)))


def tiles_for(dtype: torch.dtype, device: torch.device, *, num_rows: int, num_experts: int) -> Tiles:
    """The tiles for a number of sorted rows; the more rows an expert has, the larger."""
    each = num_rows / num_experts
    if dtype == torch.float64:
        return _FLOAT64[16]
    if dtype == torch.float32:
        return _FLOAT32[16 if each <= 16 else 64]
    tiles = _NARROW[16 if each <= 16 else 32 if each <= 32 else 64 if each <= 96 else 128]
    if device.type != "cuda":
        return tiles
    index = torch.cuda.current_device() if device.index is None else device.index
    return _fitted(tiles, dtype, _shared_bytes(index))


@triton.jit
def add_product(total, a, b, WIDE: tl.constexpr):
    """`total + a @ b`, on the device."""
    if WIDE == tl.float64:
        total += tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _block(order_ptr, ends_ptr, blocks_ptr, block, num_blocks, ROWS: tl.constexpr, TOP_K: tl.constexpr):
    """A block's expert (-1 for none), its rows, which of them there are, and the row of each that is read."""
    expert = tl.load(blocks_ptr + block)
    first = tl.load(blocks_ptr + num_blocks + block)
    rows = first + tl.arange(0, ROWS)
    inside = rows < tl.load(ends_ptr + expert, mask=expert >= 0, other=0)
    if TOP_K > 0:
        read = tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K
    else:
        read = rows
    return expert, rows.to(tl.int64), inside, read.to(tl.int64)


@triton.jit(do_not_specialize=["num_blocks"])
def _rows_gemm(
    a_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    order_ptr,
    ends_ptr,
    blocks_ptr,
    num_blocks,
    SUM: tl.constexpr,
    COLUMNS: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_EXPERT: tl.constexpr,
    W_SUM: tl.constexpr,
    W_COLUMN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block = tl.program_id(0) // column_blocks
    expert, rows, inside, read = _block(order_ptr, ends_ptr, blocks_ptr, block, num_blocks, BLOCK_ROWS, TOP_K)
    if expert < 0:
        return
    columns = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < COLUMNS
    depth = tl.arange(0, DEPTH)
    a_ptrs = a_ptr + read[:, None] * A_STRIDE + depth[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * W_EXPERT + depth[:, None] * W_SUM + columns[None, :] * W_COLUMN
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=WIDE)
    for start in range(0, SUM, DEPTH):
        if SUM % DEPTH == 0:
            a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=is_column[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=inside[:, None] & (depth < SUM - start)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=is_column[None, :] & (depth < SUM - start)[:, None], other=0.0)
        total = add_product(total, a, w, WIDE)
        a_ptrs += DEPTH
        w_ptrs += DEPTH * W_SUM
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * COLUMNS + columns, mask=is_column, other=0.0)
        total += bias.to(WIDE)[None, :]
    y_ptrs = y_ptr + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_gemm(
    a_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    both_ptr,
    order_ptr,
    ends_ptr,
    blocks_ptr,
    num_blocks,
    SUM: tl.constexpr,
    HALF: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_EXPERT: tl.constexpr,
    W_SUM: tl.constexpr,
    W_COLUMN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_UP_FIRST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):
    column_blocks: tl.constexpr = (HALF + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block = tl.program_id(0) // column_blocks
    expert, rows, inside, read = _block(order_ptr, ends_ptr, blocks_ptr, block, num_blocks, BLOCK_ROWS, TOP_K)
    if expert < 0:
        return
    wide_expert = expert.to(tl.int64)
    first = tl.program_id(0) % column_blocks * BLOCK_COLUMNS
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < HALF
    depth = tl.arange(0, DEPTH)
    a_ptrs = a_ptr + read[:, None] * A_STRIDE + depth[None, :]
    w_ptr += wide_expert * W_EXPERT
    if IS_INTERLEAVED:
        # neighbouring columns are read together, and told apart when they are summed
        pairs = first * 2 + tl.arange(0, 2 * BLOCK_COLUMNS)
        is_pair = pairs < 2 * HALF
        one_ptrs = w_ptr + depth[:, None] * W_SUM + pairs[None, :] * W_COLUMN
        pair_total = tl.zeros([BLOCK_ROWS, 2 * BLOCK_COLUMNS], dtype=WIDE)
        for start in range(0, SUM, DEPTH):
            if SUM % DEPTH == 0:
                a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
                w = tl.load(one_ptrs, mask=is_pair[None, :], other=0.0)
            else:
                a = tl.load(a_ptrs, mask=inside[:, None] & (depth < SUM - start)[None, :], other=0.0)
                w = tl.load(one_ptrs, mask=is_pair[None, :] & (depth < SUM - start)[:, None], other=0.0)
            pair_total = add_product(pair_total, a, w, WIDE)
            a_ptrs += DEPTH
            one_ptrs += DEPTH * W_SUM
        one, two = tl.split(tl.reshape(pair_total, [BLOCK_ROWS, BLOCK_COLUMNS, 2]))
        one_columns = 2 * columns
        two_columns = 2 * columns + 1
    else:
        one_ptrs = w_ptr + depth[:, None] * W_SUM + columns[None, :] * W_COLUMN
        one = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=WIDE)
        two = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=WIDE)
        for start in range(0, SUM, DEPTH):
            if SUM % DEPTH == 0:
                a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
                w = tl.load(one_ptrs, mask=is_column[None, :], other=0.0)
                v = tl.load(one_ptrs + HALF * W_COLUMN, mask=is_column[None, :], other=0.0)
            else:
                is_depth = depth < SUM - start
                a = tl.load(a_ptrs, mask=inside[:, None] & is_depth[None, :], other=0.0)
                w = tl.load(one_ptrs, mask=is_column[None, :] & is_depth[:, None], other=0.0)
                v = tl.load(one_ptrs + HALF * W_COLUMN, mask=is_column[None, :] & is_depth[:, None], other=0.0)
            one = add_product(one, a, w, WIDE)
            two = add_product(two, a, v, WIDE)
            a_ptrs += DEPTH
            one_ptrs += DEPTH * W_SUM
        one_columns = columns
        two_columns = HALF + columns
    mask = inside[:, None] & is_column[None, :]
    if bias_ptr is not None:
        bias_ptr += wide_expert * (2 * HALF)
        one += tl.load(bias_ptr + one_columns, mask=is_column, other=0.0).to(WIDE)[None, :]
        two += tl.load(bias_ptr + two_columns, mask=is_column, other=0.0).to(WIDE)[None, :]
    if both_ptr is not None:
        both_ptrs = both_ptr + rows[:, None] * (2 * HALF)
        tl.store(both_ptrs + one_columns[None, :], one.to(both_ptr.dtype.element_ty), mask=mask)
        tl.store(both_ptrs + two_columns[None, :], two.to(both_ptr.dtype.element_ty), mask=mask)
    if IS_UP_FIRST:
        gate, up = _clamped(two, one, LIMIT)
    else:
        gate, up = _clamped(one, two, LIMIT)
    if ACTIVATION == "swiglu_oai":
        activated, _ = _activated_and_slope(gate, ACTIVATION, ALPHA)
        y = activated * (up + 1.0)
    else:
        y = _activated(gate, ACTIVATION) * up
    tl.store(y_ptr + rows[:, None] * HALF + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@cache
def _rows_kernel(dtype: torch.dtype, has_bias: bool, tiles: Tiles, *sizes: int) -> Kernel:
    """`sizes` are the constants before those of `tiles`."""
    rows, columns, depth, warps, stages = tiles
    return Kernel(_rows_gemm, (*sizes, rows, columns, depth, wide(dtype)), num_warps=warps, num_stages=stages)


@cache
def _gate_up_kernel(
    dtype: torch.dtype, has_bias: bool, keeps_both: bool, tiles: Tiles, variant: GatedVariant, *sizes: int
) -> Kernel:
    """`sizes` are the constants before those of `tiles`."""
    rows, columns, depth, warps, stages = tiles
    constants = (*sizes, rows, columns // 2, depth, *_constants(variant, dtype), wide(dtype))
    return Kernel(_gate_up_gemm, constants, num_warps=warps, num_stages=stages)


def rows_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    tiles: Tiles,
    *,
    top_k: int = 0,
) -> torch.Tensor:
    """`a @ weight[expert] + bias[expert]` for every sorted row.

    Args:
        a: `[rows, n]`, rows of stride 1; with `top_k` the rows before they were sorted and repeated `top_k` times.
        weight: `[E, n, m]` of any strides.
        bias: `[E, m]`, contiguous, or None.
        routing: made with `tiles.rows`.
        tiles: how to cut up the work.
        top_k: 0 where `a` is sorted.

    Returns:
        `[T * k, m]`; rows past the last one are not written.
    """
    _, depth, columns = weight.shape
    num_rows, num_blocks = routing.order.shape[0], routing.blocks.shape[1]
    y = torch.empty((num_rows, columns), dtype=a.dtype, device=a.device)
    sizes = (depth, columns, row_stride(a), *weight.stride(), top_k)
    kernel = _rows_kernel(a.dtype, bias is not None, tiles, *sizes)
    launch = Launch(kernel, (num_blocks * triton.cdiv(columns, tiles.columns), 1, 1), (num_blocks,))
    launch(a, weight, bias, y, routing.order, routing.ends, routing.blocks)
    return y


def gate_up_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    variant: GatedVariant,
    routing: Routing,
    tiles: Tiles,
    *,
    top_k: int,
    keeps_both: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated product of `a @ weight[expert] + bias[expert]` for every sorted row.

    Args:
        a: `[T, n]`, rows of stride 1.
        weight: `[E, n, 2 * m]` of any strides.
        bias: `[E, 2 * m]`, contiguous, or None.
        variant: how the two halves become one.
        routing: made with `tiles.rows`.
        tiles: how to cut up the work.
        top_k: how many choices a row has.
        keeps_both: whether to give the halves as well.

    Returns:
        `[T * k, m]`, and `[T * k, 2 * m]` or None; rows past the last one are not written.
    """
    _, depth, columns = weight.shape
    half = columns // 2
    num_rows, num_blocks = routing.order.shape[0], routing.blocks.shape[1]
    y = torch.empty((num_rows, half), dtype=a.dtype, device=a.device)
    both = torch.empty((num_rows, columns), dtype=a.dtype, device=a.device) if keeps_both else None
    sizes = (depth, half, row_stride(a), *weight.stride(), top_k)
    kernel = _gate_up_kernel(a.dtype, bias is not None, keeps_both, tiles, variant, *sizes)
    launch = Launch(kernel, (num_blocks * triton.cdiv(half, tiles.columns // 2), 1, 1), (num_blocks,))
    launch(a, weight, bias, y, both, routing.order, routing.ends, routing.blocks)
    return y, both
