"""Operations: what a rule does to the tensors that it collects, as data.

A rule collects tensors under source patterns and gives tensors under target patterns.  Between them stands a chain of
operations, as in transformers' `WeightConverter`: each takes what the one before gave, a list of tensors per pattern,
and the last one gives one tensor per target.  Every operation here moves elements and changes none, so all are told by
`Arrangement`s: byte forms and inverses follow from those.  The one exception is `Computed`.

`Names` says which patterns there are, `shape_of` what shape the model has for a target; an operation that depends on
the model's shapes asks there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from kconvert.transforms import arrangement as arr
from kconvert.transforms.arrangement import Arrangement, ShapeError

__all__ = [
    "Chunk",
    "Computed",
    "Concatenate",
    "Interleave",
    "Names",
    "Op",
    "Operation",
    "PermuteHeads",
    "Reshape",
    "SplitToShapes",
    "Stack",
    "StackHalves",
    "Transpose",
    "Unstack",
    "UnstackHalves",
    "run_chain",
]

Values: TypeAlias = dict[str, list[Arrangement]]
"""Pattern to the tensors that are there under it."""


class Op(StrEnum):
    """What an operation is called in plans and manifests."""

    RENAME = "rename"
    CONCATENATE = "concatenate"
    STACK = "stack"
    UNSTACK = "unstack"
    CHUNK = "chunk"
    SPLIT = "split"
    INTERLEAVE = "interleave"
    TRANSPOSE = "transpose"
    PERMUTE = "permute"
    RESHAPE = "reshape"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Names:
    """The patterns of a rule, in order, and the shape that the model has for a target pattern, where it is known."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    shape_of: Callable[[str], tuple[int, ...] | None] = lambda target: None

    def only_target(self) -> str:
        """The one target pattern.

        Raises:
            ShapeError: there are several.
        """
        if len(self.targets) != 1:
            raise ShapeError(f"one tensor cannot be all of {', '.join(self.targets)}")
        return self.targets[0]

    def next_name(self, source: str, num_values: int) -> str:
        """What an operation on each tensor for itself gives: the target, where it is the only one, else `source`."""
        return self.targets[0] if num_values == 1 and len(self.targets) == 1 else source


class Operation(ABC):
    """One link of a chain."""

    op: Op

    @abstractmethod
    def run(self, values: Values, names: Names) -> Values:
        """What becomes of the tensors in `values`.

        Raises:
            ShapeError: their number or shapes do not fit.
        """

    @abstractmethod
    def __str__(self) -> str:
        """As people read it, e.g. `concatenate(1)`."""


def _only(values: Values) -> tuple[str, Arrangement]:
    found = [(name, tensor) for name, tensors in values.items() for tensor in tensors]
    if len(found) != 1:
        raise ShapeError(f"one tensor is wanted, and there are {len(found)}")
    return found[0]


@dataclass(frozen=True)
class Concatenate(Operation):
    """All tensors, pattern by pattern, joined along `axis`."""

    axis: int = 0
    op = Op.CONCATENATE

    def run(self, values: Values, names: Names) -> Values:
        parts = [tensor for name in names.sources for tensor in values.get(name, ())]
        return {names.only_target(): [arr.concatenate(parts, self.axis)]}

    def __str__(self) -> str:
        return f"{self.op}({self.axis})"


@dataclass(frozen=True)
class Stack(Operation):
    """The tensors of each pattern along a new axis, at `axis`."""

    axis: int = 0
    op = Op.STACK

    def run(self, values: Values, names: Names) -> Values:
        return {names.next_name(name, len(values)): [arr.stack(tensors, self.axis)] for name, tensors in values.items()}

    def __str__(self) -> str:
        return f"{self.op}({self.axis})"


@dataclass(frozen=True)
class Unstack(Operation):
    """Each tensor as its places along `axis`, without that axis; `*` in a target becomes their number."""

    axis: int = 0
    op = Op.UNSTACK

    def run(self, values: Values, names: Names) -> Values:
        found: Values = {}
        for name, tensors in values.items():
            (tensor,) = tensors
            target = names.next_name(name, len(values))
            for number, part in enumerate(arr.split(tensor, [1] * tensor.shape[self.axis], self.axis)):
                shape = tuple(size for place, size in enumerate(part.shape) if place != self.axis % len(part.shape))
                found[target.replace("*", str(number))] = [arr.reshape(part, shape)]
        return found

    def __str__(self) -> str:
        return f"{self.op}({self.axis})"


