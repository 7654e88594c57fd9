"""Creates, fills, links and fsyncs the files of the partial directory.

Modes come from the umask, never narrower.  Space is reserved first where the file system can do that by
itself, so that a full disk shows before the copying, and the blocks lie together.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path

__all__ = ["clone", "create", "exchange", "start_writing", "sync_directory", "write_at", "write_synced"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FICLONE = 0x40049409
_SYNC_FILE_RANGE_WRITE = 2
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


def clone(source_fd: int, path: Path) -> None:
    """Makes the new file `path` share all blocks of an open file; OSError where the file system cannot do that."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        fcntl.ioctl(fd, _FICLONE, source_fd)
    finally:
        os.close(fd)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however many calls that takes."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[written:], offset + written


def write_synced(path: Path, data: bytes) -> None:
    """Makes the new file `path` with `data`, on the disk when this returns."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        write_at(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Gives two paths each other's name at once; False where the system or the file system cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def start_writing(fd: int) -> None:
    """Lets the disk begin with what was written to a file, and waits for nothing; where that cannot be done, it is not."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


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
