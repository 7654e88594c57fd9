"""Routing: which rows each expert gets, on the device and without a look at the numbers from the host.

The `T * k` choices of a router, counted token by token, are the rows.  They are sorted by expert, those of one expert
in their own order, by counting: no atomics, so the same choices give the same order.  A choice that names no expert
(expert parallelism marks those of other ranks so) is left out.

GEMMs over the sorted rows work in blocks that belong to one expert.  How many there are depends on the choices, so a
grid has as many as there can be at most, and the table says of each which expert it is for, or that it is none.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kconvert.kernels.triton.launch import Kernel, Launch

__all__ = ["Routing", "route", "row_stride", "wide"]

_TILE_ELEMENTS = 8192
_MOST_ROWS_OF_ONE_PROGRAM = 1024
_MOST_PROGRAMS = 128


class Routing(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        order: `[T * k]` int32, the choice that stands at each place; past the last row it holds nothing.
        places: `[T * k]` int32, the place of each choice; `T * k` for one that is left out.
        ends: `[E]` int32, where the rows of each expert end.
        blocks: `[2, M]` int32: the expert of each block of rows (-1 for none) and its first row.
        block_rows: how many rows a block has at most.
    """

    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    blocks: torch.Tensor
    block_rows: int


@triton.jit
def _hits(ids_ptr, rows, num_rows, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr):
    """Of some choices: which expert each is for, as `[rows, EXPERTS]` of 0 and 1, and whether it is for any."""
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1)
    is_one = (ids >= 0) & (ids < NUM_EXPERTS)
    experts = tl.arange(0, EXPERTS)
    hits = (ids[:, None] == experts[None, :]) & is_one[:, None]
    return hits.to(tl.int32), is_one


@triton.jit
def _place_rows(
    ids_ptr,
    order_ptr,
    places_ptr,
    rows,
    num_rows,
    following,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write where some choices go, `following` `[EXPERTS]` being the next free place of each expert; give the next."""
    hits, is_one = _hits(ids_ptr, rows, num_rows, NUM_EXPERTS, EXPERTS)
    before = tl.cumsum(hits, axis=0) - hits
    places = tl.sum(hits * (before + following[None, :]), axis=1)
    tl.store(places_ptr + rows, tl.where(is_one, places, num_rows), mask=rows < num_rows)
    tl.store(order_ptr + places, rows, mask=is_one)
    return following + tl.sum(hits, axis=0)


@triton.jit
def _write_blocks(
    blocks_ptr,
    counts,
    starts,
    num_blocks,
    first,
    step,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Write every `step`-th `TABLE` entries of the table from `first` on."""
    experts = tl.arange(0, EXPERTS)
    needed = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    ends = tl.cumsum(needed, axis=0)
    shift = starts - (ends - needed) * BLOCK_ROWS
    for start in range(first, num_blocks, step):
        numbers = start + tl.arange(0, TABLE)
        expert = tl.sum((ends[None, :] <= numbers[:, None]).to(tl.int32), axis=1)
        is_this = (experts[None, :] == expert[:, None]).to(tl.int32)
        row = tl.sum(is_this * shift[None, :], axis=1) + numbers * BLOCK_ROWS
        is_used = numbers < tl.sum(needed, axis=0)
        inside = numbers < num_blocks
        tl.store(blocks_ptr + numbers, tl.where(is_used, expert, -1), mask=inside)
        tl.store(blocks_ptr + num_blocks + numbers, tl.where(is_used, row, 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _route_in_one(
    ids_ptr,
    order_ptr,
    places_ptr,
    ends_ptr,
    blocks_ptr,
    num_rows,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TABLE: tl.constexpr,
):
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, num_rows, ROWS):
        hits, _ = _hits(ids_ptr, start + tl.arange(0, ROWS), num_rows, NUM_EXPERTS, EXPERTS)
        counts += tl.sum(hits, axis=0)
    ends = tl.cumsum(counts, axis=0)
    tl.store(ends_ptr + experts, ends, mask=experts < NUM_EXPERTS)
    starts = ends - counts
    following = starts
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        following = _place_rows(ids_ptr, order_ptr, places_ptr, rows, num_rows, following, NUM_EXPERTS, EXPERTS)
    _write_blocks(blocks_ptr, counts, starts, num_blocks, 0, TABLE, EXPERTS, BLOCK_ROWS, TABLE)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _count(
    ids_ptr,
    counts_ptr,
    num_rows,
    rows_each,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """How many of a program's choices are for each expert."""
    program = tl.program_id(0)
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, rows_each, ROWS):
        rows = program * rows_each + start + tl.arange(0, ROWS)
        hits, _ = _hits(ids_ptr, rows, num_rows, NUM_EXPERTS, EXPERTS)
        counts += tl.sum(hits, axis=0)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + program * EXPERTS + experts, counts, mask=experts < EXPERTS)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "rows_each"])
