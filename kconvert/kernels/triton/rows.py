"""Tensors as rows: how a kernel that works on the last dimension finds them without a copy.

A row is what lies along the last dimension.  Where the others are not one run, as in the query heads of a packed
projection, rows are counted by two of them: row number i begins at `i // inner * outer_stride + i % inner * inner_stride`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["MOST_LAYOUTS", "Rows", "find_rows", "read_unit", "row_starts", "rows_of"]


class Rows(NamedTuple):
    """How the rows of a tensor are found.

    Attributes:
        num_rows: how many there are.
        numbers: the three numbers above, strides in the unit.
        is_flat: whether the first of these is 1.
        unit: see `read_unit`.
    """

    num_rows: int
    numbers: tuple[int, int, int]
    is_flat: bool
    unit: int


MOST_LAYOUTS = 4096
"""For how many shapes and strides the rows stay known: those of prompts are many, and may not come again."""


@lru_cache(maxsize=MOST_LAYOUTS)
def find_rows(shape: torch.Size, strides: tuple[int, ...], step: int = 0) -> Rows | None:
    """The rows of a tensor `[..., n]`, or None where they do not lie in two steps; the unit divides `step` too."""
    size = shape[-1]
    if 0 in shape:
        return _rows(0, 1, size, 0, step)
    if strides[-1] != 1 and size != 1:
        return None
    runs: list[tuple[int, int]] = []
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1] == length * stride:
            runs[-1] = (runs[-1][0] * length, stride)
        else:
            runs.append((length, stride))
    if len(runs) > 2:
        return None
    if len(runs) == 2:
        (outer, outer_stride), (inner, inner_stride) = runs
        return _rows(outer * inner, inner, outer_stride, inner_stride, step)
    count, stride = runs[0] if runs else (1, size)
    return _rows(count, 1, stride, 0, step)


def _rows(num_rows: int, inner: int, outer_stride: int, inner_stride: int, step: int) -> Rows:
    unit = read_unit(outer_stride, inner_stride, step)
    return Rows(num_rows, (inner, outer_stride // unit, inner_stride // unit), inner == 1, unit)


def rows_of(tensor: torch.Tensor, step: int = 0) -> tuple[torch.Tensor, Rows]:
    """`tensor` `[..., n]` and its rows; of a contiguous copy where they do not lie in two steps."""
    rows = find_rows(tensor.shape, tensor.stride(), step)
    return (tensor, rows) if rows is not None else rows_of(tensor.contiguous(), step)


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
