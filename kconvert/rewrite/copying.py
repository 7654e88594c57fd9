"""Moves bytes from one open file to another, by the fastest way that this pair of files supports.

`copy_file_range` stays in the kernel and may share blocks; `sendfile` stays in the kernel; `preadv`/`pwrite`
works everywhere.  A way that fails, or copies nothing, is given up for that (source, target) pair and not
tried again.  Only the last way tells a damaged source from a full disk, so any other error just leads to it.

A piece that is converted goes through memory in any case, a block at a time, and so does a block of a gather.

A source position is never shared: every call carries its offset, and `sendfile`, which writes at the
target's own position, gets a descriptor that belongs to one copier alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TypeAlias

from kconvert.errors import CheckpointError
from kconvert.rewrite.cast import Cast
from kconvert.rewrite.gather import Block, fill_block
from kconvert.rewrite.job import Computed

__all__ = ["SLICE_BYTES", "BlockTask", "Choices", "Copier", "MakeTask", "OpenFile", "Piece", "write_at"]

SLICE_BYTES = 8 << 20
"""The most bytes one system call is asked for: how long a stop may have to wait."""

_BUFFER_BYTES = 1 << 20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Choices: TypeAlias = dict[tuple[int, int], int]
"""(source fd, target fd) -> number of ways given up; shared by the copiers of one rewrite."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A path and the descriptor it is open under."""

    path: Path
    fd: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One task: `size_bytes` bytes from `source_offset`, as they are or converted, to `target_offset`."""

    source: OpenFile
    source_offset: int
    target: OpenFile
    target_offset: int
    size_bytes: int
    cast: Cast | None = None


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One task: a block of a gather, made in memory and put to `target_offset`."""

    block: Block
    sources: Mapping[Path, OpenFile]
    target: OpenFile
    target_offset: int


@dataclass(frozen=True, slots=True)
class MakeTask:
    """One task: a tensor that is computed, and put to `target_offset`."""

    computed: Computed
    target: OpenFile
    target_offset: int


class Copier:
    """Copies pieces for one thread; close it (or leave its `with`) when the thread ends."""

    def __init__(self, choices: Choices, stop: Event, on_bytes: Callable[[int], None]) -> None:
        self._choices = choices
        self._stop = stop
        self._on_bytes = on_bytes
        self._own: OpenFile | None = None
        self._buffer: memoryview | None = None
        self._range: memoryview | None = None
        ways = {"copy_file_range": self._in_kernel, "sendfile": self._by_sendfile}
        self._ways = [way for name, way in ways.items() if hasattr(os, name)]

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor that `sendfile` used, if any."""
        own, self._own = self._own, None
        if own is not None:
            os.close(own.fd)

    def copy(self, piece: Piece | BlockTask | MakeTask) -> None:
        """Copies the piece, or returns early once `stop` is set.

        Raises:
            CheckpointError: the source ends early or cannot be read.
            OSError: the target cannot be written.
        """
        if isinstance(piece, BlockTask):
            self._gather(piece)
            return
        if isinstance(piece, MakeTask):
            self._make(piece)
            return
        if piece.cast is not None:
            self._convert(piece, piece.cast)
            return
        done = 0
        while done < piece.size_bytes and not self._stop.is_set():
            copied = self._copy_some(piece, done, min(SLICE_BYTES, piece.size_bytes - done))
            done += copied
            self._on_bytes(copied)

    def _copy_some(self, piece: Piece, done: int, count: int) -> int:
        """Copies 1 to `count` bytes."""
        pair = piece.source.fd, piece.target.fd
        while (given_up := self._choices.get(pair, 0)) < len(self._ways):
            copied = 0
            try:
                copied = self._ways[given_up](piece, done, count)
            except OSError as error:
                if error.errno in _DISK_FULL:
                    raise
            if copied > 0:
                return copied
            self._choices[pair] = max(given_up + 1, self._choices.get(pair, 0))
        return self._through_memory(piece, done, count)

    def _in_kernel(self, piece: Piece, done: int, count: int) -> int:
        return os.copy_file_range(
            piece.source.fd, piece.target.fd, count, piece.source_offset + done, piece.target_offset + done
        )

    def _by_sendfile(self, piece: Piece, done: int, count: int) -> int:
        fd = self._own_fd(piece.target)
        os.lseek(fd, piece.target_offset + done, os.SEEK_SET)
        return os.sendfile(fd, piece.source.fd, piece.source_offset + done, count)

    def _own_fd(self, target: OpenFile) -> int:
        if self._own is None or self._own.path != target.path:
            self.close()
            self._own = OpenFile(target.path, os.open(target.path, os.O_WRONLY | os.O_CLOEXEC))
        return self._own.fd

    def _through_memory(self, piece: Piece, done: int, count: int) -> int:
        buffer = self._block()[:count]
        copied = _read_some(piece, done, buffer)
        write_at(piece.target.fd, buffer[:copied], piece.target_offset + done)
        return copied

    def _convert(self, piece: Piece, cast: Cast) -> None:
        block = self._block()
        block = block[: cast.whole(len(block))]
        done, target_offset = 0, piece.target_offset
        while done < piece.size_bytes and not self._stop.is_set():
            data = block[: piece.size_bytes - done]
            filled = 0
            while filled < len(data):
                filled += _read_some(piece, done + filled, data[filled:])
            made = cast.convert(data)
            write_at(piece.target.fd, made, target_offset)
            done, target_offset = done + len(data), target_offset + len(made)
            self._on_bytes(len(made))

    def _gather(self, task: BlockTask) -> None:
        def read(path: Path, offset: int, size: int) -> memoryview:
            if self._range is None or len(self._range) < size:
                self._range = memoryview(bytearray(size))
            piece = Piece(task.sources[path], offset, task.target, task.target_offset, size)
            data, filled = self._range[:size], 0
            while filled < size:
                filled += _read_some(piece, filled, data[filled:])
            return data

        write_at(task.target.fd, fill_block(task.block, read), task.target_offset)
        self._on_bytes(task.block.size_bytes)

    def _make(self, task: MakeTask) -> None:
        data = task.computed.make()
        if data.nbytes != task.computed.target_bytes:
            raise CheckpointError(
                f"{task.computed.name!r} came out with {data.nbytes} bytes, not {task.computed.target_bytes}"
            )
        write_at(task.target.fd, data, task.target_offset)
        self._on_bytes(data.nbytes)

    def _block(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        return self._buffer


def _read_some(piece: Piece, done: int, buffer: memoryview) -> int:
    """Fills 1 byte or more of `buffer` from `done` bytes into the piece."""
    offset = piece.source_offset + done
    try:
        count = os.preadv(piece.source.fd, [buffer], offset)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read at byte {offset}: {error.strerror}", where=str(piece.source.path)
        ) from error
    if count == 0:
        raise _ended_early(piece, done)
    return count


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however many calls that takes."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[written:], offset + written


def _ended_early(piece: Piece, done: int) -> CheckpointError:
    offset, missing = piece.source_offset + done, piece.size_bytes - done
    size = "unknown"
    with contextlib.suppress(OSError):
        size = str(os.fstat(piece.source.fd).st_size)
    return CheckpointError(
        f"ends early: no data at byte {offset}, {missing} more bytes expected, size is now {size}",
        where=str(piece.source.path),
        fix="get the file again, and leave it alone while it is converted",
    )
