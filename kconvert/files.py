"""Files of a directory that anybody may have put together: read only where they are files, and links of a Hub cache."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["blob_folders", "check_regular", "hub_repo_dirs", "read_regular"]


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file, links followed.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most_bytes`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting: a named pipe may lie there
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(min(status.st_size, most_bytes) + 1)
    finally:
        os.close(fd)
    if len(data) > most_bytes:
        raise OSError(f"larger than the {most_bytes} bytes allowed")
    return data


def check_regular(path: Path) -> None:
    """Raises OSError unless `path` is a regular file, links followed; opens nothing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")


def hub_repo_dirs(model_dir: Path) -> tuple[Path, ...]:
    """The `models--*` folders above a directory: one for its path, one for its real path where that differs."""
    found: list[Path] = []
    for path in (Path(os.path.normpath(model_dir.absolute())), Path(os.path.realpath(model_dir))):
        for above in path.parents:
            if above.name == "snapshots" and above.parent.name.startswith("models--") and above.parent not in found:
                found.append(above.parent)
    return tuple(found)


def blob_folders(model_dir: Path) -> tuple[Path, ...]:
    """The real paths of the blobs of the Hub caches that hold a directory.

    `blobs` that are a link are none: a folder that only looks like a cache could make any place one's own with it.
    """
    return tuple(Path(os.path.realpath(repo)) / "blobs" for repo in hub_repo_dirs(model_dir))
