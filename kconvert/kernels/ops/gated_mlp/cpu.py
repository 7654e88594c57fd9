"""Packed gated MLP on the CPU: one GEMM for gate and up, the product in place where no gradient is needed."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout, prove_swiglu
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedSwiGLU", "swiglu_cpu"]


def swiglu_cpu(packed: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[..., 2 * n]`, gate first, as `[..., n]`, with one temporary where no gradient is needed."""
    gate, up = packed.chunk(2, dim=-1)
    if packed.requires_grad:
        return F.silu(gate) * up
    # not in place in `gate`: half rows are not contiguous, and the next GEMM would have to copy them
    return F.silu(gate).mul_(up)


@register_kernel
class CpuFusedSwiGLU(LayoutKernel):
    """The packed projection, silu and product, and the down projection."""

    _kernel_id = "cpu_fused_swiglu"
    _device = DeviceType.CPU
    layout = GatedMLPLayout

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        mlp = cast("GatedMLPLayout", module)
        return cast("torch.Tensor", mlp.down_proj(swiglu_cpu(mlp.gate_up_proj(hidden_states))))

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be `down(silu(gate) * up)`."""
        return prove_swiglu(cast("GatedMLPLayout", module))
