"""Rules: which layout tensor comes from which source tensors, as plain data.

A `Rule` is what a layout declares, with names relative to the modules that an entry matched.  Bound to
concrete modules it is a `BoundRule`, with full module names.  Everything that happens to a tensor later
(offline rewrite, packing of a live module, inverse, save) is read off these, so nothing is said twice.

    concatenate(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight")
    rename("weight", "scale")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["BoundRule", "MemberTensor", "Op", "Rule", "ShapeError", "concatenate", "nested", "rename", "target_shape"]


class Op(StrEnum):
    """A tensor operation with a byte form and an exact inverse."""

    RENAME = "rename"
    CONCATENATE = "concatenate"


@dataclass(frozen=True)
class MemberTensor:
    """A tensor of the `member`-th matched module (0 for a replacement), by its name in that module."""

    member: int
    name: str


@dataclass(frozen=True)
class Rule:
    """One layout tensor.

    `sources` are in part order: the rows of the first source come first in the target.  An `optional`
    rule applies where all its sources exist and is skipped where none does (biases).  `packed` is the tensor that
    stands for all the sources in a model that is trained packed; only where `takes_packed` does the layout take it as
    it is, because it can be shown that its parts are in the same order.
    """

    op: Op
    sources: tuple[MemberTensor, ...]
    target: str
    axis: int = 0
    optional: bool = False
    packed: MemberTensor | None = None
    takes_packed: bool = False

    def __post_init__(self) -> None:
        if (self.op is Op.RENAME) != (len(self.sources) == 1):
            raise ValueError(f"{self.op} to {self.target!r} from {len(self.sources)} sources")
        if len(set(self.sources)) != len(self.sources):
            raise ValueError(f"{self.target!r} takes a source twice: {self.sources}")


@dataclass(frozen=True)
class BoundRule:
    """A rule with full module names: one target tensor and its sources in part order."""

    op: Op
    sources: tuple[str, ...]
    target: str
    axis: int = 0


class ShapeError(ValueError):
    """Sources whose shapes the op cannot take."""


def rename(source: str, target: str | None = None, *, optional: bool = False) -> Rule:
    """`source` under the name `target` (the same name if left out), bytes unchanged."""
    return Rule(Op.RENAME, (MemberTensor(0, source),), target or source, optional=optional)


def concatenate(
    sources: Sequence[str], target: str, *, axis: int = 0, optional: bool = False, takes_packed: bool = False
) -> Rule:
    """`sources`, in this order, joined along `axis`; see `Rule` for a source tensor that is called `target`."""
    parts = tuple(MemberTensor(0, name) for name in sources)
    packed = MemberTensor(0, target)
    return Rule(Op.CONCATENATE, parts, target, axis, optional, packed=packed, takes_packed=takes_packed)


def nested(rules: Sequence[Rule], *, member: int, into: str) -> tuple[Rule, ...]:
    """The rules of a one-module layout as rules of a fusion: sources in module `member`, targets below `into`."""
    return tuple(
        replace(
            rule,
            sources=tuple(MemberTensor(member, source.name) for source in rule.sources),
            target=f"{into}.{rule.target}",
            packed=rule.packed and MemberTensor(member, rule.packed.name),
        )
        for rule in rules
    )


def target_shape(op: Op, axis: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that `op` makes of sources with these shapes.

    Raises:
        ShapeError: the shapes differ outside `axis`, or have no such axis.
    """
    first = shapes[0]
    if op is Op.RENAME:
        return first
    if any(not 0 <= axis < len(shape) for shape in shapes):
        raise ShapeError(f"no axis {axis} in shapes {list(map(list, shapes))}")
    outside = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if len(outside) != 1:
        raise ShapeError(f"shapes {list(map(list, shapes))} differ outside axis {axis}")
    return first[:axis] + (sum(shape[axis] for shape in shapes),) + first[axis + 1 :]
