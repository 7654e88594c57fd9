"""RMSNorm on the CPU: in place where no gradient is needed, and the stock arithmetic where one is.

`torch.nn.functional.rms_norm` is slower than that there, forward and backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, RMSNormVariant, rms_norm_formula
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedRMSNorm", "rms_norm_cpu", "rms_norm_torch"]


def rms_norm_cpu(hidden: torch.Tensor, weight: torch.Tensor | None, variant: RMSNormVariant) -> torch.Tensor:
    """`hidden` `[..., n]` normalised over its last dimension; see `rms_norm_formula` for the arithmetic."""
    run = rms_norm_formula if torch.is_grad_enabled() or torch.compiler.is_compiling() else _in_place
    return run(hidden, weight, eps=variant.eps, offset=variant.offset, cast_first=variant.cast_first)


def _in_place(
    hidden: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float, cast_first: bool
) -> torch.Tensor:
    """`rms_norm_formula`, with its bits, in the memory of the squares where dtypes allow.

    `torch.linalg.vector_norm` needs no squares, but adds them up otherwise: a bfloat16 model then gives other tokens.
    """
    wide = hidden.float()
    squares = wide * wide
    rstd = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = torch.mul(wide, rstd, out=squares)
    if weight is None:
        return normed.to(hidden.dtype)
    if cast_first:
        normed = normed.to(hidden.dtype)
        scale = weight if offset == 0.0 else offset + weight
        return normed.mul_(scale) if scale.dtype == normed.dtype else scale * normed
    scale = weight.float() if offset == 0.0 else offset + weight.float()
    return normed.mul_(scale).to(hidden.dtype)


def rms_norm_torch(
    hidden: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float, cast_first: bool
) -> torch.Tensor:
    """`rms_norm_formula` by `torch.nn.functional.rms_norm`; needs nothing but torch, and is exported as it stands."""
    shape = (hidden.shape[-1],)
    if weight is None:
        return F.rms_norm(hidden.float(), shape, None, eps).to(hidden.dtype)
    if cast_first:
        scale = weight if offset == 0.0 else offset + weight
        if hidden.dtype == torch.float32 == weight.dtype:
            return F.rms_norm(hidden, shape, scale, eps)
        return scale * F.rms_norm(hidden.float(), shape, None, eps).to(hidden.dtype)
    scale = weight.float() if offset == 0.0 else offset + weight.float()
    return F.rms_norm(hidden.float(), shape, scale, eps).to(hidden.dtype)


@register_kernel
class CpuFusedRMSNorm(LayoutKernel):
    """RMSNorm with few temporaries."""

    _kernel_id = "cpu_fused_rmsnorm"
    _device = DeviceType.CPU
    layout = RMSNormLayout

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., n]`, any float dtype; the result has the dtype that the stock forward gives."""
        norm = cast("Any", module)
        weight = norm.weight if norm.variant.has_weight else None
        if weight is not None and hidden_states.dtype != weight.dtype and not norm.variant.mixes:
            return cast("torch.Tensor", norm.reference(hidden_states))
        return rms_norm_cpu(hidden_states, weight, norm.variant)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("RMSNormLayout", module).variant.why_not
