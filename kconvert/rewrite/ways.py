"""Whether two files are better copied by the kernel, or through memory.

`copy_file_range` pays where the file system shares blocks instead of copying them, which needs offsets at the borders of
blocks, and where a server can copy for itself.  Anywhere else it moves single pages, two halves for each where the offsets
do not match; a buffer that stays in the processor's cache, written in whole pages, is faster.
"""

from __future__ import annotations

import ctypes
from enum import Enum

__all__ = ["BLOCK_BYTES", "KernelCopies", "kernel_copies"]

BLOCK_BYTES = 4096
"""What file systems share at least."""

# The type that `fstatfs` gives: linux/magic.h, and for ZFS and bcachefs their own sources.
_SHARING = frozenset({0x9123683E, 0x58465342, 0xCA451A4E, 0x2FC12FC1, 0x7461636F})  # btrfs, XFS, bcachefs, ZFS, OCFS2
_REMOTE = frozenset({0x6969, 0xFF534D42, 0xFE534D42, 0x00C36400, 0x65735546})  # NFS, CIFS, SMB 2, Ceph, FUSE


class KernelCopies(Enum):
    """Where the kernel should copy: nowhere, where both offsets are at borders of blocks, or everywhere."""

    NEVER = "never"
    ALIGNED = "aligned"
    ALWAYS = "always"


def kernel_copies(source_fd: int, target_fd: int) -> KernelCopies:
    """What pays between two open files."""
    source, target = _type_of(source_fd), _type_of(target_fd)
    if source != target:
        return KernelCopies.NEVER
    if target in _REMOTE:
        return KernelCopies.ALWAYS
    return KernelCopies.ALIGNED if target in _SHARING else KernelCopies.NEVER


def _type_of(fd: int) -> int | None:
    """The type of a file system; None where the system does not tell."""
    libc = ctypes.CDLL(None)
    status = ctypes.create_string_buffer(256)  # a `struct statfs` has 120 bytes at most, and begins with the type
    if not hasattr(libc, "fstatfs") or libc.fstatfs(fd, status) != 0:
        return None
    return ctypes.c_long.from_buffer(status).value & 0xFFFF_FFFF
