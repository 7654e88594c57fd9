"""Runs a job: preflight, copy and sync, final items, rename.  The only door to writing an output.

Nothing appears under the final name unless everything is on the disk.  What is copied runs in threads of its own, so
that the caller can check something meanwhile; without its `publish` nothing is published.

However this ends, the threads end and the error goes on.  Ctrl-C, and an error of the machine such as a full disk, keep
the partial directory where a file in it is finished, and the same job goes on from there, as after a kill; anything else
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from time import perf_counter
from types import TracebackType
from typing import Literal, TypeAlias

from kconvert.checkpoint import FileStamp
from kconvert.errors import CheckpointError, OutputError, PreflightError, UsageError
from kconvert.rewrite.copying import Task
from kconvert.rewrite.durable import clone, create, start_writing, sync_directory, write_at, write_synced
from kconvert.rewrite.job import Copy, Digested, Extent, Job, OutputFile, check_names
from kconvert.rewrite.journal import Finished
from kconvert.rewrite.output import Partial, check_available, real_path
from kconvert.rewrite.preflight import check_disk, check_open_files, check_sources_stay
from kconvert.rewrite.reading import OpenFile
from kconvert.rewrite.sources import check_unchanged, open_sources, stamps_after_links
from kconvert.rewrite.tasks import cut, digests_of
from kconvert.rewrite.workers import BACKLOG, Crew, default_workers

__all__ = ["REUSES", "Reuse", "RewriteResult", "Writing", "rewrite"]

Reuse: TypeAlias = Literal["copy", "hardlink", "reflink"]
"""How an output file that is a source file, byte for byte, comes about."""

REUSES: tuple[Reuse, ...] = ("copy", "hardlink", "reflink")

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
    errno.EILSEQ: "the file system does not take this file name",
    errno.ESTALE: "the network disk has lost the file",
    errno.ETIMEDOUT: "the network disk does not answer",
}
"""What an OSError says about the machine, where the system's own words say it less well."""

_NOT_THE_MACHINE = (errno.EBADF, errno.EFAULT, errno.EPIPE)
"""Faults of ours, and a reader of the progress that has gone: they go through as they are."""

_NO_LINK = {
    errno.EXDEV: "it is on another file system",
    errno.EOPNOTSUPP: "the file system does not do that",
    errno.ENOTTY: "the file system does not do that",
    errno.EINVAL: "the file system does not do that",
    errno.ENOSYS: "the file system does not do that",
    errno.EPERM: "it is not allowed",
    errno.EMLINK: "it has too many links",
}


@dataclass(frozen=True)
class RewriteResult:
    """Where the result is, its size, and how long it took.

    Attributes:
        output: the directory.
        bytes_written: the size of all files, those included that an earlier run had finished and those that are linked.
        bytes_resumed: of these, what an earlier run had finished.
        bytes_linked: of these, what shares its blocks with the source.
        copy_seconds: from the first byte copied to the last.
        sync_seconds: from there until everything was on the disk and had its name, without waiting for the caller.
    """

    output: Path
    bytes_written: int
    bytes_resumed: int
    bytes_linked: int
    copy_seconds: float
    sync_seconds: float