def _place(
    ids_ptr,
    counts_ptr,
    order_ptr,
    places_ptr,
    ends_ptr,
    blocks_ptr,
    num_rows,
    num_blocks,
    rows_each,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Place a program's choices, and write a share of the table; every program adds up the counts for itself."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    earlier = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, programs, ROWS):
        numbers = start + tl.arange(0, ROWS)
        places = numbers[:, None] * EXPERTS + experts[None, :]
        parts = tl.load(counts_ptr + places, mask=(numbers < programs)[:, None], other=0)
        counts += tl.sum(parts, axis=0)
        earlier += tl.sum(tl.where((numbers < program)[:, None], parts, 0), axis=0)
    ends = tl.cumsum(counts, axis=0)
    starts = ends - counts
    if program == 0:
        tl.store(ends_ptr + experts, ends, mask=experts < NUM_EXPERTS)
    following = starts + earlier
    for start in range(0, rows_each, ROWS):
        rows = program * rows_each + start + tl.arange(0, ROWS)
        following = _place_rows(ids_ptr, order_ptr, places_ptr, rows, num_rows, following, NUM_EXPERTS, EXPERTS)
    first, step = program * TABLE, programs * TABLE
    _write_blocks(blocks_ptr, counts, starts, num_blocks, first, step, EXPERTS, BLOCK_ROWS, TABLE)


def wide(dtype: torch.dtype) -> Any:
    """What sums of a dtype are kept in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_stride(rows: torch.Tensor) -> int:
    """The stride between rows `[n, m]`; of one row it could be any number, and each would be compiled for."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


class _Plan(NamedTuple):
    """How choices are sorted.

    Attributes:
        rows: how many a program looks at together.
        experts: how many counts a program keeps.
        in_one: the kernel of one program.
        counting, placing: the two of many programs.
    """

    rows: int
    experts: int
    in_one: Kernel
    counting: Kernel
    placing: Kernel


@cache
def _plan(ids_dtype: torch.dtype, num_experts: int, block_rows: int) -> _Plan:
    experts = max(16, triton.next_power_of_2(num_experts))
    rows = max(16, min(64, _TILE_ELEMENTS // experts))
    table = 16
    constants = (num_experts, experts, rows)
    with_blocks = (*constants, block_rows, table)
    return _Plan(
        rows,
        experts,
        Kernel(_route_in_one, with_blocks, num_warps=4),
        Kernel(_count, constants, num_warps=4),
        Kernel(_place, with_blocks, num_warps=4),
    )


def route(top_k_index: torch.Tensor, *, num_experts: int, block_rows: int) -> Routing:
    """Sort the choices of a router by expert.

    Args:
        top_k_index: `[T, k]`, integers; what is not in `range(num_experts)` names no expert.
        num_experts: how many experts there are.
        block_rows: rows of a block in the table, a power of two.
    """
    num_rows, device = top_k_index.numel(), top_k_index.device
    num_blocks = min(num_experts, num_rows) + num_rows // block_rows
    ids = top_k_index.contiguous()
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    places = torch.empty(num_rows, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    blocks = torch.empty((2, num_blocks), dtype=torch.int32, device=device)
    rows, experts, in_one, counting, placing = _plan(ids.dtype, num_experts, block_rows)
    if num_rows <= _MOST_ROWS_OF_ONE_PROGRAM:
        Launch(in_one, (1, 1, 1), (num_rows, num_blocks))(ids, order, places, ends, blocks)
        return Routing(order, places, ends, blocks, block_rows)
    rows_each = triton.cdiv(triton.cdiv(num_rows, rows), _MOST_PROGRAMS) * rows
    programs = triton.cdiv(num_rows, rows_each)
    counts = torch.empty((programs, experts), dtype=torch.int32, device=device)
    grid = (programs, 1, 1)
    Launch(counting, grid, (num_rows, rows_each))(ids, counts)
    Launch(placing, grid, (num_rows, num_blocks, rows_each))(ids, counts, order, places, ends, blocks)
    return Routing(order, places, ends, blocks, block_rows)
