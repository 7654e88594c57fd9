"""The journal of a rewrite: what it is about, which files are finished, and that the result was about to get its name.

JSON lines, each on the disk before the next thing happens.  A line that a kill cut short is not there, nor is
what stands behind it.  A journal that cannot be read says that nothing is finished.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kconvert.rewrite.durable import write_at

__all__ = ["JOURNAL_NAME", "Finished", "Journal", "Past", "Published", "directory_identity", "read_journal"]

JOURNAL_NAME = "journal.jsonl"
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True)
class Finished:
    """A file that is whole and on the disk: what tells it from one that was touched since, and its tensors' digests.

    `changed_ns` is None for a link to a source: a link more or less would change it.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int | None
    inode: int
    digests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Path | int, digests: Mapping[str, str] | None = None, *, is_linked: bool = False) -> Finished:
        """That of a path, or of an open descriptor."""
        status = os.stat(file)
        changed_ns = None if is_linked else status.st_ctime_ns
        return cls(status.st_size, status.st_mtime_ns, changed_ns, status.st_ino, digests or {})

    def is_still(self, path: Path) -> bool:
        """Whether `path` is that file, untouched."""
        try:
            if path.is_symlink() or not path.is_file():
                return False
            return Finished.of(path, self.digests, is_linked=self.changed_ns is None) == self
        except OSError:
            return False


@dataclass(frozen=True)
class Published:
    """The directory that was about to get the output's name: its device and inode, and the last file written into it."""

    device: int
    inode: int
    last: str
    state: Finished

    def is_still(self, directory: Path) -> bool:
        """Whether `directory` is that one."""
        identity = directory_identity(directory)
        return identity == (self.device, self.inode) and self.state.is_still(directory / self.last)


def directory_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at `path`, which a rename keeps; None where nothing is."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class Past:
    """What a journal says.

    Attributes:
        identity: what the run was about; None where it never came to write that.
        finished: by name.
        published: what was about to get the output's name, if it came to that.
        num_bytes: how long the whole lines are.
    """

    identity: Mapping[str, str] | None = None
    finished: Mapping[str, Finished] = field(default_factory=dict)
    published: Published | None = None
    num_bytes: int = 0


def read_journal(path: Path) -> Past:
    """What the journal at `path` says; nothing where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return Past()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Past()
        with open(fd, "rb", closefd=False) as file:
            lines = file.read(_LIMIT_BYTES).splitlines(keepends=True)
    except OSError:
        return Past()
    finally:
        os.close(fd)
    past = Past()
    for line in lines:
        try:
            past = _with_line(past, line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            break
    return past


def _with_line(past: Past, line: bytes) -> Past:
    """What the journal says with one line more; an error of many kinds where it is none."""
    if not line.endswith(b"\n"):
        raise ValueError("cut short")
    value: dict[str, Any] = json.loads(line)
    past = replace(past, num_bytes=past.num_bytes + len(line))
    if past.identity is None:
        return replace(past, identity={label: _text(text) for label, text in value["identity"].items()})
    if "published" in value:
        fields = value["published"]
        state = _finished(fields.pop("state"))
        return replace(past, published=Published(**fields, state=state))
    return replace(past, finished={**past.finished, _text(value.pop("file")): _finished(value)})


def _finished(value: dict[str, Any]) -> Finished:
    digests = {_text(name): _text(digest) for name, digest in value.pop("digests").items()}
    return Finished(**value, digests=digests)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


class Journal:
    """An open journal that lines are added to."""

    def __init__(self, path: Path, past: Past) -> None:
        """Goes on behind the whole lines of `past`, which `path` holds; behind none it starts afresh."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._end = past.num_bytes
        try:
            os.ftruncate(self._fd, self._end)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def begin(self, identity: Mapping[str, str]) -> None:
        """Notes what the run is about; the first line."""
        self._add({"identity": dict(identity)})

    def finished(self, name: str, state: Finished) -> None:
        """Notes a file that is whole and on the disk."""
        self._add({"file": name, **asdict(state)})

    def publishing(self, directory: Path, last: str) -> None:
        """Notes that `directory` is whole and about to be renamed; `last` is the file that was written last."""
        status = os.stat(directory)
        published = Published(status.st_dev, status.st_ino, last, Finished.of(directory / last))
        self._add({"published": asdict(published)})

    def _add(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        write_at(self._fd, line, self._end)
        os.fsync(self._fd)
        self._end += len(line)
