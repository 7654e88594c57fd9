"""RMSNorm as a layout, and the proof of which RMSNorm a class computes.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)          in float32

with two places for the cast back to the input's dtype: before the multiply (`cast_first`, Llama) or
after it (Gemma).  A norm without a weight has no multiply.  Offset and cast order belong to the class and are
found by running the stock forward on random weights, never by looking at the model's own; eps belongs to the
instance.  A class that is no such variant, or whose eps is not known, keeps its stock forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from kconvert.kernels.layout import Layout, other_inputs
from kconvert.kernels.norm_proof import Formula, eps_of, find_formula, structure_reason, weight_of
from kconvert.kernels.ops.rms_norm.spec import SPEC
from kconvert.kernels.proof import plain_key

__all__ = ["RMSNormLayout", "RMSNormVariant", "prove_variant", "rms_norm_formula"]


@dataclass(frozen=True)
class RMSNormVariant:
    """What an RMSNorm instance computes.  `why_not` is set, and the rest meaningless, where that is unknown.

    `mixes` says whether it holds for an input and a weight of different dtypes too; T5's does not.  Without a weight
    there is no offset, and one cast.
    """

    eps: float = 0.0
    offset: float = 0.0
    cast_first: bool = True
    mixes: bool = True
    has_weight: bool = True
    why_not: str | None = None

    def facts(self) -> dict[str, Any]:
        """What belongs to the class, as the manifest stores it."""
        if self.why_not is not None:
            return {"unknown": self.why_not}
        if not self.has_weight:
            return {"has_weight": False}
        return {"offset": self.offset, "cast_first": self.cast_first}


class RMSNormLayout(Layout):
    """RMSNorm with its parameter as it is: `weight` of shape `[hidden]`, or none.

    Instances keep `kconvert_arithmetic`, what kernels read of the proven variant: whether there is a weight, whether dtypes
    may mix, eps, offset, and whether the cast comes first.  It is a tuple because a compiler guards one cheaply.
    """

    spec = SPEC
    kconvert_arithmetic: tuple[bool, bool, float, float, bool]

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits that has one 1-D `weight` or no parameter, no child, a known eps, and takes one tensor."""
        (module,) = modules
        eps = eps_of(module)
        return structure_reason(module) or (eps if isinstance(eps, str) else other_inputs(module))

    @property
    def variant(self) -> RMSNormVariant:
        """The proven variant of this instance, found once."""
        found = self.__dict__.get("kconvert_variant")
        if found is None:
            found = self.__dict__["kconvert_variant"] = prove_variant(self)
            self.__dict__["kconvert_arithmetic"] = (
                found.has_weight,
                found.mixes,
                found.eps,
                found.offset,
                found.cast_first,
            )
        return found

    def facts(self) -> dict[str, Any]:
        """Offset and cast order, as the manifest stores them."""
        return self.variant.facts()


def rms_norm_formula(
    hidden: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float, cast_first: bool
) -> torch.Tensor:
    """RMSNorm in plain torch, operation by operation as transformers writes it.

    Args:
        hidden: `[..., n]`, any float dtype.
        weight: `[n]`, or None.
        eps: added to the mean square, inside the root.
        offset: added to the weight (Gemma: 1).
        cast_first: cast to the dtype of `hidden` before the multiply (Llama) or after it (Gemma).
    """
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(hidden.dtype)
    if cast_first:
        scale = weight if offset == 0.0 else offset + weight
        return scale * wide.to(hidden.dtype)
    scale = weight.float() if offset == 0.0 else offset + weight.float()
    return (wide * scale).to(hidden.dtype)


def prove_variant(module: nn.Module) -> RMSNormVariant:
    """Find which RMSNorm the stock class of `module` computes with this instance's eps; see `norm_proof`."""
    eps = eps_of(module)
    if isinstance(eps, str):
        return RMSNormVariant(why_not=f"eps unknown: {eps}")
    reason = structure_reason(module) or other_inputs(module)
    if reason is not None:
        return RMSNormVariant(why_not=reason)
    key = plain_key(module)
    if key is None:
        return _find_variant(module, eps)
    if key not in _PROVEN:
        _PROVEN[key] = _find_variant(module, eps)
    return _PROVEN[key]


_PROVEN: dict[tuple[object, ...], RMSNormVariant] = {}


def _formula(variant: RMSNormVariant) -> Formula:
    def run(inputs: Sequence[torch.Tensor], weight: torch.Tensor | None) -> torch.Tensor:
        (hidden,) = inputs
        return rms_norm_formula(hidden, weight, eps=variant.eps, offset=variant.offset, cast_first=variant.cast_first)

    return run


def _variants(eps: float, *, has_weight: bool) -> Iterator[RMSNormVariant]:
    if not has_weight:
        yield RMSNormVariant(eps, has_weight=False)
        return
    for offset, cast_first in product((0.0, 1.0), (True, False)):
        yield RMSNormVariant(eps, offset, cast_first)


def _find_variant(module: nn.Module, eps: float) -> RMSNormVariant:
    variants = _variants(eps, has_weight=weight_of(module) is not None)
    found = find_formula(module, eps, ((variant, _formula(variant)) for variant in variants), kind="RMSNorm")
    if isinstance(found, str):
        return RMSNormVariant(why_not=found)
    variant, mixes = found
    return replace(variant, mixes=mixes)
