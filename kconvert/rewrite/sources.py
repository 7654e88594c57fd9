"""Opens every source file of a job once, and checks that it holds what the job wants, before a byte is written."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from kconvert.checkpoint import FileStamp, check_stamp
from kconvert.errors import CheckpointError
from kconvert.rewrite.gather import Gather
from kconvert.rewrite.job import Computed, Digested, Job, Part
from kconvert.rewrite.reading import OpenFile

__all__ = ["check_unchanged", "open_sources", "stamps_after_links"]


def open_sources(job: Job, stack: ExitStack) -> dict[Path, OpenFile]:
    """The open file of each source path; `stack` closes them.

    Raises:
        CheckpointError: a source is missing, not a regular file, shorter than an extent needs, or, for a
            whole copy, of another size than the job says.
    """
    needed: dict[Path, int] = {}
    for file in job.files:
        for extent in file.extents:
            for path, end in _ends(extent):
                needed[path] = max(needed.get(path, 0), end)
    exact = {copy.path: copy.size_bytes for copy in job.copies}
    sources = {path: _open(path, stack) for path in sorted({*needed, *exact})}
    check_unchanged(job.stamps, sources)
    for path, source in sources.items():
        size = os.fstat(source.fd).st_size
        if size < needed.get(path, 0):
            raise CheckpointError(f"is too short: {needed[path]} bytes needed, {size} found", where=str(path))
        if size != exact.get(path, size):
            raise CheckpointError(
                f"has changed: {size} bytes, {exact[path]} when it was listed", where=str(path), fix="start again"
            )
    return sources


def _ends(extent: Part) -> Iterator[tuple[Path, int]]:
    """Every file that is read, and how long it has to be."""
    if isinstance(extent, Computed):
        return
    if isinstance(extent, Digested):
        for part in extent.parts:
            yield from _ends(part)
        return
    if isinstance(extent, Gather):
        yield from ((each.path, extent.end_of(each)) for each in extent.pieces)
    else:
        yield extent.path, extent.offset + extent.size_bytes


def check_unchanged(stamps: Mapping[Path, FileStamp], sources: Mapping[Path, OpenFile]) -> None:
    """Raises CheckpointError if a stamped source is not the file it was, or was written to."""
    for path, stamp in stamps.items():
        if path in sources:
            check_stamp(stamp, sources[path].fd, path)


def stamps_after_links(job: Job, sources: Mapping[Path, OpenFile]) -> dict[Path, FileStamp]:
    """The stamps of the job's sources now that hard links to them were made or removed, which is a change of its own.

    Raises:
        CheckpointError: more than that has changed.
    """
    stamps = {}
    for path, stamp in job.stamps.items():
        if path in sources:
            stamps[path] = stamp.after_links(sources[path].fd)
    check_unchanged(stamps, sources)
    return stamps


def _open(path: Path, stack: ExitStack) -> OpenFile:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: a named pipe would wait for ever
            raise CheckpointError("is not a regular file", where=str(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise CheckpointError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    stack.callback(_close, fd)
    return OpenFile(path, fd)


def _close(fd: int) -> None:
    """Closes a file that was only read, so that whatever a network disk says then, nothing is lost."""
    with contextlib.suppress(OSError):
        os.close(fd)