@dataclass(frozen=True)
class Chunk(Operation):
    """One tensor in equal parts along `axis`: one per target, or `count` of them for the numbers of one `*`."""

    axis: int = 0
    count: int | None = None
    op = Op.CHUNK

    def run(self, values: Values, names: Names) -> Values:
        _, tensor = _only(values)
        targets: Sequence[str] = names.targets
        if self.count is not None:
            targets = [names.only_target().replace("*", str(number)) for number in range(self.count)]
        parts = arr.chunk(tensor, len(targets), self.axis)
        return {target: [part] for target, part in zip(targets, parts, strict=True)}

    def __str__(self) -> str:
        return f"{self.op}({self.axis})"


@dataclass(frozen=True)
class SplitToShapes(Operation):
    """One tensor in parts along `axis`, as large as the model has its targets."""

    axis: int = 0
    op = Op.SPLIT

    def run(self, values: Values, names: Names) -> Values:
        _, tensor = _only(values)
        sizes = []
        for target in names.targets:
            shape = names.shape_of(target)
            if shape is None:
                raise ShapeError(f"the model has no {target!r} that says how large its part is")
            sizes.append(shape[self.axis])
        parts = arr.split(tensor, sizes, self.axis)
        return {target: [part] for target, part in zip(names.targets, parts, strict=True)}

    def __str__(self) -> str:
        return f"{self.op}({self.axis})"


@dataclass(frozen=True)
class Interleave(Operation):
    """One tensor, an axis dealt out in turn: a0 b0 a1 b1 becomes a0 a1 b0 b1, or back where `inverse`."""

    axis: int = 0
    inverse: bool = False
    op = Op.INTERLEAVE

    def run(self, values: Values, names: Names) -> Values:
        _, tensor = _only(values)
        size = tensor.shape[self.axis]
        groups = size // 2 if self.inverse and size % 2 == 0 else 2
        return {names.targets[0]: [arr.interleave(tensor, groups, self.axis)]}

    def __str__(self) -> str:
        return f"{self.op}({self.axis}{', inverse' if self.inverse else ''})"


@dataclass(frozen=True)
class Transpose(Operation):
    """One tensor with two axes exchanged; `unless_fits`: left as it is where it has the model's shape already."""

    one: int = 0
    two: int = 1
    unless_fits: bool = False
    op = Op.TRANSPOSE

    def run(self, values: Values, names: Names) -> Values:
        source, tensor = _only(values)
        target = names.next_name(source, 1)
        if self.unless_fits and tensor.shape == names.shape_of(target):
            return {target: [tensor]}
        return {target: [arr.transpose(tensor, self.one, self.two)]}

    def __str__(self) -> str:
        return f"{self.op}({self.one}, {self.two})"


@dataclass(frozen=True)
class PermuteHeads(Operation):
    """The rows of each of `heads` heads from interleaved pairs to two halves, for rotary embeddings; or back.

    Only tensors of patterns that hold one of `only` are changed, where it is given; those of three and more axes never.
    """

    heads: int
    inverse: bool = False
    only: tuple[str, ...] | None = None
    op = Op.PERMUTE

    def run(self, values: Values, names: Names) -> Values:
        found: Values = {}
        for source, tensors in values.items():
            target = names.targets[0] if len(names.sources) == len(names.targets) == 1 else source
            # `in` is transformers' own match, of one of its patterns and not of a tensor's name
            if self.only is None or any(name in source for name in self.only):
                (tensor,) = tensors
                tensors = [self._permuted(tensor)]
            found[target] = tensors
        return found

    def _permuted(self, tensor: Arrangement) -> Arrangement:
        if len(tensor.shape) not in (1, 2):
            return tensor
        rows, *rest = tensor.shape
        if rows % (2 * self.heads):
            raise ShapeError(f"{rows} rows are no {self.heads} heads of pairs")
        half = rows // self.heads // 2
        pair = (2, half) if self.inverse else (half, 2)
        apart = arr.reshape(tensor, (self.heads, *pair, *rest))
        return arr.reshape(arr.transpose(apart, 1, 2), tensor.shape)

    def __str__(self) -> str:
        return f"{self.op}({self.heads} heads{', inverse' if self.inverse else ''})"


