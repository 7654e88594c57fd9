"""What a rewrite has to write, as plain data: no tensors, no names of parameters, only runs of bytes.

A run is copied as it is, or cast from one float dtype to another on the way.  A job is checked when it is built.  It
refuses names that leave the output directory, names that meet twice (also a file where another name needs a folder),
negative offsets or sizes, and runs to cast that hold a part of a value.
Whether the sources hold those bytes is checked when the rewrite opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from kconvert.checkpoint import FileStamp
from kconvert.errors import CheckpointError
from kconvert.names import unsafe_name_reason
from kconvert.rewrite.cast import Cast
from kconvert.rewrite.gather import Gather

__all__ = ["Computed", "Copy", "Digested", "Extent", "Job", "OutputFile", "Part", "check_names"]


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
class Digested:
    """A tensor of which the sha256 is wanted: its parts, and the `name` that the digest is given under."""

    name: str
    parts: tuple[Extent | Gather | Computed, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read, each once."""
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def target_bytes(self) -> int:
        """How many bytes of the output it fills."""
        return sum(part.target_bytes for part in self.parts)


Part: TypeAlias = Extent | Gather | Computed | Digested
"""Bytes of an output file, or a tensor of it."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write: `prefix`, then the extents one after another.

    `same_as` is a source file that holds the same bytes from its first to its last, where there is one.
    """

    name: str
    prefix: bytes
    extents: tuple[Part, ...]
    same_as: Path | None = None

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

    `identity` tells this job from others (what it is about, to its state): a run that was killed is gone on with where all
    of it is the same.  Without one it never is.
    """

    files: tuple[OutputFile, ...]
    copies: tuple[Copy, ...]
    final: tuple[tuple[str, bytes], ...] = ()
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.names())

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


def check_names(names: Iterable[str]) -> None:
    """Raises CheckpointError for a name that leaves the directory, comes twice, or is a folder of another."""
    seen: set[str] = set()
    for name in names:
        reason = unsafe_name_reason(name) or ("written twice" if name in seen else None)
        if reason is not None:
            raise CheckpointError(f"output name {name!r} is refused: {reason}")
        seen.add(name)
    for name in seen:
        for folder in PurePosixPath(name).parents:
            if str(folder) in seen:
                raise CheckpointError(f"output name {str(folder)!r} is both a file and the folder of {name!r}")
