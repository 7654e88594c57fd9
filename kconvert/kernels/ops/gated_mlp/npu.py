"""Packed gated MLP on Ascend NPU: one GEMM for gate and up, the gated activation in one operator, the down projection."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.ascend.gated_act import gated_act
from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.gated_mlp.layout import GELUS, GatedMLPLayout, gelu_of, prove_activation
from kconvert.kernels.packed_linear import call_linear
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedGeGLU", "NpuFusedSwiGLU"]

_SILU = GatedVariant("silu")
_GELUS = {name: GatedVariant(name) for name in GELUS}


class _NpuGatedMLP(NpuKernel):
    """The packed projection, the gated activation, and the down projection."""

    layout = GatedMLPLayout
    activations: ClassVar[tuple[str, ...]]

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be `down(act(gate) * up)` with one of these activations."""
        return prove_activation(cast("GatedMLPLayout", module), *cls.activations)


def _run(module: nn.Module, hidden_states: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    children = module._modules
    packed = call_linear(cast("nn.Module", children["gate_up_proj"]), hidden_states)
    activate = gated_act if packed.numel() else gated_formula
    return call_linear(cast("nn.Module", children["down_proj"]), activate(packed, variant))


@register_kernel
class NpuFusedSwiGLU(_NpuGatedMLP):
    """The gated MLP with silu (SwiGLU)."""

    _kernel_id = "npu_fused_swiglu"
    operators = ("npu_swiglu",)
    activations = ("silu",)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, _SILU)


@register_kernel
class NpuFusedGeGLU(_NpuGatedMLP):
    """The gated MLP with gelu (GeGLU), exact or, as Gemma has it, in its tanh form."""

    _kernel_id = "npu_fused_geglu"
    operators = ("npu_geglu",)
    activations = GELUS

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, _GELUS[gelu_of(cast("GatedMLPLayout", module))])
