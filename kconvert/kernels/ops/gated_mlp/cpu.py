"""Packed gated MLP on the CPU.

One row is one GEMM.  Of several rows, where no gradient is needed, gate and up are two products over the halves of the packed
weight, and all that follows is in place: these products cost what they cost, and halves of one result would have gaps, over which
an activation is slower.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
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
    is_whole = torch.compiler.is_compiling() or hidden_states.numel() <= hidden_states.shape[-1]
    halves = None if is_whole else mlp.kconvert_project_apart("gate_up_proj", hidden_states)
    if halves is None:
        gated = gated_product_cpu(mlp.gate_up_proj(hidden_states), activation)
    else:
        gate, up = halves
        activated = F.silu(gate, inplace=True) if activation == "silu" else ACTIVATIONS[activation](gate)
        gated = activated.mul_(up)
    return cast("torch.Tensor", mlp.down_proj(gated))


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
