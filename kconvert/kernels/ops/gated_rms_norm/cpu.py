"""RMSNorm with a gate on the CPU: torch's own fused norm, in place around it where no gradient is needed."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_rms_norm.layout import GatedRMSNormLayout, GatedRMSNormVariant
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedGatedRMSNorm", "gated_rms_norm_cpu"]


def gated_rms_norm_cpu(
    hidden: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, variant: GatedRMSNormVariant
) -> torch.Tensor:
    """See `gated_rms_norm_formula` for the arithmetic."""
    in_place = not torch.is_grad_enabled()
    act = None if gate is None else _activation(gate.float(), variant)
    wide = hidden.float()
    if act is not None and variant.gate_first:
        wide = act.mul_(wide) if in_place else wide * act
    size = wide.shape[-1] // variant.num_groups
    groups = wide if variant.num_groups == 1 else wide.unflatten(-1, (variant.num_groups, size))
    normed = F.rms_norm(groups, (size,), None, variant.eps)
    normed = normed if variant.num_groups == 1 else normed.flatten(-2)
    scaled = weight * normed.to(hidden.dtype) if variant.cast_first else _times(normed, weight.float(), in_place)
    if act is not None and not variant.gate_first:
        scaled = (act.mul_(scaled) if in_place else scaled * act).to(hidden.dtype)
    elif not variant.cast_first:
        scaled = scaled.to(hidden.dtype)
    return scaled.squeeze(1) if variant.squeezes and scaled.dim() == 3 else scaled


def _activation(gate: torch.Tensor, variant: GatedRMSNormVariant) -> torch.Tensor:
    return F.silu(gate) if variant.activation == "silu" else gate.sigmoid()


def _times(normed: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
    return normed.mul_(weight) if in_place else normed * weight


@register_kernel
class CpuFusedGatedRMSNorm(LayoutKernel):
    """RMSNorm with a gate through `torch.nn.functional.rms_norm`."""

    _kernel_id = "cpu_fused_gated_rmsnorm"
    _device = DeviceType.CPU
    layout = GatedRMSNormLayout

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden_states` `[..., n]` and `gate` of the same shape; the result has the stock forward's dtype and shape."""
        norm = cast("GatedRMSNormLayout", module)
        if norm.needs_reference(hidden_states, gate):
            return cast("torch.Tensor", norm.reference(hidden_states, gate))
        return gated_rms_norm_cpu(hidden_states, gate, norm.weight, norm.variant)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("GatedRMSNormLayout", module).variant.why_not
