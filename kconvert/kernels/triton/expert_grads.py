"""The gradients of stacked weights and biases: sums over the rows of each expert.

    weight_grad:  g[e] = sum over rows r of e of outer(a[r], b[r])
    bias_grad:    g[e] = sum over rows r of e of scale[r] * a[r]

Rows may be read through `order`, as in `expert_gemm`.  An expert without rows gets zeros.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kconvert.kernels.triton.expert_gemm import add_product
from kconvert.kernels.triton.expert_routing import Routing, row_stride, wide
from kconvert.kernels.triton.launch import Kernel, Launch

__all__ = ["bias_grad", "weight_grad"]


@triton.jit
def _weight_grad(
    a_ptr,
    b_ptr,
    g_ptr,
    order_ptr,
    ends_ptr,
    A_COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    G_EXPERT: tl.constexpr,
    G_A: tl.constexpr,
    G_B: tl.constexpr,
    A_TOP_K: tl.constexpr,
    B_TOP_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    b_blocks: tl.constexpr = (B_COLUMNS + BLOCK_B - 1) // BLOCK_B
    expert = tl.program_id(1)
    a_columns = tl.program_id(0) // b_blocks * BLOCK_A + tl.arange(0, BLOCK_A)
    b_columns = tl.program_id(0) % b_blocks * BLOCK_B + tl.arange(0, BLOCK_B)
    is_a, is_b = a_columns < A_COLUMNS, b_columns < B_COLUMNS
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([BLOCK_A, BLOCK_B], dtype=WIDE)
    for start in range(first, end, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        inside = rows < end
        a_rows = rows
        b_rows = rows
        if A_TOP_K > 0:
            a_rows = tl.load(order_ptr + rows, mask=inside, other=0) // A_TOP_K
        if B_TOP_K > 0:
            b_rows = tl.load(order_ptr + rows, mask=inside, other=0) // B_TOP_K
        a_ptrs = a_ptr + a_rows.to(tl.int64)[None, :] * A_STRIDE + a_columns[:, None]
        b_ptrs = b_ptr + b_rows.to(tl.int64)[:, None] * B_STRIDE + b_columns[None, :]
        a = tl.load(a_ptrs, mask=inside[None, :] & is_a[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & is_b[None, :], other=0.0)
        total = add_product(total, a, b, WIDE)
    places = expert.to(tl.int64) * G_EXPERT + a_columns[:, None] * G_A + b_columns[None, :] * G_B
    tl.store(g_ptr + places, total.to(g_ptr.dtype.element_ty), mask=is_a[:, None] & is_b[None, :])


@triton.jit
def _bias_grad(
    a_ptr,
    scale_ptr,
    g_ptr,
    order_ptr,
    ends_ptr,
    COLUMNS: tl.constexpr,
    A_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < COLUMNS
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([BLOCK_COLUMNS], dtype=WIDE)
    for start in range(first, end, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = rows < end
        choices = tl.load(order_ptr + rows, mask=inside, other=0)
        if TOP_K > 0:
            rows = choices // TOP_K
        mask = inside[:, None] & is_column[None, :]
        a = tl.load(a_ptr + rows.to(tl.int64)[:, None] * A_STRIDE + columns[None, :], mask=mask, other=0.0).to(WIDE)
        if scale_ptr is not None:
            a = a * tl.load(scale_ptr + choices, mask=inside, other=0.0).to(WIDE)[:, None]
        total += tl.sum(a, axis=0)
    tl.store(g_ptr + expert.to(tl.int64) * COLUMNS + columns, total.to(g_ptr.dtype.element_ty), mask=is_column)


@cache
def _weight_grad_kernel(dtype: torch.dtype, *sizes: int) -> tuple[Kernel, int, int]:
    """The kernel, and the columns of `a` and of `b` that a program has; `sizes` are its constants before these."""
    narrow = dtype.itemsize == 2
    tiles = (128, 128, 64) if narrow else (64, 64, 32) if dtype == torch.float32 else (16, 16, 16)
    kernel = Kernel(_weight_grad, (*sizes, *tiles, wide(dtype)), num_warps=8 if narrow else 4, num_stages=3)
    return kernel, tiles[0], tiles[1]


@cache
def _bias_grad_kernel(
    dtype: torch.dtype, scale_dtype: torch.dtype | None, columns: int, stride: int, top_k: int
) -> Kernel:
    return Kernel(_bias_grad, (columns, stride, top_k, 32, 128, wide(dtype)), num_warps=4)


def weight_grad(
    a: torch.Tensor,
    b: torch.Tensor,
    like: torch.Tensor,
    routing: Routing,
    *,
    a_top_k: int = 0,
    b_top_k: int = 0,
) -> torch.Tensor:
    """The gradient of a weight: for every expert the sum of the outer products of its rows.

    Args:
        a: `[rows, n]`, rows of stride 1.
        b: `[rows, m]`, rows of stride 1.
        like: `[E, n, m]`, the weight; the gradient has its strides where it is dense, as a parameter is.
        routing: the rows of each expert.
        a_top_k: 0 where `a` is sorted, else how many choices a row of it has.
        b_top_k: the same of `b`.
    """
    num_experts, a_columns, b_columns = like.shape
    made = torch.empty_like(like)
    strides = made.stride()
    if strides[1] == 1 and strides[2] != 1:  # the last columns of a block are those that lie side by side
        a, b, a_columns, b_columns, a_top_k, b_top_k = b, a, b_columns, a_columns, b_top_k, a_top_k
        strides = (strides[0], strides[2], strides[1])
    kernel, block_a, block_b = _weight_grad_kernel(
        a.dtype, a_columns, b_columns, row_stride(a), row_stride(b), *strides, a_top_k, b_top_k
    )
    programs = triton.cdiv(a_columns, block_a) * triton.cdiv(b_columns, block_b)
    Launch(kernel, (programs, num_experts, 1), ())(a, b, made, routing.order, routing.ends)
    return made


def bias_grad(
    a: torch.Tensor,
    scale: torch.Tensor | None,
    routing: Routing,
    *,
    top_k: int = 0,
) -> torch.Tensor:
    """The gradient of a bias: for every expert the sum of its rows, `[E, n]`.

    Args:
        a: `[rows, n]`, rows of stride 1.
        scale: a factor for every choice, contiguous, or None.
        routing: the rows of each expert.
        top_k: 0 where `a` is sorted, else how many choices a row of it has.
    """
    num_experts, columns = routing.ends.shape[0], a.shape[-1]
    made = torch.empty((num_experts, columns), dtype=a.dtype, device=a.device)
    kernel = _bias_grad_kernel(a.dtype, None if scale is None else scale.dtype, columns, row_stride(a), top_k)
    Launch(kernel, (triton.cdiv(columns, 128), num_experts, 1), ())(a, scale, made, routing.order, routing.ends)
    return made