def rewrite(
    job: Job,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = True,
    reuse: Reuse = "copy",
    workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RewriteResult:
    """Writes `job` as the directory `output`, whole or not at all; see `Writing`."""
    with Writing(
        job, output, overwrite=overwrite, resume=resume, reuse=reuse, workers=workers, on_progress=on_progress
    ) as writing:
        return writing.publish()


class Writing:
    """A job that is being written, as a context: entering starts it, leaving it without `publish` stops it.

    Args:
        overwrite: replace an output that kconvert wrote; nothing else is ever replaced.
        resume: go on where a run with the same `job.identity` was stopped, and refuse to drop one with another.
        reuse: how files that equal a source file come about.
        workers: copy threads; default 2 to 4.
        on_progress: called by `wait` and `publish` with the number of bytes newly written; the sum is
            `job.size_bytes`.

    Raises:
        UsageError: `workers` below 1, or the job reads files of the output that it would replace.
        CheckpointError: a source is missing, too short, has changed, or ends early while it is read.
        PreflightError: the disk or the process limits cannot hold the result, or a file cannot be linked.
        OutputError: `output` may not be replaced, another run is writing it, or one with another identity was stopped.
    """

    def __init__(
        self,
        job: Job,
        output: Path,
        *,
        overwrite: bool = False,
        resume: bool = True,
        reuse: Reuse = "copy",
        workers: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._job = job
        self._output = output
        self._target = real_path(output)
        self._overwrite = overwrite
        self._resume = resume
        self._reuse = reuse
        self._num_workers = default_workers() if workers is None else workers
        self._report = on_progress or _ignore
        self._files = {file.name: file for file in (*job.files, *map(_whole, job.copies))}
        self._copies = {copy.name for copy in job.copies}
        self._stack = contextlib.ExitStack()
        self._sources: Mapping[Path, OpenFile] = {}
        self._targets: dict[str, OpenFile] = {}
        self._stamps: Mapping[Path, FileStamp] = {}
        self._kept: Mapping[str, Finished] = {}
        self._linked: set[str] = set()
        self._crew: Crew | None = None
        self._result: RewriteResult | None = None
        self._num_finished = 0
        self._early_bytes = 0
        self._started = 0.0

    def __enter__(self) -> Writing:
        if self._num_workers < 1:
            raise UsageError(f"workers must be 1 or more, not {self._num_workers}")
        with contextlib.ExitStack() as stack:
            stack.push(self)
            with self._machine_errors():
                self._start()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._crew is not None:
                self._crew.stop()
        finally:
            self._close_targets()
            num_finished = self._num_finished + len(self._kept)
            if num_finished and _may_go_on(error) and self._partial.keep() and error is not None:
                error.add_note(
                    f"{num_finished} of {len(self._job.files)} weight files are kept in {self._partial.path}; "
                    "the same command goes on from there"
                )
            self._stack.__exit__(kind, error, trace)

    def wait(self) -> Mapping[str, str]:
        """Waits until everything but the final items is written and on the disk.

        Returns:
            The sha256, as hex, of every tensor that is digested, by its name.
        """
        if self._crew is None:
            return {}
        early, self._early_bytes = self._early_bytes, 0
        if early:
            self._report(early)
        with self._machine_errors():
            self._crew.wait(self._report)
            check_unchanged(self._stamps, self._sources)
        return self._crew.digests

    def publish(self, final: Iterable[tuple[str, bytes]] = ()) -> RewriteResult:
        """Waits, writes the job's final items and then `final`, in their order, and gives the directory its name."""
        self.wait()
        if self._result is not None:
            return self._result
        assert self._crew is not None
        start = perf_counter()
        items = (*self._job.final, *final)
        names = [*self._files, *(name for name, _ in items)]
        check_names(names)
        with self._machine_errors():
            sizes = {name: file.size_bytes for name, file in self._files.items()}
            self._partial.check_in_place(sizes)
            self._write_final(items, _folders(names, self._partial.tree))
            self._report(sum(len(data) for _, data in self._job.final))
            sizes |= {name: len(data) for name, data in items}
            self._partial.publish(sizes, overwrite=self._overwrite)
        crew = self._crew
        self._result = RewriteResult(
            self._output,
            sum(sizes.values()),
            sum(self._files[name].size_bytes for name in self._kept),
            sum(self._files[name].size_bytes for name in self._linked),
            crew.copied_at - self._started,
            crew.settled_at - crew.copied_at + perf_counter() - start,
        )
        return self._result

    def _start(self) -> None:
        check_available(self._output, overwrite=self._overwrite)
        check_open_files([*self._files.values()], self._num_workers + BACKLOG)
        self._sources = open_sources(self._job, self._stack)
        check_sources_stay(self._sources, self._target)
        self._partial = self._stack.enter_context(Partial(self._target))
        names = {file.name for file in self._job.files}
        if self._resume and self._partial.was_published(self._job.identity, names):
            self._partial.tidy()
            self._result = RewriteResult(self._output, self._job.size_bytes, self._job.size_bytes, 0, 0.0, 0.0)
            return
        self._partial.check_replaceable(overwrite=self._overwrite)
        self._kept = self._partial.begin(self._job.identity, names, resume=self._resume)
        left = [file for name, file in self._files.items() if name not in self._kept]
        self._linked = {file.name for file in left if self._reuse != "copy" and file.same_as is not None}
        needed = sum(file.size_bytes for file in left if file.name not in self._linked)
        check_disk(self._partial.path, self._job.names(), needed + sum(len(data) for _, data in self._job.final))
        self._started = perf_counter()
        self._early_bytes = sum(self._files[name].size_bytes for name in self._kept)
        for file in left:
            self._make(file)
        self._stamps = stamps_after_links(self._job, self._sources)
        self._crew = Crew(
            {file.name: self._tasks(file) for file in left},
            self._sources,
            self._num_workers,
            self._settle,
            lambda name: start_writing(self._targets[name].fd),
        )
        for state in self._kept.values():
            self._crew.digests.update(state.digests)
        self._crew.start()

    def _make(self, file: OutputFile) -> None:
        """Makes a file in its full size and writes its prefix, or links it."""
        path = self._partial.tree / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.name in self._linked:
            assert file.same_as is not None
            self._link(file.same_as, path)
            self._early_bytes += file.size_bytes
            return
        fd = create(path, file.size_bytes)
        try:
            write_at(fd, file.prefix, 0)
        finally:
            os.close(fd)
        self._early_bytes += len(file.prefix)

    def _link(self, source: Path, path: Path) -> None:
        try:
            if self._reuse == "hardlink":
                os.link(real_path(source), path)
                if not os.path.samestat(os.stat(path), os.fstat(self._sources[source].fd)):
                    raise CheckpointError("was replaced while it was read", where=str(source), fix="start again")
            else:
                clone(self._sources[source].fd, path)
        except OSError as error:
            reason = _NO_LINK.get(error.errno or 0)
            if reason is None:
                raise
            raise PreflightError(
                f"cannot be used again as a {self._reuse}: {reason}", where=str(source), fix="use --reuse copy"
            ) from error

    def _tasks(self, file: OutputFile) -> Iterator[Task]:
        """The tasks of a file, which is opened when the first is taken."""
        path, is_linked = self._partial.tree / file.name, file.name in self._linked
        fd = os.open(path, (os.O_RDONLY if is_linked else os.O_WRONLY) | os.O_CLOEXEC)
        target = self._targets[file.name] = OpenFile(path, fd)
        if is_linked:
            yield from digests_of(file.extents)
        else:
            yield from cut(file.extents, self._sources, target, len(file.prefix))

    def _settle(self, name: str) -> None:
        """Gets a file onto the disk, and notes that it is there."""
        assert self._crew is not None
        fd = self._targets[name].fd
        os.fsync(fd)
        if name not in self._copies:
            extents = self._files[name].extents
            digested = [extent.name for extent in extents if isinstance(extent, Digested)]
            digests = {each: self._crew.digests[each] for each in digested}
            self._partial.finished(name, Finished.of(fd, digests, is_linked=name in self._linked))
            self._num_finished += 1
        del self._targets[name]
        os.close(fd)

    def _write_final(self, items: Iterable[tuple[str, bytes]], folders: Sequence[Path]) -> None:
        """Each item after the one before is on the disk, and all after everything else."""
        for path in reversed(folders):
            if path != self._partial.tree:
                path.mkdir(exist_ok=True)
        for path in folders:
            sync_directory(path)
        for name, data in items:
            write_synced(self._partial.tree / name, data)
        for path in folders:
            sync_directory(path)

    def _close_targets(self) -> None:
        for target in self._targets.values():
            os.close(target.fd)

    @contextlib.contextmanager
    def _machine_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            number = error.errno or errno.EBADF
            if number in _NOT_THE_MACHINE:
                raise
            text = _MACHINE_ERRORS.get(number) or os.strerror(number).lower()
            raise PreflightError(f"cannot be written: {text}", where=str(error.filename or self._target)) from error


def _may_go_on(error: BaseException | None) -> bool:
    """Whether what is finished is as good as it was before an error."""
    if isinstance(error, KeyboardInterrupt | OSError | PreflightError | OutputError):
        return True
    return error is not None and isinstance(error.__cause__, OSError)


def _ignore(size_bytes: int) -> None:
    """The progress callback of a caller who wants none."""


def _whole(copy: Copy) -> OutputFile:
    return OutputFile(copy.name, b"", (Extent(copy.path, 0, copy.size_bytes),))


def _folders(names: Iterable[str], tree: Path) -> list[Path]:
    """The tree and every folder in it, the deepest first."""
    below = {parent for name in names for parent in PurePosixPath(name).parents}
    return [tree / path for path in sorted(below, key=lambda path: (-len(path.parts), str(path)))]
