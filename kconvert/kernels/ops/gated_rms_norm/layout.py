"""RMSNorm with a gate as a layout, and the proof of which one a class computes.

    gate first (Mamba2):       y = weight * norm(x * act(gate))
    gate last (Qwen3-Next):    y = weight * norm(x) * act(gate)

in float32, with act = silu or sigmoid, and the norm over the whole last dimension or over groups of it.  Normed values
are cast to the input's dtype before the multiply with the weight (`cast_first`) or the result after it.  All of this is
found by running the stock forward on random weights; the number of groups is tried as the instance gives it, in
`group_size` or `n_groups`.  A class whose forward does not take `hidden_states` and `gate`, or is no such variant, keeps
its stock forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.layout import Layout, stock_class_of
from kconvert.kernels.norm_proof import Formula, eps_of, find_formula, structure_reason, weight_of
from kconvert.kernels.ops.gated_rms_norm.spec import SPEC
from kconvert.kernels.proof import plain_key

__all__ = ["GatedRMSNormLayout", "GatedRMSNormVariant", "gated_rms_norm_formula", "prove_gated_variant"]

_INPUTS = ["hidden_states", "gate"]


@dataclass(frozen=True)
class GatedRMSNormVariant:
    """What a gated RMSNorm instance computes.  `why_not` is set, and the rest meaningless, where that is unknown.

    Attributes:
        eps: added to the mean square, inside the root.
        num_groups: how many parts of the last dimension are normalised, each for itself.
        activation: of the gate.
        gate_first: the gate comes before the norm.
        cast_first: the cast comes before the multiply with the weight.
        squeezes: an input `[n, 1, hidden]` gives `[n, hidden]` (Falcon-H1).
        mixes: it holds for inputs and a weight of different dtypes too.
        takes_none: the gate may be None.
        why_not: why it is not known what the instance computes.
    """

    eps: float = 0.0
    num_groups: int = 1
    activation: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = True
    cast_first: bool = True
    squeezes: bool = False
    mixes: bool = True
    takes_none: bool = True
    why_not: str | None = None


class GatedRMSNormLayout(Layout):
    """RMSNorm with a gate, with its parameter as it is: `weight` of shape `[hidden]`."""

    spec = SPEC
    takes_one_tensor = False
    weight: torch.Tensor

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits that has one 1-D `weight`, no child, a known eps, and takes `hidden_states` and `gate`."""
        return _unfit(modules[0])

    @property
    def variant(self) -> GatedRMSNormVariant:
        """The proven variant of this instance, found once."""
        found = self.__dict__.get("kconvert_variant")
        if found is None:
            found = self.__dict__["kconvert_variant"] = prove_gated_variant(self)
        return found

    def needs_reference(self, hidden: torch.Tensor, gate: torch.Tensor | None) -> bool:
        """Whether the variant is not proven for such inputs: another shape, mixed dtypes, no gate."""
        variant = self.variant
        if gate is None:
            return not variant.takes_none or not (variant.mixes or hidden.dtype == self.weight.dtype)
        if gate.shape != hidden.shape:
            return True
        return not (variant.mixes or hidden.dtype == gate.dtype == self.weight.dtype)

    def facts(self) -> dict[str, Any]:
        """What is proven, as the manifest stores it."""
        variant = self.variant
        if variant.why_not is not None:
            return {"unknown": variant.why_not}
        return {
            "num_groups": variant.num_groups,
            "activation": variant.activation,
            "gate_first": variant.gate_first,
            "cast_first": variant.cast_first,
        }


def _unfit(module: nn.Module) -> str | None:
    reason = structure_reason(module)
    if reason is None and weight_of(module) is None:
        reason = "has no weight"
    if reason is not None:
        return reason
    _, *names = signature(stock_class_of(module).forward).parameters
    if names != _INPUTS:
        return f"its forward takes {' and '.join(names) or 'nothing'}"
    eps = eps_of(module)
    return eps if isinstance(eps, str) else None


