"""What a plan is made of: frozen data, no behaviour beyond sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    tensors `names`, all of which lie in these modules.
    """

    number: int
    where: str
    kind: Literal["replace", "fuse"]
    pairs: tuple[Pair, ...]
    kernels: tuple[str, ...]
    layout: LayoutRecord
    changes_parameters: bool
    bind: Callable[[Sequence[str], Sequence[str]], tuple[BoundRule, ...]]


@dataclass(frozen=True)
class Claim:
    """The modules (pair order) that entry number `entry` takes with their whole subtrees, once."""

    entry: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class PatternTrace:
    """What one pattern matched."""

    entry: int
    pattern: str
    class_name: str
    matched: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A run of rows of a target: the source's module name, its name and file on disk, rows, and extent."""

    source: str
    file_name: str
    file: str
    rows: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Step:
    """One output tensor.  `op` is `copy` for a tensor outside every claim, else the rule's op."""

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
        return sum(part.size_bytes for part in self.parts)

    @property
    def is_transformed(self) -> bool:
        """Whether the tensor differs from its source in more than its name."""
        return len(self.parts) > 1


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
