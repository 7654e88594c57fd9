"""Which rotary embedding a function computes, proven by running it.

    y1 = x1 * cos1 - x2 * sin1
    y2 = x2 * cos2 + x1 * sin2

for pairs (x1, x2) of each head of q and k.  Functions differ in where the two of a pair lie, in what of a head is rotated,
in what cos and sin hold, and in where they round.  Each is run on random tensors and has to give the bits of one
variant of the formula in every dtype and shape tried.  Refused: another signature than `(q, k, cos, sin, ...)`, one whose
forward somebody has replaced, and a function that is none of the variants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

import torch
from torch import nn

__all__ = ["Part", "RopeVariant", "Table", "is_as_made", "prove_rope", "rope_formula"]

_AXIS = "unsqueeze_dim"
_FIRST_PARAMETERS = ("q", "k", "cos", "sin")
# of q and k, and of cos and sin; the last is what a rotary embedding that stays in float32 gives
_DTYPE_PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)
_DIM = 12
_WIDTHS = (12, 8, 6, 4)


class Part(StrEnum):
    """What of a head is rotated, where cos and sin are narrower than it: the rest is copied."""

    WHOLE = "whole"
    FIRST = "first"
    LAST = "last"


class Table(StrEnum):
    """What cos and sin hold in their last dimension."""

    FULL = "one value for each element"
    FIRST_HALF = "one value for each element, of which the first half is read"
    HALF = "one value for each pair"


@dataclass(frozen=True)
class RopeVariant:
    """What a function computes.

    Attributes:
        is_interleaved: pairs are elements 0 and 1, 2 and 3, ...; else those half a rotation apart.
        writes_halves: the results of a pair stand half a rotation apart.
        part: what of a head is rotated.
        table: what cos and sin hold.
        is_wide: it computes in float32.
        keeps_dtype: it gives the dtype of q, and else that of the product.
        axis: the axis where cos and sin get a dimension for the heads; None where the function is told.
        default_axis: where it is told nothing.
    """

    is_interleaved: bool
    writes_halves: bool
    part: Part
    table: Table
    is_wide: bool
    keeps_dtype: bool
    axis: int | None = None
    default_axis: int = 1

    def rotated(self, dim: int, width: int) -> int | None:
        """How many elements of a head of `dim` are rotated with cos and sin of `width`; None where that is no such call."""
        size = 2 * width if self.table is Table.HALF else width
        is_known = size == dim if self.part is Part.WHOLE else 0 < size <= dim
        return size if is_known and size % 2 == 0 else None


def rope_formula(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, variant: RopeVariant, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation in plain torch, rounded where transformers' functions round.

    Args:
        q: `[batch, heads, tokens, dim]` or `[batch, tokens, heads, dim]`, any float dtype.
        k: as q, with a number of heads of its own.
        cos: `[batch or 1, tokens, n]` or `[tokens, n]`; `variant.rotated(dim, n)` is not None.
        sin: as cos.
        variant: which one.
        axis: where cos and sin get a dimension for the heads.
    """
    size = variant.rotated(q.shape[-1], cos.shape[-1])
    assert size is not None
    pairs = _pairs(size, is_interleaved=variant.is_interleaved)
    tables = [table.unsqueeze(axis) for table in (cos, sin)]
    if variant.table is Table.FULL:
        (cos1, cos2), (sin1, sin2) = ([table[..., index] for index in pairs] for table in tables)
    else:
        cos1, sin1 = (table[..., : size // 2] for table in tables)
        cos2, sin2 = cos1, sin1
    order = torch.cat(_pairs(size, is_interleaved=variant.is_interleaved and not variant.writes_halves)).argsort()

    def turn(x: torch.Tensor) -> torch.Tensor:
        start = x.shape[-1] - size if variant.part is Part.LAST else 0
        x1, x2 = (x[..., start + index] for index in pairs)
        if variant.is_wide:
            x1, x2 = x1.float(), x2.float()
        turned = torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], dim=-1)[..., order]
        if variant.keeps_dtype:
            turned = turned.to(q.dtype)
        return torch.cat([x[..., :start], turned, x[..., start + size :]], dim=-1)

    return turn(q), turn(k)


