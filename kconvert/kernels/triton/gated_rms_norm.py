"""RMSNorm with a gate, over the last dimension or groups of it, as state-space and linear-attention layers end with.

    gate first (Mamba2):       y = weight * norm(x * act(gate))
    gate last (Qwen3-Next):    y = weight * norm(x) * act(gate)

with act = silu or sigmoid, norm(h) = h / sqrt(mean(h^2) + eps) within each group, in float32.  `cast_first` casts the
normed values to the dtype of `x` before the multiply with `weight`; see `kconvert.kernels.ops.gated_rms_norm.layout`.

Backward, with n = norm(h), g the gradient of n, and means over a group: dh = rstd * (g - n * mean(g * n)).  What the
gate does to the rest is computed again from `x` and `gate`; kept are these and one number per group.

One program works on one group of several rows.  In the backward each goes through many rows and keeps its part of
`dweight`; see `column_sums` for the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kconvert.kernels.triton.column_sums import column_sums
from kconvert.kernels.triton.launch import Kernel, Launch, num_processors
from kconvert.kernels.triton.rms_norm import block_of, stages_of, wide_dtype, wide_type
from kconvert.kernels.triton.rows import row_starts, rows_of

__all__ = ["GatedRMSNormFunction", "gated_rms_norm"]

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_NUMBERS = ["num_rows", "inner", "outer_units", "inner_units", "gate_inner", "gate_outer_units", "gate_inner_units"]


@triton.jit(do_not_specialize=_NUMBERS)
def _forward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    num_rows,
    inner,
    outer_units,
    inner_units,
    gate_inner,
    gate_outer_units,
    gate_inner_units,
    eps,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    GATE_IS_FLAT: tl.constexpr,
    GATE_UNIT: tl.constexpr,
    IS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = columns < NUM_COLUMNS
    mask = (rows < num_rows)[:, None] & inside[None, :]
    places = group * NUM_COLUMNS + columns
    starts = row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)
    x = tl.load(x_ptr + starts[:, None] + places[None, :], mask=mask, other=0.0)
    wide = x.to(WIDE)
    if gate_ptr is not None:
        gate_starts = row_starts(rows, gate_inner, gate_outer_units, gate_inner_units, GATE_IS_FLAT, GATE_UNIT)
        gate = tl.load(gate_ptr + gate_starts[:, None] + places[None, :], mask=mask, other=0.0).to(WIDE)
        act = 1.0 / (1.0 + tl.exp(-gate))
        if IS_SILU:
            act = gate * act
        if GATE_FIRST:
            wide = wide * act
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / NUM_COLUMNS + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows * NUM_GROUPS + group, rstd, mask=rows < num_rows)
    y = wide * rstd[:, None]
    weight = tl.load(weight_ptr + places, mask=inside, other=0.0).to(WIDE)
    if CAST_FIRST:
        y = (y.to(x.dtype).to(WIDE) * weight[None, :]).to(SCALED).to(WIDE)
    else:
        y = y * weight[None, :]
    if gate_ptr is not None:
        if not GATE_FIRST:
            y = y * act
    y_places = rows[:, None] * (NUM_GROUPS * NUM_COLUMNS) + places[None, :]
    tl.store(y_ptr + y_places, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def _backward(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    num_rows,
    inner,
    outer_units,
    inner_units,
    gate_inner,
    gate_outer_units,
    gate_inner_units,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    GATE_IS_FLAT: tl.constexpr,
    GATE_UNIT: tl.constexpr,
    IS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    inside = columns < NUM_COLUMNS
    places = group * NUM_COLUMNS + columns
    weight = tl.load(weight_ptr + places, mask=inside, other=0.0).to(WIDE)
    dweight = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = tl.arange(0, ROWS).to(tl.int64) + first
        mask = (rows < num_rows)[:, None] & inside[None, :]
        y_places = rows[:, None] * (NUM_GROUPS * NUM_COLUMNS) + places[None, :]
        starts = row_starts(rows, inner, outer_units, inner_units, IS_FLAT, UNIT)
        x = tl.load(x_ptr + starts[:, None] + places[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + y_places, mask=mask, other=0.0).to(WIDE)
        rstd = tl.load(rstd_ptr + rows * NUM_GROUPS + group, mask=rows < num_rows, other=0.0)
        wide = x.to(WIDE)
        if gate_ptr is not None:
            gate_starts = row_starts(rows, gate_inner, gate_outer_units, gate_inner_units, GATE_IS_FLAT, GATE_UNIT)
            gate = tl.load(gate_ptr + gate_starts[:, None] + places[None, :], mask=mask, other=0.0).to(WIDE)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            if IS_SILU:
                act = gate * sigmoid
                slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            else:
                act = sigmoid
                slope = sigmoid * (1.0 - sigmoid)
            if GATE_FIRST:
                wide = wide * act
        normed = wide * rstd[:, None]
        cast = normed
        if CAST_FIRST:
            cast = normed.to(x.dtype).to(WIDE)
        if gate_ptr is not None:
            if not GATE_FIRST:
                scaled = cast * weight[None, :]
                if CAST_FIRST:
                    scaled = scaled.to(SCALED).to(WIDE)
                tl.store(dgate_ptr + y_places, (dy * scaled * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
                dy = dy * act
        dweight += dy * cast
        dy = dy * weight[None, :]
        mean = tl.sum(dy * normed, axis=1) / NUM_COLUMNS
        dx = (dy - normed * mean[:, None]) * rstd[:, None]
        if gate_ptr is not None:
            if GATE_FIRST:
                dgate = dx * x.to(WIDE) * slope
                tl.store(dgate_ptr + y_places, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
                dx = dx * act
        tl.store(dx_ptr + y_places, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = tl.program_id(0).to(tl.int64) * (NUM_GROUPS * NUM_COLUMNS) + places
    tl.store(dweight_ptr + part, tl.sum(dweight, axis=0), mask=inside)


_Constants = tuple[int, bool, bool, bool]
"""Number of groups, whether the gate's function is silu, whether it comes first, whether the cast comes first."""


