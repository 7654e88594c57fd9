"""Moves bytes from one open file to another: through memory, or in the kernel where that pays.

What is copied in the kernel goes through memory from where that fails, or copies nothing; then it is given up for that
(source, target) pair.  Only `preadv` and `pwrite` tell a damaged source from a full disk, so any other error just leads
to them.  What is converted, gathered, computed or digested goes through memory in any case, a block at a time.

No file position is shared: every call carries its offset.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TypeAlias

from kconvert.rewrite.durable import write_at
from kconvert.rewrite.gather import Block
from kconvert.rewrite.job import Computed, Digested, Extent
from kconvert.rewrite.reading import OpenFile, Reader, read_some
from kconvert.rewrite.ways import BLOCK_BYTES, KernelCopies, kernel_copies

__all__ = ["SLICE_BYTES", "BlockTask", "Choices", "Copier", "Piece", "Task", "WholeTask"]

SLICE_BYTES = 8 << 20
"""The most bytes one system call is asked for: how long a stop may have to wait."""

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Choices: TypeAlias = dict[tuple[Path, Path], KernelCopies]
"""(source, target) -> where the kernel copies; shared by the copiers of one rewrite."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One task: `size_bytes` bytes from `source_offset`, as they are, to `target_offset`."""

    source: OpenFile
    source_offset: int
    target: OpenFile
    target_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One task: a block of a gather, made in memory and put to `target_offset`."""

    block: Block
    target: OpenFile
    target_offset: int


@dataclass(frozen=True, slots=True)
class WholeTask:
    """One task: what is made in memory from its first byte to its last, and put to `target_offset`.

    `target` is None where the bytes stand there already, and only their digest is wanted.
    """

    made: Extent | Computed | Digested
    target: OpenFile | None
    target_offset: int


Task: TypeAlias = Piece | BlockTask | WholeTask


class Copier:
    """Does tasks for one thread."""

    def __init__(
        self,
        sources: Mapping[Path, OpenFile],
        choices: Choices,
        stop: Event,
        on_bytes: Callable[[int], None],
        digests: dict[str, str],
    ) -> None:
        self._choices = choices
        self._stop = stop
        self._on_bytes = on_bytes
        self._digests = digests
        self._reader = Reader(sources)

    def copy(self, task: Task) -> None:
        """Does the task, or returns early once `stop` is set.

        Raises:
            CheckpointError: the source ends early or cannot be read.
            OSError: the target cannot be written.
        """
        if isinstance(task, Piece):
            self._copy(task)
        elif isinstance(task, BlockTask):
            self._put((self._reader.gathered(task.block),), task.target, task.target_offset)
        elif isinstance(task.made, Digested):
            self._digest(task.made, task.target, task.target_offset)
        else:
            self._put(self._reader.blocks((task.made,)), task.target, task.target_offset)

    def _copy(self, piece: Piece) -> None:
        done = 0
        while done < piece.size_bytes and not self._stop.is_set():
            copied = self._copy_some(piece, done, min(SLICE_BYTES, piece.size_bytes - done))
            done += copied
            self._on_bytes(copied)

    def _copy_some(self, piece: Piece, done: int, count: int) -> int:
        """Copies 1 to `count` bytes."""
        if self._is_for_kernel(piece, done):
            copied = 0
            try:
                copied = os.copy_file_range(
                    piece.source.fd, piece.target.fd, count, piece.source_offset + done, piece.target_offset + done
                )
            except OSError as error:
                if error.errno in _DISK_FULL:
                    raise
            if copied > 0:
                return copied
            self._choices[piece.source.path, piece.target.path] = KernelCopies.NEVER
        return self._through_memory(piece, done, count)

    def _is_for_kernel(self, piece: Piece, done: int) -> bool:
        pair = piece.source.path, piece.target.path
        choice = self._choices.get(pair)
        if choice is None:
            can = hasattr(os, "copy_file_range")
            choice = kernel_copies(piece.source.fd, piece.target.fd) if can else KernelCopies.NEVER
            choice = self._choices.setdefault(pair, choice)
        if choice is not KernelCopies.ALIGNED:
            return choice is KernelCopies.ALWAYS
        return (piece.source_offset + done) % BLOCK_BYTES == (piece.target_offset + done) % BLOCK_BYTES == 0

    def _through_memory(self, piece: Piece, done: int, count: int) -> int:
        buffer, offset = self._reader.buffer, piece.target_offset + done
        # The first one ends with a page of the target, so that the others fill theirs.  Not more than that: where the
        # offsets have larger powers of two in them, Linux takes larger pages (folios), and may be long in finding these.
        block = buffer[: min(count, len(buffer) - offset % min(BLOCK_BYTES, len(buffer)))]
        copied = read_some(piece.source, piece.source_offset + done, block, piece.source_offset + piece.size_bytes)
        write_at(piece.target.fd, block[:copied], offset)
        return copied

    def _digest(self, made: Digested, target: OpenFile | None, offset: int) -> None:
        hasher = hashlib.sha256()

        def hashed() -> Iterable[memoryview]:
            for block in self._reader.blocks(made.parts):
                hasher.update(block)
                yield block

        if self._put(hashed(), target, offset):
            self._digests[made.name] = hasher.hexdigest()

    def _put(self, blocks: Iterable[memoryview], target: OpenFile | None, offset: int) -> bool:
        """Writes blocks one after another, and says whether that were all of them."""
        for block in blocks:
            if self._stop.is_set():
                return False
            if target is not None:
                write_at(target.fd, block, offset)
                self._on_bytes(block.nbytes)
            offset += block.nbytes
        return True
