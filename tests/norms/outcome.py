"""What kconvert says of one norm, and whether that is right: the proven formula against the stock forward.

The check has nothing in common with the proof: other instances of the class (sizes, eps), other weights and inputs
(seeds, magnitudes from 1e-6 to 1e4, one to five dimensions, strided), and a formula that is put together here from what
the variant says.  One bit that differs is WRONG.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.layout import Layout
from kconvert.kernels.ops.gated_rms_norm.layout import GatedRMSNormLayout, GatedRMSNormVariant, prove_gated_variant
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, RMSNormVariant, prove_variant
from tests.norms.classes import Build, NormClass, NotBuiltError, builds_of, make

__all__ = ["Outcome", "check_norm", "outcomes_of"]

Status = Literal["accepted", "refused", "not built", "WRONG"]
_Variant = RMSNormVariant | GatedRMSNormVariant
_LAYOUTS: tuple[type[Layout], ...] = (RMSNormLayout, GatedRMSNormLayout)
_OTHERS = ((48, 1e-5), (7, 1e-12), (528, 1e-3))
"""Sizes and eps of other instances; the groups of a class divide some of the sizes."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = ((1,), (3,), (2, 3), (3, 1), (2, 3, 2), (2, 1, 2, 3))


@dataclass(frozen=True)
class Outcome:
    """A class, how it was built, and what came of it: the variant, or why it is refused."""

    module: str
    name: str
    options: str
    status: Status
    what: str


def outcomes_of(norm: NormClass, cls: type[nn.Module]) -> Iterator[Outcome]:
    """One outcome for every way to build the class."""
    for build in builds_of(cls):
        status, what = check_norm(cls, build)
        yield Outcome(norm.module, norm.name, str(build), status, what)


def check_norm(cls: type[nn.Module], build: Build) -> tuple[Status, str]:
    """Whether a layout takes an instance, and if so, whether the class computes what its variant says."""
    try:
        module = make(cls, build)
    except NotBuiltError as error:
        return "not built", str(error)
    unfit = {layout: layout.unfit([module]) for layout in _LAYOUTS}
    fitting = [layout for layout, reason in unfit.items() if reason is None]
    if len(fitting) > 1:
        return "WRONG", "fits two layouts"
    if not fitting:
        gated = unfit[GatedRMSNormLayout]
        takes_gate = "gate" in (unfit[RMSNormLayout] or "")
        return "refused", str(gated if takes_gate else unfit[RMSNormLayout])
    prove: Any = prove_variant if fitting[0] is RMSNormLayout else prove_gated_variant
    variant: _Variant = prove(module)
    if variant.why_not is not None:
        return "refused", variant.why_not
    compared = 0
    for size, eps in _OTHERS:
        try:
            other = make(cls, build, size=size, eps=eps)
        except NotBuiltError:
            continue
        proven: _Variant = prove(other)
        if isinstance(proven, GatedRMSNormVariant) and isinstance(variant, GatedRMSNormVariant):
            expected: _Variant = replace(variant, eps=proven.eps, num_groups=proven.num_groups)
        else:
            expected = replace(variant, eps=proven.eps)
        if proven != expected:
            # a class may compute something else elsewhere, as long as that is seen
            continue
        problem, count = _difference(other, expected)
        if problem is not None:
            return "WRONG", f"of {size}, eps {eps:g}: {problem}"
        compared += count
    if compared < 30:
        return "WRONG", f"only {compared} inputs could be compared"
    return "accepted", describe(variant)


def describe(variant: _Variant) -> str:
    """A variant for people."""
    mixed = "" if variant.mixes else "; other dtypes of input and weight: the stock forward"
    if isinstance(variant, GatedRMSNormVariant):
        order = "before" if variant.gate_first else "after"
        groups = "" if variant.num_groups == 1 else ", in groups"
        squeezes = ", drops a dimension of one row" if variant.squeezes else ""
        cast = "before" if variant.cast_first else "after"
        return f"{variant.activation} gate {order} the norm, cast {cast} the weight{groups}{squeezes}{mixed}"
    if not variant.has_weight:
        return "no weight"
    scale = "weight" if variant.offset == 0.0 else f"{variant.offset:g} + weight"
    return f"{scale}, cast {'before' if variant.cast_first else 'after'} it{mixed}"