def _pairs(size: int, *, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of a rotation that are first, and those that are second in their pair."""
    places = torch.arange(size)
    return (places[0::2], places[1::2]) if is_interleaved else (places[: size // 2], places[size // 2 :])


def is_as_made(function: Any) -> bool:
    """Whether nobody has given the callable another forward; the `kernels` library makes modules of functions for that."""
    if not isinstance(function, nn.Module):
        return True
    hooks = (function._forward_hooks, function._forward_pre_hooks, function._backward_hooks)
    return "forward" not in function.__dict__ and not any(hooks)


def prove_rope(function: Callable[..., Any]) -> RopeVariant | str:
    """The variant that the function computes, or why it is none; found once for each function."""
    try:
        found = _PROVEN.get(function)
    except TypeError:
        return "cannot be told from others"
    if not is_as_made(function):
        return "has a forward that somebody has replaced"
    if found is None:
        found = _PROVEN[function] = _find(function)
    return found


_PROVEN: dict[Any, RopeVariant | str] = {}


def _find(function: Any) -> RopeVariant | str:
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return "has no signature"
    others = list(parameters.values())[4:]
    if tuple(parameters)[:4] != _FIRST_PARAMETERS or any(other.default is other.empty for other in others):
        return "is not a function of q, k, cos and sin"
    is_told = _AXIS in parameters
    default = parameters[_AXIS].default if is_told else -2
    if type(default) is not int:
        return f"has {default!r} for {_AXIS}"
    with torch.device("cpu"), torch.no_grad():
        cases = list(_cases(is_told=is_told, default=default))
        found = [_answer(function, case) for case in cases]
        for variant in _candidates(axis=None if is_told else -2, default_axis=default):
            if _is_same(variant, cases, found):
                return variant
    return "is no known rotary embedding"


@dataclass(frozen=True)
class _Case:
    tensors: tuple[torch.Tensor, ...]
    axis: int
    keywords: dict[str, int]


def _cases(*, is_told: bool, default: int) -> Iterator[_Case]:
    """Random heads, of another number in q and k, in the strides of a projection; cos and sin are no angles."""
    generator = torch.Generator().manual_seed(0)
    axes: list[tuple[int, dict[str, int]]] = [(default, {})]
    if is_told:
        axes = [(axis, {_AXIS: axis}) for axis in (1, 2)]
        axes += [(default, {})] if default in (1, 2) else []
    for (axis, keywords), (dtype, table_dtype), width in product(axes, _DTYPE_PAIRS, _WIDTHS):
        for batch in (1, 2):
            q, k = (torch.randn(batch, 5, heads, _DIM, generator=generator).to(dtype) for heads in (4, 3))
            shape = (5, width) if not is_told else (1 if keywords else batch, 5, width)
            cos, sin = (torch.randn(shape, generator=generator).to(table_dtype) for _ in range(2))
            heads = (q.transpose(1, 2), k.transpose(1, 2)) if axis == 1 else (q, k)
            yield _Case((*heads, cos, sin), axis, keywords)


def _answer(function: Any, case: _Case) -> tuple[torch.Tensor, torch.Tensor] | None:
    try:
        found = function(*(tensor.clone() for tensor in case.tensors), **case.keywords)
    except Exception:  # noqa: BLE001 - it takes no cos and sin of this width, or is another kind of function
        return None
    is_pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(item, torch.Tensor) for item in found)
    return found if is_pair else None


def _candidates(*, axis: int | None, default_axis: int) -> Iterator[RopeVariant]:
    """The more general ones first: a variant without a rest is the same where there is none."""
    for part in (Part.FIRST, Part.LAST, Part.WHOLE):
        for is_interleaved, table, is_wide, keeps_dtype in product((False, True), Table, (False, True), (False, True)):
            for writes_halves in (True, False) if is_interleaved else (True,):
                yield RopeVariant(is_interleaved, writes_halves, part, table, is_wide, keeps_dtype, axis, default_axis)


def _is_same(variant: RopeVariant, cases: list[_Case], found: list[tuple[torch.Tensor, torch.Tensor] | None]) -> bool:
    has_run = False
    for case, pair in zip(cases, found, strict=True):
        if variant.rotated(_DIM, case.tensors[2].shape[-1]) is None:
            continue
        has_run = True
        if pair is None:
            return False
        made = rope_formula(*case.tensors, variant=variant, axis=case.axis)
        for one, two in zip(pair, made, strict=True):
            if one.dtype != two.dtype or not torch.equal(one, two):
                return False
    return has_run
