"""Packed gated MLP with Liger's activations: one GEMM for gate and up, the activation of both halves, the down projection.

Liger takes gate and up apart, so the halves are copied first.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.liger import LigerKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout, prove_activation
from kconvert.kernels.packed_linear import call_linear
from kconvert.kernels.registry import register_kernel

__all__ = ["LigerGeGLU", "LigerSwiGLU"]


@cache
def _device_code(activation: str) -> Any:
    if activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


class _LigerGatedMLP(LigerKernel):
    """The packed projection, the gated activation, and the down projection."""

    layout = GatedMLPLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32"})
    activation: ClassVar[str]

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be `down(act(gate) * up)` with this activation."""
        return prove_activation(cast("GatedMLPLayout", module), cls.activation)


def _run(module: nn.Module, hidden_states: torch.Tensor, activation: str) -> torch.Tensor:
    children = module._modules
    packed = call_linear(cast("nn.Module", children["gate_up_proj"]), hidden_states)
    if not packed.numel():
        made = gated_formula(packed, GatedVariant(activation))
    else:
        made = _device_code(activation)(*packed.chunk(2, dim=-1))
    return call_linear(cast("nn.Module", children["down_proj"]), made)


@register_kernel
class LigerSwiGLU(_LigerGatedMLP):
    """The gated MLP with silu (SwiGLU)."""

    _kernel_id = "liger_swiglu"
    activation = "silu"

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, "silu")


@register_kernel
class LigerGeGLU(_LigerGatedMLP):
    """The gated MLP with gelu in its tanh form (GeGLU), the only one that Liger has."""

    _kernel_id = "liger_geglu"
    activation = "gelu_tanh"

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, "gelu_tanh")
