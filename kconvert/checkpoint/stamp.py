"""Whether a file is still the one whose header was read.

Offsets come from a header; bytes copied from a file that was replaced or rewritten meanwhile would be the
wrong weights under the right names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
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

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """The stamp of a path (links followed) or an open descriptor."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def check_stamp(stamp: FileStamp, file: Path | int, path: Path) -> None:
    """Refuse a file that has changed.

    Raises:
        CheckpointError: naming `path`.
    """
    if FileStamp.of(file) != stamp:
        raise CheckpointError(
            "has changed since its header was read", where=str(path), fix="leave the source alone, and start again"
        )
