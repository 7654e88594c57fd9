"""Tensors as rows: how a kernel that works on the last dimension finds them without a copy.

A row is what lies along the last dimension.  Where the others are not one run, as in the query heads of a packed
projection, rows are counted by two of them: row number i begins at `i // inner * outer_stride + i % inner * inner_stride`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["Rows", "read_unit", "row_starts", "rows_of"]


class Rows(NamedTuple):
    """A tensor whose rows can be found, their number, and the three numbers above."""

    tensor: torch.Tensor
    num_rows: int
    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(tensor: torch.Tensor) -> Rows:
    """The rows of `tensor` `[..., n]`; of a contiguous copy where they do not lie in two steps."""
    size = tensor.shape[-1]
    if tensor.is_contiguous():
        return Rows(tensor, tensor.numel() // size if size else 0, 1, size, 0)
    if tensor.stride(-1) == 1 or size == 1:
        runs: list[tuple[int, int]] = []
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if length == 1:
                continue
            if runs and runs[-1][1] == length * stride:
                runs[-1] = (runs[-1][0] * length, stride)
            else:
                runs.append((length, stride))
        if len(runs) <= 1:
            count, stride = runs[0] if runs else (1, size)
            return Rows(tensor, count, 1, stride, 0)
        if len(runs) == 2:
            (outer, outer_stride), (inner, inner_stride) = runs
            return Rows(tensor, outer * inner, inner, outer_stride, inner_stride)
    return rows_of(tensor.contiguous())


def read_unit(*strides: int) -> int:
    """The largest power of two, up to 16, that divides all of these.

    Strides are given to a kernel in this unit, which is compiled in: only then does the compiler know that rows begin where
    16 bytes can be read at once.
    """
    common = 16
    for stride in strides:
        common |= stride
    return common & -common


@triton.jit
def row_starts(rows, inner, outer_units, inner_units, IS_FLAT: tl.constexpr, UNIT: tl.constexpr):
    """Where rows begin; `IS_FLAT` where `inner` is 1."""
    if IS_FLAT:
        starts = rows * outer_units * UNIT
    else:
        starts = (rows // inner * outer_units + rows % inner * inner_units) * UNIT
    return starts
