"""What a rewrite has to write, as plain data: no tensors, no names of parameters, only runs of bytes.

A run is copied as it is, or cast from one float dtype to another on the way.  A job is checked when it is built.  It
refuses names that leave the output directory, names that meet twice (also a file where another name needs a folder),
the name of the lock file, negative offsets or sizes, and runs to cast that hold a part of a value.
Whether the sources hold those bytes is checked when the rewrite opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kconvert.checkpoint import FileStamp
from kconvert.errors import CheckpointError
from kconvert.names import unsafe_name_reason
from kconvert.rewrite.cast import Cast
from kconvert.rewrite.gather import Gather

__all__ = ["LOCK_NAME", "Computed", "Copy", "Extent", "Job", "OutputFile"]

LOCK_NAME = ".kconvert-lock"
"""The lock inside a partial directory; no output may have this name."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`size_bytes` bytes of `path` from `offset`, copied as they are or converted."""

    path: Path
    offset: int
    size_bytes: int
    cast: Cast | None = None

    def __post_init__(self) -> None:
        item = self.cast.source_bytes if self.cast is not None else 1
        if self.offset < 0 or self.size_bytes < 0 or self.size_bytes % item:
            raise CheckpointError(f"bad extent: offset {self.offset}, size {self.size_bytes}", where=str(self.path))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file that is read."""
        return (self.path,)

    @property
    def target_bytes(self) -> int:
        """How many bytes of the output it fills."""
        return self.size_bytes if self.cast is None else self.cast.size_after(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Computed:
    """`target_bytes` bytes that `make` gives when they are written; `name` is for errors."""

    name: str
    target_bytes: int
    make: Callable[[], memoryview]
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write: `prefix`, then extents, gathered and computed tensors one after another."""

    name: str
    prefix: bytes
    extents: tuple[Extent | Gather | Computed, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the finished file."""
        return len(self.prefix) + sum(extent.target_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole file to copy; `size_bytes` must be its size when the rewrite opens it.  `name` may have folders."""

    name: str
    path: Path
    size_bytes: int

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise CheckpointError(f"bad size {self.size_bytes}", where=str(self.path))


@dataclass(frozen=True, slots=True)
class Job:
    """Everything one rewrite writes.

    `final` is written after all other data is on the disk, one by one in this order, so the index
    stands before the manifest and the manifest is last.  A source in `stamps` has to be that very file, unchanged,
    from its opening until the last byte is copied.
    """

    files: tuple[OutputFile, ...]
    copies: tuple[Copy, ...]
    final: tuple[tuple[str, bytes], ...]
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name in self.names():
            _check_name(name, seen)
            seen.add(name)
        for name in seen:
            for folder in PurePosixPath(name).parents:
                if str(folder) in seen:
                    raise CheckpointError(f"output name {str(folder)!r} is both a file and the folder of {name!r}")

    def names(self) -> Iterator[str]:
        """Every name below the output directory, in the order of writing."""
        yield from (file.name for file in self.files)
        yield from (copy.name for copy in self.copies)
        yield from (name for name, _ in self.final)

    @property
    def size_bytes(self) -> int:
        """The sum over all files."""
        return (
            sum(file.size_bytes for file in self.files)
            + sum(copy.size_bytes for copy in self.copies)
            + sum(len(data) for _, data in self.final)
        )


def _check_name(name: str, seen: set[str]) -> None:
    reason = unsafe_name_reason(name)
    if reason is None and name.split("/")[0] == LOCK_NAME:
        reason = "the name of kconvert's lock file"
    if reason is None and name in seen:
        reason = "written twice"
    if reason is not None:
        raise CheckpointError(f"output name {name!r} is refused: {reason}")
