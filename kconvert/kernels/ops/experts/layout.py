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
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from kconvert.kernels.expert_weights import ExpertWeights
from kconvert.kernels.layout import Layout, stock_class_of
from kconvert.kernels.ops.experts.proof import BIASES, WEIGHTS, ExpertsVariant, find_variant, is_shaped
from kconvert.kernels.ops.experts.spec import SPEC

__all__ = ["ExpertsCall", "ExpertsLayout", "plain_call", "prove_experts"]


class ExpertsCall(NamedTuple):
    """A call that kernels take: rows of tokens `[T, n]`, indices and weights `[T, k]`, and what the experts are.

    The parameters lie as `is_transposed` of the variant says.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    params: ExpertWeights
    variant: ExpertsVariant


class ExpertsLayout(Layout):
    """`gate_up_proj` `[E, 2 * m, n]`, `down_proj` `[E, n, m]`, both or none transposed, and their biases.

    Class attributes of a patched class:
        kconvert_input_names: what the stock forward calls tokens, indices and weights.
        kconvert_weight_names: the parameters that hold gate and up, and down.
    """

    spec = SPEC
    takes_one_tensor = False
    kconvert_input_names: ClassVar[tuple[str, ...]]
    kconvert_weight_names: ClassVar[tuple[str, str]] = WEIGHTS

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

    def kconvert_views(self) -> frozenset[str]:
        """Those that the spec names; none where the class itself has its weights transposed, as every kernel takes them."""
        variant, _ = self.kconvert_variant
        return frozenset() if variant is not None and variant.is_transposed else self.spec.view_devices

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


def plain_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertsCall | None:
    """A call of rows in the dtype of the parameters, autocast or not; None for one that the reference has to run."""
    experts = cast("ExpertsLayout", module)
    inputs, (variant, _) = experts.kconvert_inputs(args, kwargs), experts.kconvert_variant
    own = module._parameters  # getattr finds one slowly
    gate_up, down = (cast("torch.Tensor", own[name]) for name in experts.kconvert_weight_names)
    if inputs is None or variant is None:
        return None
    hidden_states, index, weights = inputs
    if not (hidden_states.dim() == index.dim() == weights.dim() == 2 and hidden_states.dtype == gate_up.dtype):
        return None
    if torch.is_autocast_enabled(hidden_states.device.type):
        return None
    params = ExpertWeights(gate_up, down, own.get("gate_up_proj_bias"), own.get("down_proj_bias"))
    return ExpertsCall(hidden_states, index, weights, params, variant)


def _input_names(stock: type[nn.Module]) -> tuple[str, ...]:
    _, *names = signature(stock.forward).parameters
    return tuple(names)
