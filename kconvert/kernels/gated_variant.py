"""What a gated activation computes, as data and as a formula in plain torch.

    y = act(gate) * up                                   act: silu, gelu (erf) or gelu_tanh
    y = (up + 1) * gate * sigmoid(alpha * gate)          `swiglu_oai`, as gpt-oss has it

With a limit, gate is clamped from above and up to both sides before anything else.  Nothing is decided here: layouts
find the variant of a stock class, kernels compute it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["GatedVariant", "gated_formula"]


class GatedVariant(NamedTuple):
    """What is computed.

    Attributes:
        activation: `silu`, `gelu`, `gelu_tanh` or `swiglu_oai`.
        limit: what gate is clamped to from above, and up to both sides; None for no clamp.
        alpha: of `swiglu_oai`.
        is_up_first: whether up comes before gate, as a half or in each pair.
        is_interleaved: whether gate and up take turns, instead of being halves.
    """

    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    is_up_first: bool = False
    is_interleaved: bool = False


def gated_formula(packed: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    """`[..., 2 * n]` to `[..., n]`, in the dtype of `packed`."""
    one, two = (packed[..., ::2], packed[..., 1::2]) if variant.is_interleaved else packed.chunk(2, dim=-1)
    gate, up = (two, one) if variant.is_up_first else (one, two)
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(min=-variant.limit, max=variant.limit)
    if variant.activation == "silu":
        return F.silu(gate) * up
    if variant.activation == "swiglu_oai":
        return (up + 1.0) * (gate * torch.sigmoid(gate * variant.alpha))
    return F.gelu(gate, approximate="tanh" if variant.activation == "gelu_tanh" else "none") * up
