"""RMSNorm and packed gated MLP on the CPU, without a second dispatch between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.cpu import CpuFusedSwiGLU
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.kernels.ops.rms_norm.cpu import CpuFusedRMSNorm
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedRMSNormSwiGLU"]


@register_kernel
class CpuFusedRMSNormSwiGLU(LayoutKernel):
    """The CPU kernels of both layouts in one call."""

    _kernel_id = "cpu_fused_rmsnorm_swiglu"
    _device = DeviceType.CPU
    layout = NormGatedMLPLayout
    default = False

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        fused = cast("Any", module)
        return CpuFusedSwiGLU.forward(fused.mlp, CpuFusedRMSNorm.forward(fused.norm, hidden_states))

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """What either kernel says."""
        fused = cast("NormGatedMLPLayout", module)
        return CpuFusedRMSNorm.supports(fused.norm) or CpuFusedSwiGLU.supports(fused.mlp)
