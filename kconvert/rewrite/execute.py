"""Runs a job: preflight, copy, fsync, final items, rename.  The only door to writing an output.

Nothing appears under the final name unless everything is on the disk.  Whatever goes wrong, Ctrl-C included,
the threads end, the partial directory is removed and the error goes on.  A killed process leaves a
`.partial` directory, which the next run takes over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from time import perf_counter

from kconvert.errors import PreflightError, UsageError
from kconvert.rewrite.copying import OpenFile, write_at
from kconvert.rewrite.durable import create, sync_directory, write_synced
from kconvert.rewrite.job import Copy, Extent, Job, OutputFile
from kconvert.rewrite.output import Partial, check_replaceable, real_path
from kconvert.rewrite.sources import check_unchanged, open_sources
from kconvert.rewrite.tasks import TaskQueue, cut
from kconvert.rewrite.workers import default_workers, run_workers

__all__ = ["RewriteResult", "rewrite"]

_SPARE_FILES = 64
_MACHINE_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system does not hold files of this size",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an error",
    errno.ENOENT: "no such folder, and it cannot be made",
    errno.EACCES: "not allowed to write",
    errno.EPERM: "not allowed to write",
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files",
    errno.ENAMETOOLONG: "a file name is too long",
    errno.EEXIST: "two output names are one file here",
}
"""What an OSError says about the machine; any other one is a fault of ours and goes through as it is."""


@dataclass(frozen=True)
class RewriteResult:
    """Where the result is, its size, and how long copying and getting it safely onto the disk took."""

    output: Path
    bytes_written: int
    copy_seconds: float
    sync_seconds: float


def rewrite(
    job: Job,
    output: Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RewriteResult:
    """Writes `job` as the directory `output`, whole or not at all.

    Args:
        overwrite: replace an output that kconvert wrote; nothing else is ever replaced.
        workers: copy threads; default 2 to 4.
        on_progress: called in this thread with the number of bytes newly written; the sum is `job.size_bytes`.

    Raises:
        UsageError: `workers` below 1, or the job reads files of the output that it would replace.
        CheckpointError: a source is missing, too short, or ends early while it is read.
        PreflightError: the disk or the process limits cannot hold the result.
        OutputError: `output` may not be replaced, or another run is writing it.
    """
    num_workers = default_workers() if workers is None else workers
    if num_workers < 1:
        raise UsageError(f"workers must be 1 or more, not {num_workers}")
    check_replaceable(output, overwrite=overwrite)
    target = real_path(output)
    report = on_progress or _ignore
    with _machine_errors(target), contextlib.ExitStack() as stack:
        files = (*job.files, *map(_whole, job.copies))
        _check_open_files(files, num_workers)
        sources = open_sources(job, stack)
        _check_sources_stay(sources, target)
        partial = stack.enter_context(Partial(target))
        _check_space(partial.path, job.size_bytes)
        start = perf_counter()
        targets = _create_targets(job, files, partial.path, stack, report)
        _copy(files, sources, targets, num_workers, report)
        check_unchanged(job, sources)
        copied = perf_counter()
        _sync(job, targets, partial.path, report)
        partial.publish(overwrite=overwrite)
        end = perf_counter()
    return RewriteResult(output, job.size_bytes, copied - start, end - copied)


def _ignore(size_bytes: int) -> None:
    """The progress callback of a caller who wants none."""


def _whole(copy: Copy) -> OutputFile:
    return OutputFile(copy.name, b"", (Extent(copy.path, 0, copy.size_bytes),))


@contextlib.contextmanager
def _machine_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = _MACHINE_ERRORS.get(error.errno or 0)
        if text is None:
            raise
        raise PreflightError(f"cannot be written: {text}", where=str(error.filename or output)) from error


def _check_open_files(files: Sequence[OutputFile], num_workers: int) -> None:
    num_sources = len({path for file in files for extent in file.extents for path in extent.paths})
    needed = num_sources + len(files) + num_workers + _SPARE_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise PreflightError(
            f"{needed} files have to be open at once, the limit is {limit}", fix=f"raise it with `ulimit -n {needed}`"
        )


def _check_sources_stay(sources: Mapping[Path, OpenFile], target: Path) -> None:
    """Links may lead from a source directory elsewhere into an output that is about to be replaced."""
    for path in sources:
        if real_path(path).is_relative_to(target):
            raise UsageError(f"output holds the source file {path}", where=str(target), fix="choose another output")


def _check_space(folder: Path, needed_bytes: int) -> None:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if needed_bytes > free_bytes:
        raise PreflightError(
            f"not enough space: {_size_text(needed_bytes)} needed, {_size_text(free_bytes)} free",
            where=str(folder.parent),
            fix="free some, or choose an output on another disk",
        )


def _size_text(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 10**9 else f"{size_bytes / 1e6:.1f} MB"


def _create_targets(
    job: Job, files: Sequence[OutputFile], folder: Path, stack: contextlib.ExitStack, report: Callable[[int], None]
) -> list[OpenFile]:
    """Makes all folders and data files, and writes the prefixes."""
    for name in job.names():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    targets = []
    for file in files:
        target = OpenFile(folder / file.name, create(folder / file.name, file.size_bytes))
        stack.callback(os.close, target.fd)
        targets.append(target)
        if file.prefix:
            write_at(target.fd, file.prefix, 0)
            report(len(file.prefix))
    return targets


def _copy(
    files: Sequence[OutputFile],
    sources: Mapping[Path, OpenFile],
    targets: Sequence[OpenFile],
    num_workers: int,
    report: Callable[[int], None],
) -> None:
    pieces = [cut(file.extents, sources, target, len(file.prefix)) for file, target in zip(files, targets, strict=True)]
    run_workers(TaskQueue(pieces), num_workers, report)


def _sync(job: Job, targets: Sequence[OpenFile], folder: Path, report: Callable[[int], None]) -> None:
    """Gets the data onto the disk, then the final items in their order, each after the one before."""
    for target in targets:
        os.fsync(target.fd)
    folders = _folders(job, folder)
    for path in folders:
        sync_directory(path)
    for name, data in job.final:
        write_synced(folder / name, data)
        report(len(data))
    for path in folders:
        sync_directory(path)


def _folders(job: Job, folder: Path) -> list[Path]:
    """The partial directory and every folder in it, the deepest first."""
    below = {parent for name in job.names() for parent in PurePosixPath(name).parents}
    return [folder / path for path in sorted(below, key=lambda path: (-len(path.parts), str(path)))]
