"""The gated activation of a packed projection by one operator: `npu_swiglu`, `npu_geglu` or `npu_clipped_swiglu`."""

from __future__ import annotations

from typing import cast

import torch

from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.npu import npu_ops

__all__ = ["gated_act"]

_APPROXIMATE = {"gelu": 0, "gelu_tanh": 1}


def gated_act(packed: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    """`[..., 2 * n]` to `[..., n]`, not empty; in torch operations where no operator has the variant.

    `npu_clipped_swiglu` has no gradient; the others have.
    """
    ops = npu_ops()
    is_halves = not variant.is_interleaved and not variant.is_up_first
    if variant.activation == "silu" and is_halves and variant.limit is None:
        return cast("torch.Tensor", ops.npu_swiglu(packed, dim=-1))
    if variant.activation in _APPROXIMATE and is_halves and variant.limit is None:
        approximate = _APPROXIMATE[variant.activation]
        # by default it activates the right half
        return cast("torch.Tensor", ops.npu_geglu(packed, dim=-1, approximate=approximate, activate_left=True)[0])
    is_clipped = variant.activation == "swiglu_oai" and variant.limit is not None and not variant.is_up_first
    needs_grad = torch.is_grad_enabled() and packed.requires_grad
    if is_clipped and not needs_grad and hasattr(ops, "npu_clipped_swiglu"):
        clipped = ops.npu_clipped_swiglu(
            packed.contiguous(),
            dim=-1,
            alpha=variant.alpha,
            limit=variant.limit,
            bias=1.0,
            interleaved=variant.is_interleaved,
        )
        return cast("torch.Tensor", clipped)
    return gated_formula(packed, variant)