def _difference(module: nn.Module, variant: _Variant) -> tuple[str | None, int]:
    """Where the formula of `variant` is not the stock forward of `module`, and how many inputs were compared."""
    seed = int.from_bytes(hashlib.sha256(type(module).__name__.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    weights = dict(module.named_parameters())
    size = weights["weight"].shape[0] if weights else 48
    compared = 0
    with torch.no_grad():
        for x_dtype, w_dtype in product(_DTYPES, _DTYPES if variant.mixes and weights else (None,)):
            module.to(w_dtype or x_dtype)
            for weight in weights.values():
                weight.copy_(2.0 * torch.randn(size, generator=generator))
            for number, lead in enumerate(_SHAPES if w_dtype in (None, x_dtype) else _SHAPES[1:3]):
                module.train(number % 2 == 1)
                scale = 10.0 ** torch.randint(-6, 5, (*lead, 1), generator=generator)
                x = (scale * torch.randn(*lead, size, generator=generator)).to(x_dtype)
                x = x.mT.contiguous().mT if x.dim() == 4 else x
                for inputs in _inputs(variant, x, generator):
                    try:
                        stock: Any = module(*inputs)
                    except Exception:  # noqa: BLE001, S112 - what stock does not take cannot come from a model
                        continue
                    found = _formula(variant, module._parameters.get("weight"), *inputs)
                    if found.dtype != stock.dtype or found.shape != stock.shape:
                        return f"{list(found.shape)} {found.dtype}, stock {list(stock.shape)} {stock.dtype}", compared
                    if not torch.equal(found.nan_to_num(), stock.nan_to_num()):
                        return f"other bits for {list(x.shape)} in {x_dtype}, weight in {w_dtype or x_dtype}", compared
                    compared += 1
    return None, compared


def _inputs(variant: _Variant, x: torch.Tensor, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    if isinstance(variant, RMSNormVariant):
        yield (x,)
        return
    gate = 3.0 * torch.randn(x.shape, generator=generator)
    for dtype in _DTYPES if variant.mixes else (x.dtype,):
        yield x, gate.to(dtype)
    if variant.takes_none:
        yield (x,)


def _formula(
    variant: _Variant, weight: torch.Tensor | None, x: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """What the variant says, written down a second time."""
    wide = x.float()
    opened = None
    num_groups = 1
    if isinstance(variant, GatedRMSNormVariant):
        num_groups = variant.num_groups
        if gate is not None:
            opened = F.silu(gate.float()) if variant.activation == "silu" else torch.sigmoid(gate.float())
            wide = wide * opened if variant.gate_first else wide
    parts = wide.reshape(*x.shape[:-1], num_groups, -1)
    parts = parts * torch.rsqrt(torch.mean(parts * parts, dim=-1, keepdim=True) + variant.eps)
    made = parts.reshape(x.shape)
    if weight is None:
        return made.to(x.dtype)
    offset = variant.offset if isinstance(variant, RMSNormVariant) else 0.0
    if variant.cast_first:
        made = made.to(x.dtype) * (weight + offset if offset else weight)
    else:
        made = made * (weight.float() + offset)
    if not variant.cast_first or (
        opened is not None and isinstance(variant, GatedRMSNormVariant) and not variant.gate_first
    ):
        made = (made if opened is None or variant.gate_first else made * opened).to(x.dtype)  # type: ignore[union-attr]
    if isinstance(variant, GatedRMSNormVariant) and variant.squeezes and made.dim() == 3:
        return made.squeeze(1)
    return made
