"""The rotary embedding of q and k in one launch, with the RMSNorm of each head before it where a model has one.

    y1 = x1 * cos1 - x2 * sin1
    y2 = x2 * cos2 + x1 * sin2

for the pairs (x1, x2) of each head, which lie half a rotation apart or side by side.  What is not rotated is copied, or
normed and copied.  The norm is that of `kconvert.kernels.triton.rms_norm`, with its rounding.

Rounding is that of the eager formula: products and sum are rounded to the dtype that torch computes them in, so without a
norm the result has its bits.  Backward rounds at the same places, turns back by the same angles, and computes the norm again
instead of keeping it; cos and sin get no gradient.

One program works on some heads of one token: those of q first, then those of k.  In the backward of a norm it goes through many
tokens and keeps its part of the weight's gradient.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kconvert.kernels.rotation import HeadNorms, Rotation
from kconvert.kernels.triton.column_sums import column_sums
from kconvert.kernels.triton.launch import Kernel, Launch, num_processors
from kconvert.kernels.triton.rope_heads import turn_backward, turn_forward
from kconvert.kernels.triton.rows import MOST_LAYOUTS, read_unit

__all__ = ["RopeFunction", "rope"]


_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

_FEW_ROWS = 32
"""Tokens up to which a program has fewer heads, so that there are enough programs for the device."""


class _Plan(NamedTuple):
    """What a launch needs beside its tensors.

    Attributes:
        kernel: what is launched.
        result: the dtype of what a forward gives.
        wide: the dtype that is added up in.
        blocks: how many programs share the heads of q of one token, and those of k.
        scalars: eps and offset.
    """

    kernel: Kernel
    result: torch.dtype
    wide: torch.dtype
    blocks: tuple[int, int]
    scalars: tuple[float, float]


@cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...],
    heads: tuple[int, int],
    dim: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    unit: int,
    most: int,
    k_heads_first: bool = False,
    is_backward: bool = False,
) -> _Plan:
    """`dtypes` are those of x, of cos and sin, of the weights, and of other tensors; `most` is how many elements a program has.

    `k_heads_first` is a constant of the forward alone.
    """
    x, table, weight, *_ = dtypes
    assert x is not None
    assert table is not None
    normed = torch.promote_types(x, weight) if norms is not None and weight is not None and norms.cast_first else x
    arithmetic = torch.promote_types(normed, table)
    if rotation.is_wide:
        arithmetic = torch.promote_types(arithmetic, torch.float32)
    wide = torch.promote_types(arithmetic, torch.float32)
    half, rest = rotation.size // 2, dim - rotation.size
    columns = triton.next_power_of_2(dim)
    q_rows, k_rows = (min(triton.next_power_of_2(count), max(1, most // columns)) for count in heads)
    largest = max(q_rows, k_rows) * columns
    constants: tuple[Any, ...] = (
        unit,
        heads[0],
        q_rows,
        heads[1],
        k_rows,
        dim,
        rotation.start,
        half,
        triton.next_power_of_2(half),
        0 if rotation.start else rotation.size,
        rest,
        triton.next_power_of_2(max(rest, 1)),
        rotation.is_interleaved,
        rotation.writes_halves,
        rotation.has_half_table,
        norms is not None and norms.offset != 0.0,
        norms is not None and norms.cast_first,
        _TRITON_TYPES[normed],
        _TRITON_TYPES[arithmetic],
        _TRITON_TYPES[wide],
    )
    if not is_backward:
        constants = (*constants, k_heads_first)
    # a multiply and an add in one rounding would not be what torch computes
    warps = 1 if largest <= 512 else 2 if largest <= 1024 else 4
    function = turn_backward if is_backward else turn_forward
    return _Plan(
        kernel=Kernel(function, constants, num_warps=warps, enable_fp_fusion=False),
        result=normed if rotation.keeps_dtype else arithmetic,
        wide=wide,
        blocks=(triton.cdiv(heads[0], q_rows), triton.cdiv(heads[1], k_rows)),
        scalars=(0.0, 0.0) if norms is None else (norms.eps, norms.offset),
    )


def _in_one_run(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it, with the last dimension in one run."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_Layout = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides."""


