"""Rules: which layout tensor comes from which source tensors, as plain data.

A `Rule` is what a layout declares, with names relative to the modules that an entry matched.  Bound to
concrete modules it is a `BoundRule`, with full module names and a chain of operations.  Everything that happens to a
tensor later (offline rewrite, packing of a live module, inverse, save) is read off these, so nothing is said twice.

    concatenate(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight")
    rename("weight", "scale")
    transpose("down_proj", "down_proj_transposed")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kconvert.transforms.arrangement import Arrangement
from kconvert.transforms.operations import Concatenate, Names, Op, Operation, Transpose, run_chain

__all__ = ["BoundRule", "Collected", "MemberTensor", "Rule", "below", "concatenate", "nested", "rename", "transpose"]


@dataclass(frozen=True)
class MemberTensor:
    """A tensor of the `member`-th matched module (0 for a replacement), by its name in that module."""

    member: int
    name: str


@dataclass(frozen=True)
class Rule:
    """One layout tensor.

    `sources` are in part order: the rows of the first source come first in the target.  `axis` is the one along which they are
    joined, or of one that is transposed the axis that is exchanged with the next one.  An `optional`
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
        if self.op not in (Op.RENAME, Op.CONCATENATE, Op.TRANSPOSE):
            raise ValueError(f"no rule of a layout is a {self.op}")
        if (self.op is not Op.CONCATENATE) != (len(self.sources) == 1):
            raise ValueError(f"{self.op} to {self.target!r} from {len(self.sources)} sources")
        if len(set(self.sources)) != len(self.sources):
            raise ValueError(f"{self.target!r} takes a source twice: {self.sources}")


@dataclass(frozen=True)
class Collected:
    """The tensors that a rule's source pattern matched, by full names, in order."""

    pattern: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class BoundRule:
    """A rule with full names: what it collects, and the chain that makes its targets of that.

    Attributes:
        collected: the sources, per pattern of the rule.
        target: the full name of the first target; the names of others follow from the target patterns.
        operations: the chain; empty for a rename.
        targets: the target patterns, `target` being the first; just `target` where it has no others.
    """

    collected: tuple[Collected, ...]
    target: str
    operations: tuple[Operation, ...] = ()
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.operations and sum(len(each.names) for each in self.collected) != 1:
            raise ValueError(f"{self.target!r} from {self.sources} without an operation")

    @classmethod
    def renamed(cls, source: str, target: str) -> BoundRule:
        """`source` under the name `target`."""
        return cls((Collected(source, (source,)),), target)

    @classmethod
    def joined(cls, sources: Sequence[str], target: str, axis: int = 0) -> BoundRule:
        """`sources` joined along `axis`, in this order."""
        return cls(tuple(Collected(name, (name,)) for name in sources), target, (Concatenate(axis),))

    @classmethod
    def transposed(cls, source: str, target: str, axis: int) -> BoundRule:
        """`source` with `axis` and the next one exchanged."""
        return cls((Collected(source, (source,)),), target, (Transpose(axis, axis + 1),))

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources, in order."""
        return tuple(name for each in self.collected for name in each.names)

    @property
    def is_rename(self) -> bool:
        """Whether nothing but the name changes."""
        return not self.operations

    @property
    def is_computed(self) -> bool:
        """Whether values change, so that the rule cannot be told as an arrangement."""
        return any(operation.op is Op.COMPUTE for operation in self.operations)

    @property
    def label(self) -> str:
        """What is done, for people: `rename`, `stack(0), concatenate(1)`."""
        return ", ".join(map(str, self.operations)) or str(Op.RENAME)

    def arrange(
        self,
        inputs: Mapping[str, Arrangement],
        shape_of: Callable[[str], tuple[int, ...] | None] = lambda name: None,
    ) -> dict[str, Arrangement]:
        """Full name of every target to what it consists of.

        Args:
            inputs: what each source consists of.
            shape_of: the shape that the model has for a tensor, by full name, or None.

        Raises:
            ShapeError: the sources' shapes do not fit the operations.
        """
        if self.is_rename:
            return {self.target: inputs[self.sources[0]]}
        patterns = self.targets or (self.target,)
        names = Names(
            tuple(each.pattern for each in self.collected),
            patterns,
            lambda pattern: shape_of(self.target.replace(patterns[0], pattern)),
        )
        values = {each.pattern: [inputs[name] for name in each.names] for each in self.collected}
        made = run_chain(self.operations, values, names)
        return {_full_name(self.target, pattern, made): tensor for pattern, tensor in made.items()}


def _full_name(first: str, pattern: str, made: Mapping[str, Arrangement]) -> str:
    """The full name of a target, read off that of the first as transformers does."""
    name = first.replace("*", "0")
    known = next((key for key in made if key in name), None)
    if known is None:
        return pattern
    before, _, after = name.partition(known)
    return before + pattern + after


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


def transpose(source: str, target: str, *, axis: int = 1) -> Rule:
    """`source` with `axis` and the next one exchanged."""
    return Rule(Op.TRANSPOSE, (MemberTensor(0, source),), target, axis)


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


def below(rules: Sequence[Rule], child: str, *, optional: bool = False) -> tuple[Rule, ...]:
    """The rules of a one-module layout as rules of the module that has it as its `child`; all `optional`, or as they are."""

    def inside(tensor: MemberTensor) -> MemberTensor:
        return MemberTensor(tensor.member, f"{child}.{tensor.name}")

    return tuple(
        replace(
            rule,
            sources=tuple(map(inside, rule.sources)),
            target=f"{child}.{rule.target}",
            packed=rule.packed and inside(rule.packed),
            optional=optional or rule.optional,
        )
        for rule in rules
    )