def gated_rms_norm_formula(
    hidden: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, variant: GatedRMSNormVariant
) -> torch.Tensor:
    """RMSNorm with a gate in plain torch, operation by operation as transformers writes it.

    Args:
        hidden: `[..., n]`, any float dtype.
        gate: of the shape of `hidden`, in any float dtype, or None.
        weight: `[n]`.
        variant: which one.
    """
    wide = hidden.to(torch.float32)
    act = None
    if gate is not None:
        act = F.silu(gate.to(torch.float32)) if variant.activation == "silu" else gate.to(torch.float32).sigmoid()
    if act is not None and variant.gate_first:
        wide = wide * act
    groups = wide if variant.num_groups == 1 else wide.unflatten(-1, (variant.num_groups, -1))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + variant.eps)
    normed = groups if variant.num_groups == 1 else groups.flatten(-2)
    scaled = weight * normed.to(hidden.dtype) if variant.cast_first else weight.float() * normed
    if act is not None and not variant.gate_first:
        scaled = (scaled * act).to(hidden.dtype)
    elif not variant.cast_first:
        scaled = scaled.to(hidden.dtype)
    return scaled.squeeze(1) if variant.squeezes and scaled.dim() == 3 else scaled


def prove_gated_variant(module: nn.Module) -> GatedRMSNormVariant:
    """Find which gated RMSNorm the stock class of `module` computes with this instance's eps; see `norm_proof`."""
    reason, eps = _unfit(module), eps_of(module)
    if reason is not None or isinstance(eps, str):
        return GatedRMSNormVariant(why_not=reason or f"eps unknown: {eps}")
    key = plain_key(module)
    if key is None:
        return _find_variant(module, eps)
    if key not in _PROVEN:
        _PROVEN[key] = _find_variant(module, eps)
    return _PROVEN[key]


_PROVEN: dict[tuple[object, ...], GatedRMSNormVariant] = {}


def _find_variant(module: nn.Module, eps: float) -> GatedRMSNormVariant:
    kind = "gated RMSNorm"
    tried = ((variant, _formula(variant)) for variant in _variants(module, eps))
    found = find_formula(module, eps, tried, kind=kind, num_inputs=2)
    if isinstance(found, str):
        return GatedRMSNormVariant(why_not=found)
    variant, mixes = found
    bare = find_formula(module, eps, [(variant, _formula(variant))], kind=kind)
    takes_none = not isinstance(bare, str)
    return replace(variant, takes_none=takes_none, mixes=mixes and (isinstance(bare, str) or bare[1]))


def _formula(variant: GatedRMSNormVariant) -> Formula:
    def run(inputs: Sequence[torch.Tensor], weight: torch.Tensor | None) -> torch.Tensor:
        hidden, *gates = inputs
        if weight is None:
            raise TypeError("a gated norm has a weight")
        return gated_rms_norm_formula(hidden, gates[0] if gates else None, weight, variant)

    return run


def _variants(module: nn.Module, eps: float) -> Iterator[GatedRMSNormVariant]:
    activations: tuple[Literal["silu", "sigmoid"], ...] = ("silu", "sigmoid")
    for num_groups, activation, gate_first, cast_first, squeezes in product(
        _possible_groups(module), activations, (True, False), (True, False), (False, True)
    ):
        yield GatedRMSNormVariant(eps, num_groups, activation, gate_first, cast_first, squeezes)


def _possible_groups(module: nn.Module) -> list[int]:
    """1, and what the instance says in an attribute."""
    size = module.get_parameter("weight").shape[0]
    group_size, n_groups = getattr(module, "group_size", None), getattr(module, "n_groups", None)
    found = [1]
    if isinstance(group_size, int) and group_size > 0 and size % group_size == 0:
        found.append(size // group_size)
    if isinstance(n_groups, int) and n_groups > 0 and size % n_groups == 0:
        found.append(n_groups)
    return list(dict.fromkeys(found))
