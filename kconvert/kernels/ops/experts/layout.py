"""Stacked experts as a layout: `gate_up_proj` and `down_proj` of all experts, and what is done with a token's choices.

    out[t] = sum over the choices j of t of  weights[t, j] * down_e( gate( gate_up_e(x[t]) ) ),    e = index[t, j]

Whether the weights are transposed, which half is which, the activation and its clamps are found by running the stock
forward, never read off a shape or a flag.  A kernel stands in only where all of it is proven.  Refused are experts with
parameters of their own beside these (a norm behind each, an up projection without a gate), and a forward that takes
anything but tokens, indices and weights.

The reference is the stock forward with the experts implementation that the model's config names at the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.layout import Layout, stock_class_of
from kconvert.kernels.ops.experts.proof import BIASES, WEIGHTS, ExpertsVariant, find_variant, is_shaped
from kconvert.kernels.ops.experts.spec import SPEC

__all__ = ["ExpertsLayout", "is_plain_call", "prove_experts"]


class ExpertsLayout(Layout):
    """`gate_up_proj` `[E, 2 * m, n]`, `down_proj` `[E, n, m]`, both or none transposed, and their biases.

    Class attributes of a patched class:
        kconvert_input_names: what the stock forward calls tokens, indices and weights.
    """

    spec = SPEC
    takes_one_tensor = False
    kconvert_input_names: ClassVar[tuple[str, ...]]

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose parameters are these, and whose forward takes three inputs."""
        (module,) = modules
        parameters = dict(module.named_parameters())
        for name in WEIGHTS:
            if name not in parameters:
                return f"has no stacked {name}"
            if parameters[name].dim() != 3:
                return f"has a {name} that is not stacked"
        stray = [name for name in parameters if name not in (*WEIGHTS, *BIASES)]
        if stray:
            return f"has other parameters: {stray[0]}"
        names = _input_names(stock_class_of(module))
        if len(names) != 3:
            return f"has a forward that takes {' and '.join(names) or 'nothing'}"
        if not any(is_shaped(parameters, is_transposed=is_transposed) for is_transposed in (False, True)):
            return "has gate_up_proj and down_proj of shapes that do not go together"
        return None

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """The names of the inputs."""
        return {"kconvert_input_names": _input_names(stock)}

    @property
    def kconvert_variant(self) -> tuple[ExpertsVariant | None, str]:
        """The proven variant of this instance, or None and why it is none that is known; found once."""
        found = self.__dict__.get("kconvert_experts")
        if found is None:
            found = self.__dict__["kconvert_experts"] = find_variant(self)
        return cast("tuple[ExpertsVariant | None, str]", found)

    def kconvert_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """Tokens, indices and weights of a call; None where one of them is missing."""
        if len(args) == 3:
            return cast("tuple[Any, Any, Any]", args)
        given = {**dict(zip(self.kconvert_input_names, args, strict=False)), **kwargs}
        found = tuple(given.get(name) for name in self.kconvert_input_names)
        return None if any(value is None for value in found) else cast("tuple[Any, Any, Any]", found)


def prove_experts(module: ExpertsLayout) -> str | None:
    """Why the stock forward is not the formula with any gate that is known, or None."""
    variant, reason = module.kconvert_variant
    return None if variant is not None else reason


def is_plain_call(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], weight: torch.Tensor) -> bool:
    """Whether tokens, indices and weights are rows, and the tokens of the dtype of the parameters, autocast or not."""
    hidden_states, index, weights = inputs
    return (
        hidden_states.dim() == index.dim() == weights.dim() == 2
        and hidden_states.dtype == weight.dtype
        and not torch.is_autocast_enabled(hidden_states.device.type)
    )


def _input_names(stock: type[nn.Module]) -> tuple[str, ...]:
    _, *names = signature(stock.forward).parameters
    return tuple(names)
