"""Packed gated MLP on CUDA: one GEMM for gate and up, the gated activation in one Triton kernel, the down projection.

In training the packed projection is all that is kept for the backward.  Where a compiler traces the model, the
activation is written in plain torch, which it fuses itself; of one row the first GEMM has the activation inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.ops.gated_mlp.layout import GELUS, GatedMLPLayout, gelu_of, prove_activation
from kconvert.kernels.packed_linear import call_linear
from kconvert.kernels.registry import register_kernel
from kconvert.kernels.row_linear import compiled_linear, takes_row

__all__ = ["CudaFusedGeGLU", "CudaFusedSwiGLU"]

_SILU = GatedVariant("silu")
_GELUS = {name: GatedVariant(name) for name in GELUS}


@cache
def _device_code() -> Callable[[torch.Tensor, GatedVariant], torch.Tensor]:
    from kconvert.kernels.triton.gated_act import gated_act

    return gated_act


class _CudaGatedMLP(CudaKernel):
    """The packed projection, the gated activation, and the down projection."""

    layout = GatedMLPLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32", "float64"})
    activations: ClassVar[tuple[str, ...]]

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be `down(act(gate) * up)` with one of these activations."""
        return prove_activation(cast("GatedMLPLayout", module), *cls.activations)


def _run(module: nn.Module, hidden_states: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    children = module._modules  # getattr finds a child slowly
    gate_up, down = cast("nn.Module", children["gate_up_proj"]), cast("nn.Module", children["down_proj"])
    if not torch.compiler.is_compiling():
        return call_linear(down, _device_code()(call_linear(gate_up, hidden_states), variant))
    if takes_row(gate_up, hidden_states):
        return call_linear(down, compiled_linear(gate_up, hidden_states, activation=variant.activation))
    return call_linear(down, gated_formula(gate_up(hidden_states), variant))


@register_kernel
class CudaFusedSwiGLU(_CudaGatedMLP):
    """The gated MLP with silu (SwiGLU)."""

    _kernel_id = "cuda_fused_swiglu"
    activations = ("silu",)

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        return _run(module, hidden_states, _SILU)


@register_kernel
class CudaFusedGeGLU(_CudaGatedMLP):
    """The gated MLP with gelu (GeGLU), exact or, as Gemma has it, in its tanh form."""

    _kernel_id = "cuda_fused_geglu"
    activations = GELUS

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        if torch.compiler.is_compiling():  # guards a tuple of the instance more cheaply than a property
            activation, _ = cast("GatedMLPLayout", module).kconvert_found_activation
            return _run(module, hidden_states, _GELUS[str(activation)])
        return _run(module, hidden_states, _GELUS[gelu_of(cast("GatedMLPLayout", module))])
