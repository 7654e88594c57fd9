"""The output directory: what may be replaced, the partial directory beside it, and the swap at the end.

All writing happens in `<output>.partial/`, which a run owns by holding a `flock` on the lock file inside.
A partial directory with a lock file that nobody holds is left from a run that was killed: it is emptied and
used again.  One without a lock file (unless it is empty) is not ours and is left alone.

Refused: an output inside its source or around it, a file, a dangling link, a mount point, and a directory
that holds files but not our manifest, whatever `overwrite` says.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path
from types import TracebackType

from kconvert.errors import ManifestError, OutputError, PreflightError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import INDEX_NAME, KERNELS_DIR, MANIFEST_NAME, PARITY_NAME
from kconvert.rewrite.durable import sync_directory
from kconvert.rewrite.job import LOCK_NAME

__all__ = ["Partial", "check_output", "check_replaceable", "real_path"]


def real_path(path: Path) -> Path:
    """The absolute path without links; parts that do not exist stay as they are."""
    return Path(os.path.realpath(path))


def check_output(output: Path, *, source: Path, overwrite: bool) -> None:
    """Refuses an output that would touch its source or files that are not ours.

    Raises:
        UsageError: by real path, `output` is `source`, or one lies inside the other.
        OutputError: `output` exists and may not be replaced.
    """
    real_output, real_source = real_path(output), real_path(source)
    relation = None
    if real_output == real_source or _same_directory(output, source):
        relation = "is the source itself"
    elif real_output.is_relative_to(real_source):
        relation = f"lies inside the source {source}"
    elif real_source.is_relative_to(real_output):
        relation = f"holds the source {source}"
    if relation is not None:
        raise UsageError(f"output {relation}", where=str(output), fix="choose a directory outside the source")
    check_replaceable(output, overwrite=overwrite)


def check_replaceable(output: Path, *, overwrite: bool) -> None:
    """Raises OutputError unless `output` is missing, is empty, or is ours and `overwrite` is set."""
    where = str(output)
    if not os.path.lexists(output):
        return
    if not output.exists():
        raise OutputError("output is a link to nothing", where=where, fix="remove it or choose another output")
    if not output.is_dir():
        raise OutputError("output exists and is not a directory", where=where, fix="choose another output")
    if output.is_mount():
        raise OutputError("output is a mount point", where=where, fix="choose a directory inside it")
    if not os.listdir(output):
        return
    if not (output / MANIFEST_NAME).is_file():
        also = "" if overwrite else ", and --overwrite would not replace them"
        raise OutputError(
            f"output holds files that kconvert did not write{also}", where=where, fix="choose another output"
        )
    if not overwrite:
        raise OutputError("output exists", where=where, fix="replace it with --overwrite, or choose another output")
    _check_own(output)


def _check_own(output: Path) -> None:
    """Raises OutputError where files were added to an output of ours, or a model was saved into it."""
    where, fix = str(output), "move them, or choose another output"
    try:
        manifest = load_manifest(output)
    except ManifestError as error:
        raise OutputError(f"output holds a manifest that cannot be read: {error.what}", where=where, fix=fix) from error
    if manifest.written_by != "apply":
        raise OutputError("output holds weights that a model was saved as", where=where, fix="choose another output")
    own = (MANIFEST_NAME, PARITY_NAME, INDEX_NAME, manifest.source_headers)
    known = {*manifest.weight_files, *manifest.sidecars, *own}
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        if name not in known and name.split("/")[0] != KERNELS_DIR and not path.is_dir():
            raise OutputError(f"output holds {name!r}, which kconvert did not write", where=where, fix=fix)


class Partial:
    """`<output>.partial/`, made or taken over, locked, and empty; removed on exit unless published.

    `output` must be a real path, so that the two are on one file system.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(f"{output.name}.partial")
        self._made_parents: list[Path] = []
        self._lock_fd = -1
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> Partial:
        try:
            self._make_parents()
            self._lock_fd = _claim(self.path)
            status = os.lstat(self.path)
            self._identity = status.st_dev, status.st_ino
            _empty(self.path)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._discard()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"{self.path} could not be removed: {failure}")
        finally:
            self._release()

    def publish(self, *, overwrite: bool) -> None:
        """Puts the finished directory under the final name; an old output is removed only after that."""
        check_replaceable(self.output, overwrite=overwrite)
        old = self.output.with_name(f"{self.output.name}.old-{secrets.token_hex(4)}")
        in_the_way = self.output.is_dir() and bool(os.listdir(self.output))
        # A kill between these two calls leaves a whole partial directory that is no longer marked as ours.
        os.unlink(self.path / LOCK_NAME)
        if in_the_way:
            self._swap(old)
        else:
            os.rename(self.path, self.output)
        self._made_parents.clear()
        sync_directory(self.output)
        sync_directory(self.output.parent)
        if in_the_way:
            _remove_old(old, self.output)

    def _swap(self, old: Path) -> None:
        try:
            os.rename(self.output, old)
            os.rename(self.path, self.output)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(self.output):
                os.rename(old, self.output)
            raise

    def _make_parents(self) -> None:
        base = self.output.parent
        missing = []
        while not os.path.lexists(base):
            missing.append(base)
            base = base.parent
        if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
            raise PreflightError("cannot make the output here: not a writable directory", where=str(base))
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                self._made_parents.append(folder)

    def _discard(self) -> None:
        """Removes the directory we claimed, and no other that has come to this path since; the lock goes last."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if self._identity != (status.st_dev, status.st_ino):
            return
        _empty(self.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / LOCK_NAME)
        with contextlib.suppress(OSError):  # another run may have made its lock file in here just now
            os.rmdir(self.path)

    def _release(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
        while self._made_parents:
            with contextlib.suppress(OSError):  # no longer empty: others use it
                os.rmdir(self._made_parents[-1])
            self._made_parents.pop()


def _claim(path: Path) -> int:
    """Makes `path` or takes over a stale one; gives the descriptor that holds the lock."""
    made = False
    try:
        os.mkdir(path)
        made = True
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise _not_ours(path) from None
    try:
        return _lock(path)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise PreflightError(f"cannot be locked: {error.strerror}", where=str(path)) from error


def _lock(path: Path) -> int:
    found = os.listdir(path)
    if found and LOCK_NAME not in found:
        raise _not_ours(path)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if not found:
        flags |= os.O_CREAT | os.O_EXCL
    elif not stat.S_ISREG(os.lstat(path / LOCK_NAME).st_mode):
        raise _not_ours(path)
    try:
        fd = os.open(path / LOCK_NAME, flags, 0o666)
    except (FileExistsError, FileNotFoundError):  # another run came or went since the listing
        raise _in_use(path) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path / LOCK_NAME)):
            raise _in_use(path)
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        raise _in_use(path) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _empty(path: Path) -> None:
    """Removes all but the lock file; links are removed, not followed."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.name == LOCK_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _remove_old(old: Path, output: Path) -> None:
    try:
        shutil.rmtree(old)
    except OSError as error:
        raise OutputError(
            f"the new output is complete, but the old one could not be removed: {error.strerror}",
            where=str(output),
            fix=f"remove {old}",
        ) from error


def _same_directory(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _not_ours(path: Path) -> OutputError:
    return OutputError("exists, and is not left from a kconvert run", where=str(path), fix="move or remove it")


def _in_use(path: Path) -> OutputError:
    return OutputError(
        "another live run is writing this output", where=str(path), fix="wait for it or choose another output"
    )