def _layout(x: torch.Tensor) -> _Layout:
    return x.shape, x.stride()


def _steps(layout: _Layout, *axes: int) -> tuple[int, ...]:
    """The strides of some axes; 0 for one of length 1, which could be any number."""
    shape, strides = layout
    return tuple(strides[axis] if shape[axis] != 1 else 0 for axis in axes)


def _in_units(strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """What all strides are multiples of, and each as a number of that."""
    unit = read_unit(*strides)
    return unit, tuple(stride // unit for stride in strides)


def _empty_like(x: torch.Tensor, dtype: torch.dtype, heads_axis: int) -> torch.Tensor:
    """Unwritten, of the shape of `x`, with the heads of a token beside each other in memory."""
    shape = x.shape
    if heads_axis == 2:
        return torch.empty(shape, dtype=dtype, device=x.device)
    _, heads, tokens, dim = shape
    row = heads * dim
    return torch.empty_strided(shape, (tokens * row, dim, row, 1), dtype=dtype, device=x.device)


@lru_cache(maxsize=MOST_LAYOUTS)
def _forward_launch(
    layouts: tuple[_Layout, _Layout, _Layout, _Layout],
    dtypes: tuple[torch.dtype | None, ...],
    rotation: Rotation,
    norms: HeadNorms | None,
    heads_axis: int,
    k_heads_first: bool,
) -> tuple[Launch, torch.dtype]:
    """The launch for such q, k, cos and sin, and the dtype of the result; `dtypes` as in `_plan`."""
    q, k, cos, sin = layouts
    axes = (0, 3 - heads_axis, heads_axis)
    unit, strides = _in_units((*_steps(q, *axes), *_steps(k, *axes), *_steps(cos, 0, 1), *_steps(sin, 0, 1)))
    (batch, tokens, q_heads), dim, k_heads = (q[0][axis] for axis in axes), q[0][3], k[0][heads_axis]
    rows = batch * tokens
    most = 1024 if rows <= _FEW_ROWS else 4096
    plan = _plan(dtypes, (q_heads, k_heads), dim, rotation, norms, unit, most, k_heads_first)
    return Launch(plan.kernel, (rows, sum(plan.blocks), 1), (tokens, *strides, *plan.scalars)), plan.result


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rotation: Rotation,
    norms: HeadNorms | None,
    heads_axis: int,
    k_heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`k_heads_first`: the rotated k is contiguous as `[batch, heads, tokens, dim]`, where that is its shape."""
    q, k, cos, sin = _in_one_run(q), _in_one_run(k), _in_one_run(cos), _in_one_run(sin)
    layouts = (_layout(q), _layout(k), _layout(cos), _layout(sin))
    dtypes = (q.dtype, cos.dtype, None if q_weight is None else q_weight.dtype)
    k_heads_first = k_heads_first and heads_axis == 1
    launch, result = _forward_launch(layouts, dtypes, rotation, norms, heads_axis, k_heads_first)
    q_out = _empty_like(q, result, heads_axis)
    k_out = _empty_like(k, result, 2 if k_heads_first else heads_axis)
    launch(q, k, cos, sin, q_weight, k_weight, q_out, k_out)
    return q_out, k_out


def _run_backward(
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    rotation: Rotation,
    norms: HeadNorms | None,
    heads_axis: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`saved` is cos and sin, and where there are norms q, k and their weights; `dtype` is that of q and k."""
    cos, sin, *normed = saved
    q, k, q_weight, k_weight = normed or (None, None, None, None)
    dq, dk = _empty_like(dq_out, dtype, heads_axis), _empty_like(dk_out, dtype, heads_axis)
    dq_out, dk_out, cos, sin = _in_one_run(dq_out), _in_one_run(dk_out), _in_one_run(cos), _in_one_run(sin)
    axes = (0, 3 - heads_axis, heads_axis)
    x_steps: tuple[int, ...] = (0,) * 6
    if q is not None and k is not None:
        q, k = _in_one_run(q), _in_one_run(k)
        x_steps = (*_steps(_layout(q), *axes), *_steps(_layout(k), *axes))
    steps = (*_steps(_layout(dq_out), *axes), *_steps(_layout(dk_out), *axes), *x_steps)
    unit, strides = _in_units((*steps, *_steps(_layout(cos), 0, 1), *_steps(_layout(sin), 0, 1)))
    shape = dq_out.shape
    heads, tokens = (shape[heads_axis], dk_out.shape[heads_axis]), shape[3 - heads_axis]
    dtypes = (dtype, cos.dtype, None if q_weight is None else q_weight.dtype, dq_out.dtype, dk_out.dtype)
    plan = _plan(dtypes, heads, shape[3], rotation, norms, unit, 2048, is_backward=True)
    rows = programs = shape[0] * tokens
    parts: list[torch.Tensor | None] = [None, None]
    if norms is not None:
        programs = min(rows, num_processors(dq.device) * 4)
        sizes = [(programs * count, shape[3]) for count in plan.blocks]
        parts = [torch.empty(size, dtype=plan.wide, device=dq.device) for size in sizes]
    launch = Launch(plan.kernel, (programs, sum(plan.blocks), 1), (rows, tokens, *strides, *plan.scalars))
    launch(dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, dq, dk, *parts)
    weights = (q_weight, k_weight)
    dq_weight, dk_weight = (
        None if part is None or weight is None else column_sums(part, weight.dtype)
        for part, weight in zip(parts, weights, strict=True)
    )
    return dq, dk, dq_weight, dk_weight


class RopeFunction(torch.autograd.Function):
    """Rotated q and k; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        rotation: Rotation,
        norms: HeadNorms | None,
        heads_axis: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rope`."""
        ctx.save_for_backward(cos, sin, *(() if norms is None else (q, k, q_weight, k_weight)))
        ctx.rotation, ctx.norms, ctx.heads_axis, ctx.dtype = rotation, norms, heads_axis, q.dtype
        return _run_forward(q, k, cos, sin, q_weight, k_weight, rotation, norms, heads_axis, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: torch.Tensor, dk_out: torch.Tensor) -> Any:
        """The gradients of q, k and the weights."""
        dq, dk, dq_weight, dk_weight = _run_backward(
            dq_out, dk_out, ctx.saved_tensors, ctx.rotation, ctx.norms, ctx.heads_axis, ctx.dtype
        )
        return dq, dk, None, None, dq_weight, dk_weight, None, None, None


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rotation: Rotation,
    heads_axis: int,
    norms: HeadNorms | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, rotated.

    Args:
        q: `[batch, heads, tokens, dim]`, with any strides, or `[batch, tokens, heads, dim]`.
        k: of the same dtype and shape but for the number of heads.
        cos: `[batch or 1, tokens or 1, n]`; `n` is `rotation.size`, or half of it where `has_half_table`, of which a wider
            one's first elements are read.
        sin: as `cos`, of its dtype.
        rotation: what is rotated, and how.
        heads_axis: the axis of the heads, 1 or 2.
        norms: the norm of each head before it; None for none.
        q_weight: `[dim]`, the norm's weight for q; contiguous.
        k_weight: `[dim]`, that for k, of the same dtype; contiguous.

    Returns:
        Both in shape as they were given, and in memory with the heads of a token beside each other, as elementwise operations
        leave what a projection gives; but k without gradients has the tokens of a head beside each other where it is given with
        heads first, as caches keep it, which copy that faster.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (q_weight is not None and q_weight.requires_grad)
        or (k_weight is not None and k_weight.requires_grad)
    ):
        made: tuple[torch.Tensor, torch.Tensor] = RopeFunction.apply(
            q, k, cos, sin, q_weight, k_weight, rotation, norms, heads_axis
        )
        return made
    return _run_forward(q, k, cos, sin, q_weight, k_weight, rotation, norms, heads_axis, True)
