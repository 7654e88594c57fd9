"""RMSNorm over the last dimension, with the residual add before it where a decoder layer has one.

    h = x + residual
    y = h / sqrt(mean(h^2) + eps) * (offset + weight)

in float32, cast to the dtype of `x` before the multiply (`cast_first`, Llama) or after it (Gemma); see
`kconvert.kernels.ops.rms_norm.layout` for how it is found which of the two a class computes.

Backward, with n = h * rstd, g the gradient of y times the scale, and means over a row:

    dh = rstd * (g - n * mean(g * n))  (+ the gradient of h, where h is an output)
    dweight = sum over rows of dy * n

One program works on several whole rows at a time.  In the backward each goes through many rows and keeps its part of
`dweight`; see `column_sums` for the rest.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kconvert.kernels.triton.column_sums import column_sums
from kconvert.kernels.triton.launch import Kernel, Launch, num_processors
from kconvert.kernels.triton.rows import MOST_LAYOUTS, find_rows, row_starts, rows_of

__all__ = ["RMSNormFunction", "add_rms_norm", "block_of", "rms_norm", "stages_of", "wide_dtype", "wide_type"]


@triton.jit(do_not_specialize=["num_rows", "inner", "outer_units", "inner_units"])
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    num_rows,
    inner,
    outer_units,
    inner_units,
    eps,
    offset,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < NUM_COLUMNS)[None, :]
    starts = row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)
    places = rows[:, None] * NUM_COLUMNS + columns[None, :]
    # kept in the caches as if it came again: a row of 8192 was 3 % faster so on an H200
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
    if residual_ptr is not None:
        x = (x.to(WIDE) + tl.load(residual_ptr + places, mask=mask, other=0.0).to(WIDE)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, x, mask=mask)
    wide = x.to(WIDE)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / NUM_COLUMNS + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    y = wide * rstd[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0)
        if CAST_FIRST:
            y = y.to(x.dtype).to(WIDE)
            if HAS_OFFSET:
                weight = (weight.to(WIDE) + offset).to(weight.dtype)
            scale = weight.to(WIDE)
        else:
            scale = weight.to(WIDE) + offset
        y = y * scale[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "inner", "outer_units", "inner_units"])
def _backward(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    num_rows,
    inner,
    outer_units,
    inner_units,
    offset,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    inside = columns < NUM_COLUMNS
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        scale = weight.to(WIDE)
        if HAS_OFFSET:
            scale = scale + offset
            if CAST_FIRST:
                scale = scale.to(weight.dtype).to(WIDE)
        dweight = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = tl.arange(0, ROWS).to(tl.int64) + first
        mask = (rows < num_rows)[:, None] & inside[None, :]
        starts = row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)
        places = rows[:, None] * NUM_COLUMNS + columns[None, :]
        x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + places, mask=mask, other=0.0).to(WIDE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = x.to(WIDE) * rstd[:, None]
        if weight_ptr is not None:
            if CAST_FIRST:
                dweight += dy * normed.to(x.dtype).to(WIDE)
            else:
                dweight += dy * normed
            dy = dy * scale[None, :]
        mean = tl.sum(dy * normed, axis=1) / NUM_COLUMNS
        dx = (dy - normed * mean[:, None]) * rstd[:, None]
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + places, mask=mask, other=0.0).to(WIDE)
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        place = tl.program_id(0).to(tl.int64) * NUM_COLUMNS + columns
        tl.store(dweight_ptr + place, tl.sum(dweight, axis=0), mask=inside)


def wide_type(dtype: torch.dtype) -> Any:
    """The dtype in which a norm of `dtype` is computed, as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a norm of `dtype` is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def block_of(num_columns: int, most: int) -> tuple[int, int, int]:
    """Columns of a block, rows of it, and warps: short rows of `most` elements in all, or one long row."""
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, most // columns)
    elements = rows * columns
    return columns, rows, min(max(elements // 1024, 2), 16)


def stages_of(elements: int, *dtypes: torch.dtype | None) -> int:
    """How far a loop reads ahead, at most 3, where each turn reads so many elements of every dtype.

    What is read ahead waits in shared memory, of which every device that can do this has 99 KiB for a program.
    """
    size = elements * sum(dtype.itemsize for dtype in dtypes if dtype is not None)
    return max(1, min(3, 1 + 96 * 1024 // size))


_MOST_BACKWARD = 4096
"""Elements that a program of the backward has at a time, where a row is no longer; of those, two run on each processor."""


@cache
def _kernel(
    dtype: torch.dtype,
    others: tuple[torch.dtype | None, ...],
    num_columns: int,
    is_flat: bool,
    unit: int,
    has_offset: bool,
    cast_first: bool,
    is_backward: bool,
) -> tuple[Kernel, int]:
    """The kernel for `x` of a dtype, and how many rows a program has at a time.

    `others` are the dtypes of the tensors that may be missing or of another one.  Blocks are as large as was best on an H200:
    the backward goes through many and reads ahead.
    """
    columns, rows, warps = block_of(num_columns, _MOST_BACKWARD if is_backward else 1024)
    constants = (num_columns, columns, rows, is_flat, unit, has_offset, cast_first, wide_type(dtype))
    if not is_backward:
        return Kernel(_forward, constants, num_warps=warps), rows
    _, *read = others
    stages = stages_of(rows * columns, dtype, *read)
    return Kernel(_backward, (*constants, stages), num_warps=warps), rows


@lru_cache(maxsize=MOST_LAYOUTS)
def _forward_launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    others: tuple[torch.dtype | None, ...],
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Launch, int] | None:
    """The launch for such an `x`, and its number of rows; None where it has to be copied first.  `others` as in `_kernel`."""
    found = find_rows(shape, strides)
    if found is None:
        return None
    num_rows, numbers, is_flat, unit = found
    kernel, rows = _kernel(dtype, others, shape[-1], is_flat, unit, offset != 0.0, cast_first, False)
    return Launch(kernel, (-(-num_rows // rows), 1, 1), (num_rows, *numbers, eps, offset)), num_rows


def _run_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
    keeps_rstd: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`y`, `h` (`x`, or a copy of it, where nothing is added), and `1 / sqrt(...)` of every row."""
    weight_dtype = residual_dtype = None
    dtype = made = x.dtype
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
        if cast_first and weight_dtype != dtype:
            made = torch.promote_types(dtype, weight_dtype)
    if residual is not None:
        residual, residual_dtype = residual.contiguous(), residual.dtype
    others = (weight_dtype, residual_dtype, made if keeps_rstd else None)
    found = _forward_launch(x.shape, x.stride(), dtype, others, eps, offset, cast_first)
    if found is None:
        return _run_forward(x.contiguous(), residual, weight, eps, offset, cast_first, keeps_rstd)
    launch, num_rows = found
    y = _empty(x, made)
    total = _empty(x, dtype) if residual is not None else None
    rstd = torch.empty(num_rows, dtype=wide_dtype(dtype), device=x.device) if keeps_rstd else None
    launch(x, residual, weight, y, total, rstd)
    return y, x if total is None else total, rstd


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the shape of `x`."""
    if dtype == x.dtype and x.is_contiguous():
        return torch.empty_like(x)  # a third of the time of the other
    return torch.empty(x.shape, dtype=dtype, device=x.device)


class RMSNormFunction(torch.autograd.Function):
    """`y` and `h` of `x`, `residual` and `weight`; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
        cast_first: bool,
    ) -> Any:
        """`x` `[..., n]`, `residual` as `x`, `weight` `[n]`."""
        y, total, rstd = _run_forward(x, residual, weight, eps, offset, cast_first, True)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset, ctx.cast_first, ctx.has_residual = offset, cast_first, residual is not None
        return (y, total) if residual is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dtotal: torch.Tensor | None = None) -> Any:
        """The gradients of `x` (and of `residual`, which is the same one) and of `weight`."""
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _run_backward(dy, dtotal, x, weight, rstd, ctx.offset, ctx.cast_first)
        return dx, dx if ctx.has_residual else None, dweight, None, None, None


def _run_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, (num_rows, numbers, is_flat, unit) = rows_of(x)
    num_columns = x.shape[-1]
    weight_dtype = dtotal_dtype = parts = None
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
    if dtotal is not None:
        dtotal, dtotal_dtype = dtotal.contiguous(), dtotal.dtype
    others = (weight_dtype, dtotal_dtype, dy.dtype)
    kernel, rows = _kernel(x.dtype, others, num_columns, is_flat, unit, offset != 0.0, cast_first, True)
    at_once = max(1, 2 * _MOST_BACKWARD // (rows * triton.next_power_of_2(num_columns)))
    programs = min(-(-num_rows // rows), at_once * num_processors(x.device))
    dx = _empty(x, x.dtype)
    if weight is not None:
        parts = torch.empty((programs, num_columns), dtype=wide_dtype(x.dtype), device=x.device)
    launch = Launch(kernel, (programs, 1, 1), (num_rows, *numbers, offset))
    launch(dy.contiguous(), dtotal, x, weight, rstd, dx, parts)
    return dx, None if parts is None or weight is None else column_sums(parts, weight.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float, cast_first: bool
) -> torch.Tensor:
    """`x` `[..., n]` normalised over its last dimension, in any float dtype; `weight` `[n]` or None.

    The result has the dtype that `rms_norm_formula` gives.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        made: torch.Tensor = RMSNormFunction.apply(x, None, weight, eps, offset, cast_first)
        return made
    return _run_forward(x, None, weight, eps, offset, cast_first, False)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual`, and that sum, both of the shape of `x`, which `residual` has too."""
    inputs = (x, residual) if weight is None else (x, residual, weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        made: tuple[torch.Tensor, torch.Tensor] = RMSNormFunction.apply(x, residual, weight, eps, offset, cast_first)
        return made
    return _run_forward(x, residual, weight, eps, offset, cast_first, False)[:2]