@cache
def _kernel(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    others: tuple[torch.dtype | None, ...],
    size: int,
    constants: _Constants,
    rows_constants: tuple[bool, int, bool, int],
    is_backward: bool,
) -> tuple[Kernel, int]:
    """The kernel for `x` `[..., size]` of a dtype, and how many rows a program has at a time.

    `others` are the dtypes of the tensors that may be missing or of another one.
    """
    num_groups, *flags = constants
    num_columns = size // num_groups
    columns, rows, warps = block_of(num_columns, 4096 if is_backward else 1024)
    scaled = torch.promote_types(dtype, weight_dtype)
    given: tuple[Any, ...] = (
        num_columns,
        num_groups,
        columns,
        rows,
        *rows_constants,
        *flags,
        _TYPES[scaled],
        wide_type(dtype),
    )
    if not is_backward:
        return Kernel(_forward, given, num_warps=warps), rows
    return Kernel(_backward, (*given, stages_of(rows * columns, dtype, *others)), num_warps=warps), rows


def _run_forward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    constants: _Constants,
    keeps_rstd: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`y`, and `1 / sqrt(...)` of every group."""
    num_groups, _, gate_first, cast_first = constants
    read, rows = rows_of(x)
    gate, gate_rows = (None, rows) if gate is None else rows_of(gate)
    # a gate that comes last is multiplied in float32, and the result cast back
    is_promoted = cast_first and (gate_first or gate is None)
    dtype = torch.promote_types(x.dtype, weight.dtype) if is_promoted else x.dtype
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rstd = None
    if keeps_rstd:
        rstd = torch.empty(rows.num_rows * num_groups, dtype=wide_dtype(x.dtype), device=x.device)
    others = (None if gate is None else gate.dtype, dtype if keeps_rstd else None)
    where = (rows.is_flat, rows.unit, gate_rows.is_flat, gate_rows.unit)
    kernel, rows_each = _kernel(x.dtype, weight.dtype, others, x.shape[-1], constants, where, False)
    grid = (-(-rows.num_rows // rows_each), num_groups, 1)
    launch = Launch(kernel, grid, (rows.num_rows, *rows.numbers, *gate_rows.numbers, eps))
    launch(read, gate, weight.contiguous(), y, rstd)
    return y, rstd


def _run_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    constants: _Constants,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    num_groups = constants[0]
    read, rows = rows_of(x)
    gate, gate_rows = (None, rows) if gate is None else rows_of(gate)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    others = (None if gate is None else gate.dtype, dy.dtype)
    where = (rows.is_flat, rows.unit, gate_rows.is_flat, gate_rows.unit)
    kernel, rows_each = _kernel(x.dtype, weight.dtype, others, x.shape[-1], constants, where, True)
    programs = min(-(-rows.num_rows // rows_each), max(1, 2 * num_processors(x.device) // num_groups))
    parts = torch.empty((programs, x.shape[-1]), dtype=wide_dtype(x.dtype), device=x.device)
    launch = Launch(kernel, (programs, num_groups, 1), (rows.num_rows, *rows.numbers, *gate_rows.numbers))
    launch(dy.contiguous(), read, gate, weight.contiguous(), rstd, dx, dgate, parts)
    return dx, dgate, column_sums(parts, weight.dtype)


class GatedRMSNormFunction(torch.autograd.Function):
    """`y` of `x`, `gate` and `weight`; see the module."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, constants: _Constants
    ) -> torch.Tensor:
        """`x` `[..., n]`, `gate` as `x`, `weight` `[n]`."""
        y, rstd = _run_forward(x, gate, weight, eps, constants, True)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.constants = constants
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """The gradients of `x`, `gate` and `weight`."""
        x, gate, weight, rstd = ctx.saved_tensors
        return *_run_backward(dy, x, gate, weight, rstd, ctx.constants), None, None


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    num_groups: int,
    is_silu: bool,
    gate_first: bool,
    cast_first: bool,
) -> torch.Tensor:
    """`x` `[..., n]` normalised over `num_groups` parts of its last dimension, and gated.

    Args:
        x: any float dtype and strides.
        gate: of the shape of `x`, in a dtype of its own; None for no gate.
        weight: `[n]`.
        eps: added to the mean square, inside the root.
        num_groups: divides n.
        is_silu: the gate's function: silu, or sigmoid.
        gate_first: the gate comes before the norm.
        cast_first: the cast to the dtype of `x` comes before the multiply with `weight`.

    Returns:
        Contiguous, in the dtype that `gated_rms_norm_formula` gives.
    """
    constants = (num_groups, is_silu, gate_first, cast_first)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (gate is not None and gate.requires_grad)
    ):
        made: torch.Tensor = GatedRMSNormFunction.apply(x, gate, weight, eps, constants)
        return made
    return _run_forward(x, gate, weight, eps, constants, False)[0]
