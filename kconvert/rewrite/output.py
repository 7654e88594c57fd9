"""The output directory: what may be replaced, the partial directory beside it, and the swap at the end.

All writing happens in `<output>.partial/`, which a run owns by holding a `flock` on the lock file inside.  Beside that
there are the journal and the tree that gets the output's name by one rename, which is atomic: exchanged with an old output
where there is one.  A partial directory with a lock file that nobody holds is left from a run that was stopped: the same
job goes on with it, another is refused.  One without a lock file (unless it is empty) is not ours and is left alone.

Refused: an output inside its source or around it, a file, a dangling link, a mount point, and a directory
that holds files but not our manifest, whatever `overwrite` says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

from kconvert.errors import KconvertError, ManifestError, OutputError, PreflightError, UsageError
from kconvert.manifest import PackageRecord, load_manifest
from kconvert.names import INDEX_NAME, KERNELS_DIR, MANIFEST_NAME, PARITY_NAME
from kconvert.package_files import digest_of_files, list_package_files
from kconvert.rewrite.durable import exchange, sync_directory
from kconvert.rewrite.journal import JOURNAL_NAME, Finished, Journal, Past, directory_identity, read_journal

__all__ = [
    "LOCK_NAME",
    "OtherRunError",
    "Partial",
    "check_available",
    "check_output",
    "check_replaceable",
    "partial_path",
    "real_path",
]

LOCK_NAME = ".kconvert-lock"
_TREE_NAME = "output"
_REPLACED_NAME = "replaced"


def real_path(path: Path) -> Path:
    """The absolute path without links; parts that do not exist stay as they are."""
    return Path(os.path.realpath(path))


def partial_path(output: Path) -> Path:
    """The directory in which `output` is made."""
    return output.with_name(f"{output.name}.partial")


def check_output(output: Path, *, source: Path, overwrite: bool) -> None:
    """Refuses an output that would touch its source or files that are not ours.

    Raises:
        UsageError: by real path, `output` is `source`, or one lies inside the other.
        OutputError: `output` exists and may not be replaced.
        PreflightError: it cannot be looked at.
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
    try:
        check_available(output, overwrite=overwrite)
    except OSError as error:  # of a disk, while it is looked at
        raise PreflightError(
            f"cannot be looked at: {error.strerror or error}", where=str(error.filename or output)
        ) from error


def check_available(output: Path, *, overwrite: bool) -> None:
    """`check_replaceable`, but for an output whose run was killed before it had tidied up: that may have to be done."""
    real_output = real_path(output)
    published = read_journal(partial_path(real_output) / JOURNAL_NAME).published
    if published is not None and published.is_still(real_output):
        return
    try:
        check_replaceable(output, overwrite=overwrite)
    except OutputError:
        _remove_traces(partial_path(real_output))
        raise


def _remove_traces(partial: Path) -> None:
    """Removes a partial directory that holds at most a lock that nobody holds: a run was killed as it went."""
    with contextlib.suppress(OSError, OutputError, PreflightError):
        if stat.S_ISDIR(os.lstat(partial).st_mode) and {*os.listdir(partial)} <= {LOCK_NAME}:
            fd, _ = _claim(partial)
            try:
                os.unlink(partial / LOCK_NAME)
                os.rmdir(partial)
            finally:
                os.close(fd)


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
    for package in {record.layout.package for record in manifest.patches if record.layout.package is not None}:
        known |= _package_files(output, package)
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        if name not in known and (path.is_symlink() or not path.is_dir()):
            raise OutputError(f"output holds {name!r}, which kconvert did not write", where=where, fix=fix)


def _package_files(output: Path, package: PackageRecord) -> set[str]:
    """The files of a kernel package in an output of ours, by their names in it; none where the package was changed."""
    folder = f"{KERNELS_DIR}/{package.digest.partition(':')[2]}"
    try:
        names = list_package_files(output / folder, package.package_id)
        is_whole = digest_of_files(output / folder, names) == package.digest
    except KconvertError:
        return set()
    return {f"{folder}/{name}" for name in names} if is_whole else set()


class OtherRunError(OutputError):
    """A run that was stopped left its work, and it was for something else."""


