"""Creates, fills and fsyncs the files of the partial directory.

Modes come from the umask, never narrower.  Space is reserved first where the file system can do that by
itself, so that a full disk shows before the copying, and the blocks lie together.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from kconvert.rewrite.copying import write_at

__all__ = ["create", "sync_directory", "write_synced"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def create(path: Path, size_bytes: int) -> int:
    """A descriptor of the new file `path` with `size_bytes` bytes; the caller closes it."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        os.ftruncate(fd, size_bytes)
        if size_bytes:
            _reserve(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, size_bytes: int) -> None:
    """Reserves the blocks, or does nothing where the file system cannot.

    glibc would imitate it by one read and write per block.  The descriptor is write-only and the size is set
    already, so the first such read fails (EBADF) and costs nothing.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def write_synced(path: Path, data: bytes) -> None:
    """Makes the new file `path` with `data`, on the disk when this returns."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        write_at(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Fsyncs a directory; a file system that cannot do that (EINVAL) has nothing to do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
