"""Whether a file is still the one whose header was read.

Offsets come from a header; bytes copied from a file that was replaced or rewritten meanwhile would be the
wrong weights under the right names.  A hard link that was made meanwhile is no change: another conversion with
`--reuse hardlink` makes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from kconvert.errors import CheckpointError

__all__ = ["FileStamp", "check_stamp"]


@dataclass(frozen=True)
class FileStamp:
    """What tells a file from its replacement, and from itself after a write."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    num_links: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """The stamp of a path (links followed) or an open descriptor."""
        status = os.stat(file)
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink
        )

    def after_links(self, file: Path | int) -> FileStamp:
        """This stamp with the number of links that the file has now, and the time of that change."""
        now = FileStamp.of(file)
        return replace(self, changed_ns=now.changed_ns, num_links=now.num_links)


def check_stamp(stamp: FileStamp, file: Path | int, path: Path) -> None:
    """Refuse a file that has changed.

    Raises:
        CheckpointError: naming `path`.
    """
    found = FileStamp.of(file)
    has_new_link = found.num_links > stamp.num_links and found == stamp.after_links(file)
    if found != stamp and not has_new_link:
        raise CheckpointError(
            "has changed since its header was read", where=str(path), fix="leave the source alone, and start again"
        )
