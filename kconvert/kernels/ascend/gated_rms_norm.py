"""RMSNorm with a gate: the norm by `npu_rms_norm` in float32, the gate around it in torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kconvert.kernels.ascend.rms_norm import rms_norm

__all__ = ["gated_rms_norm"]


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
    """See `kconvert.kernels.ops.gated_rms_norm.layout` for the arithmetic, which is rounded as it is there.

    Args:
        x: `[..., n]`, of two dimensions at least, not empty.
        gate: of the shape of `x`, or None.
        weight: `[n]`.
        eps: added to the mean of each group.
        num_groups: how many parts of a row are normed apart.
        is_silu: whether the gate goes through silu, else through a sigmoid.
        gate_first: whether the gate comes before the norm.
        cast_first: whether the norm is cast to the dtype of `x` before the multiply.
    """
    wide, act = x.float(), None
    if gate is not None:
        act = F.silu(gate.float()) if is_silu else gate.float().sigmoid()
        if gate_first:
            wide = wide * act
    groups = wide if num_groups == 1 else wide.unflatten(-1, (num_groups, -1))
    normed = rms_norm(groups, None, eps=eps, offset=0.0)
    normed = normed if num_groups == 1 else normed.flatten(-2)
    scaled = weight * normed.to(x.dtype) if cast_first else weight.float() * normed
    if act is not None and not gate_first:
        return (scaled * act).to(x.dtype)
    return scaled if cast_first else scaled.to(x.dtype)
