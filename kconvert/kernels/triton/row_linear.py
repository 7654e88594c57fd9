"""A linear layer applied to one row, as decoding has it: reading the weight is all that it costs.

    y = weight @ x + bias                      weight [n, k]
    y = act(gate) * up                         gate, up: the two halves of such a y

Products and sums are float32; y, and in the gated form gate, up and act(gate), are rounded to the dtype of `x`, as a
projection and an activation of their own round them.  A program makes `ROWS` results and reads whole rows of the weight, as
many bytes at once as its threads can ask for; each byte is read once, so it need not stay in a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kconvert.kernels.triton.gated_act import _activated

__all__ = ["launch_row_linear", "row_linear", "row_product"]


@triton.jit
def row_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """`ROWS` results of `weight @ x`; with an activation, those of the gated form."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows < NUM_ROWS
    places = rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, NUM_COLUMNS, COLUMNS):
        mask = inside[:, None] & (first + columns < NUM_COLUMNS)[None, :]
        part = tl.load(weight_ptr + places + first, mask=mask, other=0.0, eviction_policy="evict_first")
        if ACTIVATION is not None:
            up_places = places + first + NUM_ROWS * NUM_COLUMNS
            part_up = tl.load(weight_ptr + up_places, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + first + columns, mask=first + columns < NUM_COLUMNS, other=0.0).to(tl.float32)
        total += part.to(tl.float32) * x[None, :]
        if ACTIVATION is not None:
            total_up += part_up.to(tl.float32) * x[None, :]
    y = tl.sum(total, axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.sum(total_up, axis=1)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + NUM_ROWS + rows, mask=inside, other=0.0).to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        gate = _activated(y.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        y = gate * up.to(dtype).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


_COLUMNS = 2048
"""Columns read at once; a program has as many rows as make up this many where rows are shorter."""

_LONG = 4096
"""Rows of more columns take longer than half of the warps need to start: which was best on an H200."""


def launch_row_linear(
    product: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """`row_linear`, with `row_product` as it is launched."""
    num_columns = weight.shape[1]
    num_rows = weight.shape[0] if activation is None else weight.shape[0] // 2
    columns = min(triton.next_power_of_2(num_columns), _COLUMNS)
    is_long = num_columns > _LONG and activation is None
    rows = _COLUMNS // columns
    y = torch.empty((*x.shape[:-1], num_rows), dtype=x.dtype, device=x.device)
    product[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        bias,
        y,
        NUM_ROWS=num_rows,
        NUM_COLUMNS=num_columns,
        ROWS=rows,
        COLUMNS=columns,
        ACTIVATION=activation,
        num_warps=4 if is_long else 8,
    )
    return y


@torch.library.triton_op("kconvert::row_linear", mutates_args=())
def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """`x` `[..., k]` of one row to `[..., n]`, or with an activation to `[..., n / 2]`; it has no gradient.

    Args:
        x: contiguous, bfloat16 or float16.
        weight: `[n, k]`, contiguous, of the dtype of `x`.
        bias: `[n]` or None.
        activation: `silu`, `gelu`, `gelu_tanh` or None.
    """
    return launch_row_linear(torch.library.wrap_triton(row_product), x, weight, bias, activation)
