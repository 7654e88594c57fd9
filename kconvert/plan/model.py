"""What a plan is made of: frozen data, no behaviour beyond sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kconvert.checkpoint import DTYPE_BITS
from kconvert.manifest import LayoutRecord
from kconvert.patterns import PathPattern
from kconvert.transforms import BoundRule

__all__ = ["Claim", "Entry", "OutputShard", "Pair", "Part", "PatternTrace", "Plan", "Step"]


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
    is empty.  `dtype` is what joined tensors are stored in; None keeps the dtype of their parts.
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


_EXACT = frozenset({("F16", "F32"), ("BF16", "F32")})
"""(source, target) of the conversions that keep every value."""


@dataclass(frozen=True)
class Part:
    """A run of rows of a target: the source's module name, its name, file and dtype on disk, rows, and extent."""

    source: str
    file_name: str
    file: str
    dtype: str
    rows: int
    offset: int
    size_bytes: int

    def is_rounded_to(self, dtype: str) -> bool:
        """Whether values are lost where the part is stored in the float dtype `dtype`."""
        return self.dtype != dtype and (self.dtype, dtype) not in _EXACT


@dataclass(frozen=True)
class Step:
    """One output tensor.  `op` is `copy` for a tensor outside every claim, else the rule's op.

    A part of another dtype than the tensor's is converted.
    """

    target: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    axis: int
    entry: int | None
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the output tensor."""
        bits = DTYPE_BITS[self.dtype]
        return sum(part.size_bytes * bits // DTYPE_BITS[part.dtype] for part in self.parts)

    @property
    def is_transformed(self) -> bool:
        """Whether the tensor differs from its source in more than its name."""
        return len(self.parts) > 1 or any(part.dtype != self.dtype for part in self.parts)


@dataclass(frozen=True)
class OutputShard:
    """An output file and its steps in file order."""

    name: str
    steps: tuple[Step, ...]


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
        return sum(step.size_bytes for step in self.steps if not step.is_transformed)

    @property
    def bytes_transformed(self) -> int:
        """Bytes of tensors that are made of several."""
        return sum(step.size_bytes for step in self.steps if step.is_transformed)

    def by_target(self) -> Mapping[str, Step]:
        """Target name to step."""
        return {step.target: step for step in self.steps}
