"""RMSNorm as a layout, and the proof of which RMSNorm a class computes.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)          in float32

with two places for the cast back to the input's dtype: before the multiply (`cast_first`, Llama) or
after it (Gemma).  Offset and cast order belong to the class and are found by running the stock forward on
random weights, never by looking at the model's own; eps belongs to the instance.  A class that is neither
variant, or whose eps is not known, keeps its stock forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from kconvert.kernels.layout import Layout, other_inputs, stock_class_of, stock_twin
from kconvert.kernels.ops.rms_norm.spec import SPEC

__all__ = ["RMSNormLayout", "RMSNormVariant", "prove_variant", "rms_norm_formula"]

# input and weight; the last pair is what autocast and float32 weights in a bfloat16 model lead to
_DTYPE_PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
)
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class RMSNormVariant:
    """What an RMSNorm instance computes.  `why_not` is set, and the rest meaningless, where that is unknown.

    `mixes` says whether it holds for an input and a weight of different dtypes too; T5's does not.
    """

    eps: float = 0.0
    offset: float = 0.0
    cast_first: bool = True
    mixes: bool = True
    why_not: str | None = None


class RMSNormLayout(Layout):
    """RMSNorm with its parameter as it is: `weight` of shape `[hidden]`."""

    spec = SPEC

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits that has one 1-D `weight`, no other parameter, no child, and a known eps."""
        (module,) = modules
        names = [name for name, _ in module.named_parameters()]
        if names != ["weight"] or any(True for _ in module.children()):
            return "has other parameters than one weight"
        if module.get_parameter("weight").dim() != 1:
            return "its weight is not one-dimensional"
        eps = _eps_of(module)
        return eps if isinstance(eps, str) else other_inputs(module)

    @property
    def variant(self) -> RMSNormVariant:
        """The proven variant of this instance, found once."""
        found = self.__dict__.get("kconvert_variant")
        if found is None:
            found = self.__dict__["kconvert_variant"] = prove_variant(self)
        return found

    def facts(self) -> dict[str, Any]:
        """Offset and cast order, as the manifest stores them."""
        variant = self.variant
        if variant.why_not is not None:
            return {"unknown": variant.why_not}
        return {"offset": variant.offset, "cast_first": variant.cast_first}


def _eps_of(module: nn.Module) -> float | str:
    """The instance's eps, or why it is not known."""
    found = {name: getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)}
    if not found:
        return "has no eps"
    values = set(found.values())
    if len(values) != 1:
        return f"has several values for eps: {found}"
    (eps,) = values
    return float(eps) if isinstance(eps, int | float) and not isinstance(eps, bool) else f"its eps is {eps!r}"


def rms_norm_formula(
    hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, cast_first: bool
) -> torch.Tensor:
    """RMSNorm in plain torch, operation by operation as transformers writes it.

    Args:
        hidden: `[..., n]`, any float dtype.
        weight: `[n]`.
        eps: added to the mean square, inside the root.
        offset: added to the weight (Gemma: 1).
        cast_first: cast to the dtype of `hidden` before the multiply (Llama) or after it (Gemma).
    """
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        scale = weight if offset == 0.0 else offset + weight
        return scale * wide.to(hidden.dtype)
    scale = weight.float() if offset == 0.0 else offset + weight.float()
    return (wide * scale).to(hidden.dtype)


def _same_bits(found: object, expected: torch.Tensor) -> bool:
    # torch.equal alone takes a float32 tensor of rounded values for a bfloat16 one
    return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)


def prove_variant(module: nn.Module) -> RMSNormVariant:
    """Find which RMSNorm the stock class of `module` computes with this instance's eps.

    The stock forward runs on random weights and inputs, in bfloat16 (where the cast order shows) and float32,
    partly on rows so small that eps decides the result; a variant has to give the same bits everywhere.
    """
    eps = _eps_of(module)
    if isinstance(eps, str):
        return RMSNormVariant(why_not=f"eps unknown: {eps}")
    inputs = other_inputs(module)
    if inputs is not None:
        return RMSNormVariant(why_not=inputs)
    key = _plain_key(module)
    if key is None:
        return _find_variant(module, eps)
    if key not in _PROVEN:
        _PROVEN[key] = _find_variant(module, eps)
    return _PROVEN[key]


_PROVEN: dict[tuple[object, ...], RMSNormVariant] = {}


def _plain_key(module: nn.Module) -> tuple[object, ...] | None:
    """What the stock forward can depend on beside its weight, where that is plain values only; else None."""
    known = vars(nn.Module())
    own = {
        name: value for name, value in vars(module).items() if name not in known and not name.startswith("kconvert_")
    }
    if any(value is not None and type(value) not in (bool, int, float, str) for value in own.values()):
        return None
    size = module.get_parameter("weight").shape[0]
    return (
        stock_class_of(module),
        stock_class_of(module).forward,  # which somebody may have replaced since
        size,
        tuple(sorted((name, repr(value)) for name, value in own.items())),
    )


def _find_variant(module: nn.Module, eps: float) -> RMSNormVariant:
    size = module.get_parameter("weight").shape[0]
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(64, size, generator=generator)
        rows[::2] *= max(eps, 1e-12) ** 0.5
        weight = torch.randn(size, generator=generator)
        cases = []
        for training, (x_dtype, w_dtype) in product((False, True), _DTYPE_PAIRS):
            twin = stock_twin(module, {"weight": nn.Parameter(weight.to(w_dtype))})
            twin.training = training
            try:
                cases.append((rows.to(x_dtype), weight.to(w_dtype), twin(rows.to(x_dtype))))
            except Exception as error:  # noqa: BLE001 - a norm with another signature, e.g. a gate
                return RMSNormVariant(why_not=f"its forward does not take one tensor ({type(error).__name__})")
        for offset, cast_first in product((0.0, 1.0), (True, False)):
            formula = partial(rms_norm_formula, eps=eps, offset=offset, cast_first=cast_first)
            if all(_same_bits(out, formula(x, w)) for x, w, out in cases if x.dtype == w.dtype):
                mixes = all(_same_bits(out, formula(x, w)) for x, w, out in cases if x.dtype != w.dtype)
                return RMSNormVariant(eps, offset, cast_first, mixes)
    return RMSNormVariant(why_not="its forward is no known RMSNorm variant")
