"""Reads the bytes that extents, gathers and computed tensors stand for, in order and a block at a time.

What cannot be read, or ends early, is a damaged source and an error that names the file and the byte.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kconvert.errors import CheckpointError
from kconvert.rewrite.gather import Block, Gather, blocks_of, fill_block
from kconvert.rewrite.job import Computed, Extent

__all__ = ["BUFFER_BYTES", "OpenFile", "Reader", "read_some"]

BUFFER_BYTES = 512 << 10
"""How much is read, and written, at a time: it stays in the cache of a core.

Larger writes make Linux look for larger pages (folios), and that may take longer than it saves.
"""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A path and the descriptor it is open under."""

    path: Path
    fd: int


class Reader:
    """Reads for one thread; `sources` holds every file that is asked for."""

    def __init__(self, sources: Mapping[Path, OpenFile]) -> None:
        self._sources = sources
        self._buffer: memoryview | None = None
        self._range: memoryview | None = None

    @property
    def buffer(self) -> memoryview:
        """`BUFFER_BYTES` bytes; `blocks` uses them too."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        return self._buffer

    def blocks(self, parts: Iterable[Extent | Gather | Computed]) -> Iterator[memoryview]:
        """The bytes of `parts` one after another, in blocks of at most 8 MiB but for what is computed.

        A block may be overwritten when the next one is asked for.

        Raises:
            CheckpointError: a file ends early or cannot be read, or a computed tensor has another size.
        """
        for part in parts:
            if isinstance(part, Gather):
                yield from map(self.gathered, blocks_of(part))
            elif isinstance(part, Computed):
                yield _made(part)
            else:
                yield from self._extent(part)

    def gathered(self, block: Block) -> memoryview:
        """The bytes of one block of a gather."""
        return fill_block(block, self._read_range)

    def _extent(self, extent: Extent) -> Iterator[memoryview]:
        source, cast = self._sources[extent.path], extent.cast
        most = BUFFER_BYTES if cast is None else cast.whole(BUFFER_BYTES)
        for start in range(0, extent.size_bytes, most):
            data = self.buffer[: min(most, extent.size_bytes - start)]
            _fill(source, extent.offset + start, data, extent.offset + extent.size_bytes)
            yield data if cast is None else cast.convert(data)

    def _read_range(self, path: Path, offset: int, size: int) -> memoryview:
        if self._range is None or len(self._range) < size:
            self._range = memoryview(bytearray(size))
        data = self._range[:size]
        _fill(self._sources[path], offset, data, offset + size)
        return data


def _made(computed: Computed) -> memoryview:
    data = computed.make()
    if data.nbytes != computed.target_bytes:
        raise CheckpointError(f"{computed.name!r} came out with {data.nbytes} bytes, not {computed.target_bytes}")
    return data


def _fill(source: OpenFile, offset: int, data: memoryview, end: int) -> None:
    filled = 0
    while filled < len(data):
        filled += read_some(source, offset + filled, data[filled:], end)


def read_some(source: OpenFile, offset: int, buffer: memoryview, end: int) -> int:
    """Fills 1 byte or more of `buffer` from byte `offset`, and gives their number; `end` is where the run ends."""
    try:
        count = os.preadv(source.fd, [buffer], offset)
    except OSError as error:
        raise CheckpointError(f"cannot be read at byte {offset}: {error.strerror}", where=str(source.path)) from error
    if count == 0:
        raise _ended_early(source, offset, end - offset)
    return count


def _ended_early(source: OpenFile, offset: int, missing: int) -> CheckpointError:
    size = "unknown"
    with contextlib.suppress(OSError):
        size = str(os.fstat(source.fd).st_size)
    return CheckpointError(
        f"ends early: no data at byte {offset}, {missing} more bytes expected, size is now {size}",
        where=str(source.path),
        fix="get the file again, and leave it alone while it is converted",
    )
