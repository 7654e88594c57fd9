"""What the tests of experts share: the loop over experts in float64, random ones, and what the interpreter lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kconvert.kernels.expert_weights import ExpertWeights
from kconvert.kernels.gated_variant import GatedVariant, gated_formula

__all__ = ["Poisoned", "loop_over_experts", "moved", "multiply_as_on_devices", "random_choices", "random_params"]


def multiply_as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were integers; here it multiplies the values."""
    create_dot = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16)).view(torch.bfloat16)
        return TensorHandle(values.float().numpy().reshape(handle.data.shape), tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


class Poisoned:
    """Stands for `torch` in a module under test: what was not written shows, as NaN or as a row far out of reach."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _filled(made: torch.Tensor) -> torch.Tensor:
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    @classmethod
    def empty(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.empty`, filled."""
        return cls._filled(torch.empty(*args, **kwargs))

    @classmethod
    def empty_like(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.empty_like`, filled."""
        return cls._filled(torch.empty_like(*args, **kwargs))


def random_choices(num_tokens: int, top_k: int, num_experts: int, *, seed: int = 0) -> torch.Tensor:
    """`[T, k]` int64: `k` different experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()


def random_params(
    num_experts: int,
    hidden: int,
    half: int,
    *,
    is_transposed: bool = False,
    has_bias: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    """Parameters in float64, of a size at which neither values nor gradients grow."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    gate_up, down = (
        made(num_experts, 2 * half, hidden, scale=hidden**-0.5),
        made(num_experts, hidden, half, scale=half**-0.5),
    )
    if is_transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (made(num_experts, 2 * half, scale=0.5), made(num_experts, hidden, scale=0.5)) if has_bias else ()
    return ExpertWeights(gate_up, down, *biases)


def moved(params: ExpertWeights, *args: Any) -> ExpertWeights:
    """`tensor.to(...)` of all of them."""
    gate_up, down, *biases = params
    return ExpertWeights(
        gate_up.to(*args), down.to(*args), *(None if bias is None else bias.to(*args) for bias in biases)
    )


def loop_over_experts(
    hidden_states: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    params: ExpertWeights,
    variant: GatedVariant,
    *,
    is_transposed: bool,
) -> torch.Tensor:
    """The formula, one expert after the other."""
    out = torch.zeros_like(hidden_states)
    for expert in range(params.down.shape[0]):
        tokens, choices = torch.where(ids == expert)
        gate_up, down = params.gate_up[expert], params.down[expert]
        if not is_transposed:
            gate_up, down = gate_up.T, down.T
        both = hidden_states[tokens] @ gate_up
        if params.gate_up_bias is not None:
            both = both + params.gate_up_bias[expert]
        made = gated_formula(both, variant) @ down
        if params.down_bias is not None:
            made = made + params.down_bias[expert]
        out = out.index_add(0, tokens, made * weights[tokens, choices, None])
    return out
