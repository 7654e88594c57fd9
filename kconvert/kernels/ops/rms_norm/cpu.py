"""RMSNorm on the CPU: torch's own fused op where the cast order allows, in place where no gradient is needed."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, RMSNormVariant
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedRMSNorm", "rms_norm_cpu"]


def rms_norm_cpu(hidden: torch.Tensor, weight: torch.Tensor, variant: RMSNormVariant) -> torch.Tensor:
    """`hidden` `[..., n]` normalised over its last dimension; see `rms_norm_formula` for the arithmetic."""
    shape = (hidden.shape[-1],)
    if variant.cast_first:
        scale = weight if variant.offset == 0.0 else variant.offset + weight
        if hidden.dtype == torch.float32 == weight.dtype:
            return F.rms_norm(hidden, shape, scale, variant.eps)
        normed = F.rms_norm(hidden.float(), shape, None, variant.eps).to(hidden.dtype)
        return scale * normed
    scale = weight.float() if variant.offset == 0.0 else variant.offset + weight.float()
    return F.rms_norm(hidden.float(), shape, scale, variant.eps).to(hidden.dtype)


@register_kernel
class CpuFusedRMSNorm(LayoutKernel):
    """RMSNorm through `torch.nn.functional.rms_norm`."""

    _kernel_id = "cpu_fused_rmsnorm"
    _device = DeviceType.CPU
    layout = RMSNormLayout

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., n]`, any float dtype; the result has the dtype that the stock forward gives."""
        norm = cast("Any", module)
        if hidden_states.dtype != norm.weight.dtype and not norm.variant.mixes:
            return cast("torch.Tensor", norm.reference(hidden_states))
        return rms_norm_cpu(hidden_states, norm.weight, norm.variant)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("RMSNormLayout", module).variant.why_not
