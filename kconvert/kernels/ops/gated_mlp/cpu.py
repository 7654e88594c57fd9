"""Packed gated MLP on the CPU: one GEMM for gate and up, the product in place where no gradient is needed."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import ACTIVATIONS, GELUS, GatedMLPLayout, gelu_of, prove_activation
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedGeGLU", "CpuFusedSwiGLU", "gated_product_cpu"]


def gated_product_cpu(packed: torch.Tensor, activation: str) -> torch.Tensor:
    """`act(gate) * up` of `[..., 2 * n]`, gate first, as `[..., n]`, with one temporary where no gradient is needed."""
    gate, up = packed.chunk(2, dim=-1)
    activated = ACTIVATIONS[activation](gate)
    if packed.requires_grad:
        return activated * up
    # not in place in `gate`: half rows are not contiguous, and the next GEMM would have to copy them
    return activated.mul_(up)


class _CpuGatedMLP(LayoutKernel):
    """The packed projection, the gated product, and the down projection."""

    _device = DeviceType.CPU
    layout = GatedMLPLayout
    activations: ClassVar[tuple[str, ...]]

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be `down(act(gate) * up)` with one of these activations."""
        return prove_activation(cast("GatedMLPLayout", module), *cls.activations)


def _run(module: nn.Module, hidden_states: torch.Tensor, activation: str) -> torch.Tensor:
    mlp = cast("GatedMLPLayout", module)
    return cast("torch.Tensor", mlp.down_proj(gated_product_cpu(mlp.gate_up_proj(hidden_states), activation)))


@register_kernel
class CpuFusedSwiGLU(_CpuGatedMLP):
    """The gated MLP with silu (SwiGLU)."""

    _kernel_id = "cpu_fused_swiglu"
    activations = ("silu",)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, "silu")


@register_kernel
class CpuFusedGeGLU(_CpuGatedMLP):
    """The gated MLP with gelu (GeGLU), exact or, as Gemma has it, in its tanh form."""

    _kernel_id = "cpu_fused_geglu"
    activations = GELUS

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, gelu_of(cast("GatedMLPLayout", module)))