class Partial:
    """`<output>.partial/`, made or taken over, and locked; removed on exit, unless it is to be gone on with.

    `output` must be a real path, so that the two are on one file system.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = partial_path(output)
        self.tree = self.path / _TREE_NAME
        self._replaced = self.path / _REPLACED_NAME
        self._made_parents: list[Path] = []
        self._lock_fd = -1
        self._identity: tuple[int, int] | None = None
        self._tree_identity: tuple[int, int] | None = None
        self._past = Past()
        self._journal: Journal | None = None
        self._is_ours = False
        self._can_go_on = False
        self._is_kept = False
        self._is_published = False
        self._is_discarded = False

    def __enter__(self) -> Partial:
        try:
            self._make_parents()
            self._lock_fd, self._is_ours = _claim(self.path)
            self._identity = directory_identity(self.path)
            self._past = read_journal(self.path / JOURNAL_NAME)
            self._put_back()
            self._is_published = self._past.published is not None and self._past.published.is_still(self.output)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._journal is not None:
                self._journal.close()
            self._put_back()
            if self._is_ours and not self._is_kept:
                self._discard()
        except OSError as failure:
            if error is None:
                raise OutputError(
                    f"the new output is complete, but what it replaced could not be removed: {failure.strerror}",
                    where=str(self.output),
                    fix=f"remove {self.path}",
                ) from failure
            error.add_note(f"{self.path} could not be removed: {failure}")
        finally:
            self._release()

    def was_published(self, identity: Mapping[str, str], names: Collection[str]) -> bool:
        """Whether the output is that of a run for the same, which was killed before it had tidied up here.

        `names` are the files that it has to hold as that run had finished them.
        """
        if self._journal is not None or not identity or self._past.identity != identity or not self._is_published:
            return False
        finished = self._past.finished
        return all(name in finished and finished[name].is_still(self.output / name) for name in names)

    def check_replaceable(self, *, overwrite: bool) -> None:
        """`check_replaceable`, which is an OtherRunError where the output is that of a run that had yet to tidy up here."""
        try:
            check_replaceable(self.output, overwrite=overwrite)
        except OutputError as error:
            if not self._is_published:
                raise
            raise OtherRunError(error.what, where=error.where, fix=error.fix) from None

    def tidy(self) -> None:
        """What a run left that was killed after it had published is to be removed on exit."""
        sync_directory(self.output.parent)
        self._is_ours = True

    def begin(self, identity: Mapping[str, str], names: Collection[str], *, resume: bool) -> dict[str, Finished]:
        """Makes the tree to be filled; of an earlier run for the same, the finished files among `names` stay in it.

        Returns:
            What is finished, by name.

        Raises:
            OtherRunError: `resume` is set, and what the earlier run was about is not `identity`.
            OutputError: the old output is in here, and something else has its name.
        """
        past = Past() if self._is_published else self._past
        if resume and past.identity and past.identity != identity:
            raise OtherRunError(
                f"left from a run that was stopped, and since then {_changed(past.identity, identity)}",
                where=str(self.path),
                fix="start afresh with --no-resume, or remove it",
            )
        if os.path.lexists(self._replaced):
            if not self._is_published:
                raise OutputError(
                    f"a run that was stopped has put the old output at {self._replaced}",
                    where=str(self.output),
                    fix="move what has its name now, or that directory",
                )
            shutil.rmtree(self._replaced)
        if not (resume and identity and past.identity):
            past = Past()
        kept = {
            name: state for name, state in past.finished.items() if name in names and state.is_still(self.tree / name)
        }
        self.tree.mkdir(exist_ok=True)
        _clear(self.tree, keep={self.tree / name for name in kept})
        self._tree_identity = directory_identity(self.tree)
        self._journal = Journal(self.path / JOURNAL_NAME, past)
        if not past.num_bytes:
            self._journal.begin(identity)
        sync_directory(self.path)
        # Only now: whatever fails above leaves what an earlier run has finished.
        self._is_ours, self._can_go_on, self._is_published = True, bool(identity), False
        return kept

    def finished(self, name: str, state: Finished) -> None:
        """Notes a file of the tree that is whole and on the disk."""
        assert self._journal is not None
        self._journal.finished(name, state)

    def keep(self) -> bool:
        """The directory stays when the context is left, to be gone on with; False where no run would."""
        self._is_kept = self._can_go_on and not self._is_published
        return self._is_kept

    def check_in_place(self, sizes: Mapping[str, int]) -> None:
        """Raises OutputError unless the tree is the one that was made, with files of these sizes in bytes, by name."""
        what = None
        if directory_identity(self.path) != self._identity or directory_identity(self.tree) != self._tree_identity:
            what = "was removed or replaced while it was written"
        else:
            for name, size_bytes in sizes.items():
                path = self.tree / name
                if path.is_symlink() or not path.is_file() or path.stat().st_size != size_bytes:
                    what = f"{name} in it was removed or changed while the others were written"
                    break
        if what is not None:
            raise OutputError(what, where=str(self.path), fix="start again, and leave it alone")

    def publish(self, sizes: Mapping[str, int], *, overwrite: bool) -> None:
        """Puts the finished tree under the final name; on exit an old output is removed.

        Args:
            sizes: what has to be in it: size in bytes by name, in the order of writing.
            overwrite: replace an output that kconvert wrote.
        """
        assert self._journal is not None
        check_replaceable(self.output, overwrite=overwrite)
        self.check_in_place(sizes)
        last = next(reversed([*sizes]), "")
        self._journal.publishing(self.tree, last)
        if self.output.is_dir() and os.listdir(self.output):
            _swap(self.tree, self.output, self._replaced)
        else:
            os.rename(self.tree, self.output)
        sync_directory(self.output.parent)
        self._is_published = True
        self._made_parents.clear()

    def _put_back(self) -> None:
        """The old output gets its name again, where a swap by way of `replaced` has stopped in the middle."""
        if not os.path.lexists(self.output) and self._replaced.is_dir() and not self._replaced.is_symlink():
            os.rename(self._replaced, self.output)

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
                sync_directory(folder.parent)

    def _discard(self) -> None:
        """Removes the directory we claimed, and no other that has come to this path since; the lock goes last."""
        if self._identity is None or directory_identity(self.path) != self._identity:
            return
        if os.path.lexists(self.tree):
            shutil.rmtree(self.tree)
        if os.path.lexists(self._replaced):
            if not self._is_published:  # the only copy of the old output
                return
            shutil.rmtree(self._replaced)
        own = (JOURNAL_NAME, LOCK_NAME)
        if not {*os.listdir(self.path)} <= {*own}:  # without its lock nobody would take it for ours
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self.path))
        for name in own:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        self._is_discarded = True
        with contextlib.suppress(OSError):  # another run may have made its lock file in here just now
            os.rmdir(self.path)

    def _release(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written into it
                os.close(fd)
        if self._is_discarded:  # a network disk keeps a file that is open in its folder
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        while self._made_parents:
            with contextlib.suppress(OSError):  # no longer empty: others use it
                os.rmdir(self._made_parents[-1])
            self._made_parents.pop()


def _changed(past: Mapping[str, str], identity: Mapping[str, str]) -> str:
    """What is not the same, for the middle of a sentence."""
    labels = [label for label in dict.fromkeys((*past, *identity)) if past.get(label) != identity.get(label)]
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f"{', '.join(labels[:3])}{more} changed"


def _swap(new: Path, output: Path, replaced: Path) -> None:
    """Gives `new` the name of `output`, and the other way round; at once where the file system can, and else by way of `replaced`."""
    if exchange(new, output):
        return
    os.rename(output, replaced)
    try:
        os.rename(new, output)
    except BaseException:
        if not os.path.lexists(output):
            os.rename(replaced, output)
        raise


def _claim(path: Path) -> tuple[int, bool]:
    """Makes `path` or takes over a stale one; gives the descriptor that holds the lock, and whether `path` is new."""
    made = False
    try:
        os.mkdir(path)
        made = True
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise _not_ours(path) from None
    try:
        return _lock(path), made
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise PreflightError(f"cannot be locked: {error.strerror}", where=str(path)) from error


def _lock(path: Path) -> int:
    try:
        found = os.listdir(path)
        strange = [name for name in found if not _is_own(path / name)]
    except FileNotFoundError:  # another run has just ended
        raise _in_use(path) from None
    if strange or (found and LOCK_NAME not in found):
        raise _not_ours(path)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if not found:
        flags |= os.O_CREAT | os.O_EXCL
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
        if not found:
            with contextlib.suppress(OSError):
                os.unlink(path / LOCK_NAME)
        os.close(fd)
        raise
    return fd


def _is_own(path: Path) -> bool:
    """Whether an entry of a partial directory is one that we make: no link, which would lead elsewhere."""
    mode = os.lstat(path).st_mode
    if path.name in (_TREE_NAME, _REPLACED_NAME):
        return stat.S_ISDIR(mode)
    return path.name in (LOCK_NAME, JOURNAL_NAME) and stat.S_ISREG(mode)


def _clear(folder: Path, keep: Collection[Path]) -> None:
    """Removes all files but those to keep, and the folders that are empty then; links are removed, not followed."""
    with os.scandir(folder) as entries:
        for entry in list(entries):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                _clear(path, keep)
                with contextlib.suppress(OSError):  # holds a file to keep
                    os.rmdir(path)
            elif path not in keep:
                os.unlink(path)


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
