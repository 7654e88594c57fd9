"""The rotary embedding by `npu_rotary_mul`, with `npu_rms_norm` before it where a model norms each head.

    y = x * cos + rotated(x) * sin          rotated: halves exchanged, the first negated; or the same of neighbours

`takes` says what that is the same as: whole heads, turned by a table of a whole head, in the dtype of q and k.
"""

from __future__ import annotations

from typing import cast

import torch

from kconvert.kernels.ascend.rms_norm import rms_norm
from kconvert.kernels.npu import npu_ops
from kconvert.kernels.rotation import HeadNorms, Rotation

__all__ = ["rope", "takes"]

_MOST_DIM, _MOST_HEADS = 896, 1000
"""What `npu_rotary_mul` is documented to take: fewer elements of a head, sequences and heads than these."""


def takes(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    rotation: Rotation,
    heads_axis: int,
    norms: tuple[HeadNorms, torch.Tensor, torch.Tensor] | None,
) -> bool:
    """Whether the operators compute the rotation of these tensors, and the norms with their weights before it."""
    if (norms is not None and norms[1].dtype != q.dtype) or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3):
        return False
    batch, dim = q.shape[0], q.shape[-1]
    heads = max(q.shape[heads_axis], k.shape[heads_axis])
    is_whole = rotation.size == dim and rotation.start == 0 and not rotation.has_half_table and cos.shape[-1] == dim
    # it leaves pairs where it has read them
    is_kept = rotation.writes_halves != rotation.is_interleaved
    has_room = dim < _MOST_DIM and dim % 2 == 0 and batch < _MOST_HEADS and heads < _MOST_HEADS
    is_small = not rotation.is_interleaved or batch * heads < _MOST_HEADS
    is_same = q.dtype == cos.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    is_wide = rotation.is_wide and q.dtype != torch.float32
    return (
        is_whole and is_kept and has_room and is_small and is_same and not is_wide and q.numel() > 0 and k.numel() > 0
    )


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
    """q and k, normed and rotated; what `takes` takes.

    Args:
        q: `[batch, heads, tokens, dim]` or `[batch, tokens, heads, dim]`.
        k: of the same dtype and shape but for the number of heads.
        cos: `[batch or 1, tokens or 1, dim]`, of the dtype of q.
        sin: as `cos`.
        rotation: what is rotated, and how.
        heads_axis: the axis of the heads, 1 or 2.
        norms: the norm of each head before it; None for none.
        q_weight: `[dim]`, the norm's weight for q.
        k_weight: `[dim]`, that for k.
    """
    mode = "interleave" if rotation.is_interleaved else "half"
    cos, sin = cos.unsqueeze(heads_axis), sin.unsqueeze(heads_axis)
    if norms is not None:
        q = rms_norm(q, q_weight, eps=norms.eps, offset=norms.offset)
        k = rms_norm(k, k_weight, eps=norms.eps, offset=norms.offset)
    turned = [npu_ops().npu_rotary_mul(x, cos, sin, rotary_mode=mode) for x in (q, k)]
    return cast("tuple[torch.Tensor, torch.Tensor]", tuple(turned))
