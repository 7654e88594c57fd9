"""What a plan is made of: frozen data, no behaviour beyond sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from kconvert.checkpoint import DTYPE_BITS, SourceTensor
from kconvert.manifest import LayoutRecord
from kconvert.patterns import PathPattern
from kconvert.transforms import Arrangement, BoundRule

__all__ = [
    "COPY",
    "Claim",
    "Entry",
    "Made",
    "ModuleTensor",
    "OutputShard",
    "Pair",
    "Part",
    "PatternTrace",
    "Plan",
    "Step",
]


@dataclass(frozen=True)
class Pair:
    """A class and the pattern of the modules it is expected at; `where` is its place in the recipe."""

    class_name: str
    pattern: PathPattern
    where: str


@dataclass(frozen=True)
class Entry:
    """A patch entry, resolved: its layout is known and can be bound to modules.

    `bind(paths, names)` gives the layout's tensors for the modules at `paths` (pair order) among the
    tensors `names`, all of which the entry takes: those of the children `takes`, or of the whole subtree where it
    is empty.  `dtype` is what joined tensors are stored in; None keeps the dtype of their parts.  An `optional` entry
    passes over modules of other classes, and may take none.
    """

    number: int
    where: str
    kind: Literal["replace", "fuse"]
    pairs: tuple[Pair, ...]
    kernels: tuple[str, ...]
    layout: LayoutRecord
    changes_parameters: bool
    bind: Callable[[Sequence[str], Sequence[str]], tuple[BoundRule, ...]]
    takes: frozenset[str] = frozenset()
    dtype: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Claim:
    """The modules (pair order) that entry number `entry` takes, each with what the entry takes below it, once."""

    entry: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class PatternTrace:
    """What one pattern matched."""

    entry: int
    pattern: str
    class_name: str
    matched: tuple[str, ...]


COPY = "copy"
"""The op of a tensor that is one of the source's files, unchanged, whatever its name."""


@dataclass(frozen=True)
class Made:
    """A tensor that is computed when it is written: its dtype, as safetensors names it, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], memoryview]


class ModuleTensor(NamedTuple):
    """A tensor of the stock model, out of the source's files.

    Attributes:
        name: its module name.
        stored: of which elements of which tensors of the files it consists.
        op: what is done to these, for people; `copy` where it is one of them.
        computed: how it is made instead, out of the `sources`; `stored` has no pieces then.
    """

    name: str
    stored: Arrangement
    op: str = COPY
    computed: Made | None = None
    computed_from: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the tensors in the files."""
        return self.computed_from if self.computed is not None else self.stored.sources

    @property
    def is_unchanged(self) -> bool:
        """Whether it is the tensor of the same name in the files, as it is there."""
        return self.stored.sources == (self.name,) and self.stored.is_whole(self.stored.shape)


class Part(NamedTuple):
    """A tensor of the stock model that a target holds: its name in the model, and what it consists of in the files."""

    source: str
    stored: Arrangement

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""
        return self.stored.shape


class Step(NamedTuple):
    """One output tensor.

    Attributes:
        target: its name; it is stored as `dtype` in the shape of `stored`.
        op: what is done; `copy` for a tensor of the source's files that nothing changes.
        entry: the number of the patch entry; None outside every claim.
        parts: the tensors of the stock model that it holds, in the order of `made`.
        made: of which elements of the parts it consists.
        origins: the tensors of the source's files; one of another dtype is converted.
        stored: of which elements of the origins it consists.
        computed: how it is made instead; `made` and `stored` have no pieces then.
    """

    target: str
    dtype: str
    op: str
    entry: int | None
    parts: tuple[Part, ...]
    made: Arrangement
    origins: tuple[SourceTensor, ...]
    stored: Arrangement
    computed: Made | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output tensor."""
        return self.stored.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the output tensor."""
        return self.stored.size * DTYPE_BITS[self.dtype] // 8

    @property
    def is_transformed(self) -> bool:
        """Whether the tensor differs from its source in more than its name."""
        only = self.origins[0]
        return self.computed is not None or only.dtype != self.dtype or not self.stored.is_whole(only.shape)


@dataclass(frozen=True)
class OutputShard:
    """An output file and its steps in file order.

    `same_as` names the source file that it equals byte for byte, header included; None where it is written anew.
    """

    name: str
    steps: tuple[Step, ...]
    same_as: str | None = None


@dataclass(frozen=True)
class Plan:
    """The frozen full description of a conversion."""

    model_type: str
    architecture: str
    entries: tuple[Entry, ...]
    claims: tuple[Claim, ...]
    traces: tuple[PatternTrace, ...]
    steps: tuple[Step, ...]
    shards: tuple[OutputShard, ...]

    @property
    def bytes_copied(self) -> int:
        """Bytes of tensors that are the same in the output."""
        return sum(step.size_bytes for step in self.steps) - self.bytes_transformed

    @cached_property
    def bytes_transformed(self) -> int:
        """Bytes of tensors that are made of several."""
        return sum(step.size_bytes for step in self.steps if step.is_transformed)

    def by_target(self) -> Mapping[str, Step]:
        """Target name to step."""
        return {step.target: step for step in self.steps}
