"""RMSNorm by `npu_rms_norm`, which computes in float32 and rounds once, behind the multiply.

Where a class casts before the multiply, its bfloat16 results may be a step away from these.
"""

from __future__ import annotations

from typing import cast

import torch

from kconvert.kernels.npu import npu_ops

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension, in the dtype of `x`.

    Args:
        x: `[..., n]`, of two dimensions at least, not empty; bfloat16, float16 or float32.
        weight: `[n]`, of the dtype of `x`; None for none.
        eps: added to the mean.
        offset: added to the weight in float32.
    """
    ops = npu_ops()
    if weight is None:
        return cast("torch.Tensor", ops.npu_rms_norm(x, x.new_ones(x.shape[-1]), epsilon=eps)[0])
    if offset == 0.0:
        return cast("torch.Tensor", ops.npu_rms_norm(x, weight, epsilon=eps)[0])
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if offset == 1.0 and not needs_grad and hasattr(ops, "npu_gemma_rms_norm"):
        return cast("torch.Tensor", ops.npu_gemma_rms_norm(x.contiguous(), weight, epsilon=eps)[0])
    wide = ops.npu_rms_norm(x.float(), weight.float() + offset, epsilon=eps)[0]
    return cast("torch.Tensor", wide.to(x.dtype))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual`, and that sum; `npu_add_rms_norm`, which has no gradient.

    Args:
        x: as `rms_norm`.
        residual: as `x`.
        weight: `[n]`, of the dtype of `x`.
        eps: added to the mean.
    """
    normed, _, total = npu_ops().npu_add_rms_norm(x, residual, weight, epsilon=eps)
    return normed, total