@dataclass(frozen=True)
class Reshape(Operation):
    """One tensor of `num_axes` axes with all but the first made `inner`; -1 stands for whatever is left."""

    inner: tuple[int, ...]
    num_axes: int
    op = Op.RESHAPE

    def run(self, values: Values, names: Names) -> Values:
        source, tensor = _only(values)
        target = names.next_name(source, 1)
        if len(tensor.shape) != self.num_axes:
            if len(tensor.shape) == 1 + len(self.inner):
                return {target: [tensor]}
            raise ShapeError(f"shape {list(tensor.shape)} has not {self.num_axes} axes")
        rows = tensor.shape[0]
        inner = self.inner if self.inner != (-1,) else (tensor.size // rows if rows else 0,)
        return {target: [arr.reshape(tensor, (rows, *inner))]}

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.inner))})"


@dataclass(frozen=True)
class StackHalves(Operation):
    """A list per source, dealt to the targets part by part: each part is stacked, and those of a target are joined.

    Gate and up of text experts, then of vision experts, become one stack of text and one of vision experts.
    """

    stack_axis: int = 0
    join_axis: int = 1
    op = Op.STACK

    def run(self, values: Values, names: Names) -> Values:
        found: dict[str, list[Arrangement]] = {target: [] for target in names.targets}
        for source in names.sources:
            tensors = values.get(source, [])
            size = -(-len(tensors) // len(names.targets))
            for number, target in enumerate(names.targets):
                found[target].append(arr.stack(tensors[number * size : (number + 1) * size], self.stack_axis))
        return {target: [arr.concatenate(parts, self.join_axis)] for target, parts in found.items()}

    def __str__(self) -> str:
        return f"{self.op}({self.stack_axis}), {Op.CONCATENATE}({self.join_axis})"


@dataclass(frozen=True)
class UnstackHalves(Operation):
    """The inverse of `StackHalves`."""

    stack_axis: int = 0
    join_axis: int = 1
    op = Op.UNSTACK

    def run(self, values: Values, names: Names) -> Values:
        found: Values = {}
        parts = [
            arr.chunk(_only({name: values[name]})[1], len(names.targets), self.join_axis) for name in names.sources
        ]
        for number, target in enumerate(names.targets):
            start = 0
            for part in parts:
                tensor = part[number]
                one = Unstack(self.stack_axis).run({target: [tensor]}, Names((target,), (target,)))
                for place, found_there in enumerate(one.values()):
                    found[target.replace("*", str(start + place))] = found_there
                start += len(one)
        return found

    def __str__(self) -> str:
        return f"{Op.CHUNK}({self.join_axis}), {self.op}({self.stack_axis})"


@dataclass(frozen=True)
class Computed(Operation):
    """A whole chain with an op that changes values: `converter` does it, on real tensors; see `convert.compute`."""

    name: str
    converter: Any = field(compare=False, repr=False)
    op = Op.COMPUTE

    def run(self, values: Values, names: Names) -> Values:
        raise ShapeError("its values are computed")

    def __str__(self) -> str:
        return f"{self.op}({self.name})"


def run_chain(
    operations: Sequence[Operation], values: Mapping[str, Sequence[Arrangement]], names: Names
) -> dict[str, Arrangement]:
    """Target pattern (numbers in the place of `*`) to what it consists of.

    Raises:
        ShapeError: naming the operation that the tensors do not fit.
    """
    current: Values = {name: list(tensors) for name, tensors in values.items()}
    for operation in operations:
        try:
            current = operation.run(current, names)
        except ShapeError as error:
            raise ShapeError(f"{operation}: {error}") from None
    unfinished = [name for name, tensors in current.items() if len(tensors) != 1]
    if unfinished:
        raise ShapeError(f"{unfinished[0]!r} is left with {len(current[unfinished[0]])} tensors")
    return {name: tensors[0] for name, tensors in current.items()}
