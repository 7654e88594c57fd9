"""Tensors whose elements change places: read in ranges, put in order in memory, and written as runs of the output.

Elements are moved as raw bytes of their size, so no dtype has to be known; a piece of another dtype is converted on
the way.  The output is made in blocks of at most `BLOCK_BYTES`, each of whole rows where a row fits.  What a block
takes of a source is read in ranges of that size too, so memory does not grow with the tensor: a range that would
hold mostly what is not wanted is read in smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kconvert.errors import CheckpointError
from kconvert.rewrite.cast import Cast
from kconvert.transforms import Piece

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

__all__ = ["BLOCK_BYTES", "Block", "Gather", "GatherPiece", "blocks_of", "fill_block"]

BLOCK_BYTES = 8 << 20
"""The most of an output, and of a source, that is in memory at a time for one thread."""

_SPARSE = 4
"""A range of a source is read whole where at least one element in so many is wanted."""


_TILE_BYTES = 512
"""A row of a tile of a matrix that is transposed."""

_LEAST_TURNED = 32
"""Elements in a row and in a column from which a matrix is transposed in tiles."""


@dataclass(frozen=True, slots=True)
class GatherPiece:
    """A piece of a tensor whose data begin at byte `offset` of `path`; `cast` where its dtype is not the output's."""

    path: Path
    offset: int
    piece: Piece
    cast: Cast | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """`size` elements of `item_bytes` bytes each, every one of which is in one of the pieces."""

    size: int
    item_bytes: int
    pieces: tuple[GatherPiece, ...]

    def __post_init__(self) -> None:
        for each in self.pieces:
            if each.offset < 0 or (each.piece.size and each.piece.target_end > self.size):
                raise CheckpointError(f"bad piece of {each.piece.source!r}", where=str(each.path))
        if sum(each.piece.size for each in self.pieces) != self.size:
            raise CheckpointError("the pieces of a tensor do not add up")

    @property
    def target_bytes(self) -> int:
        """How many bytes of the output it fills."""
        return self.size * self.item_bytes

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read, each once."""
        return tuple(dict.fromkeys(each.path for each in self.pieces))

    def source_bytes(self, each: GatherPiece) -> int:
        """The size of an element of a piece as it is stored."""
        return self.item_bytes if each.cast is None else each.cast.source_bytes

    def end_of(self, each: GatherPiece) -> int:
        """One past the last byte of its file that a piece needs."""
        return each.offset + (each.piece.source_end * self.source_bytes(each) if each.piece.size else 0)


@dataclass(frozen=True, slots=True)
class Block:
    """The elements from `start` to `end` of a gather."""

    gather: Gather
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the output."""
        return (self.end - self.start) * self.gather.item_bytes


def blocks_of(gather: Gather) -> Iterator[Block]:
    """The gather in blocks, in order, each of whole pieces where these fit, and else of whole rows of them.

    A cut through a piece that is transposed would take a narrow strip of every row of its source.
    """
    most = max(BLOCK_BYTES // gather.item_bytes, 1)
    start = end = 0
    for stop, strides in _groups(gather):
        if stop - start > most:
            if end > start:
                yield Block(gather, start, end)
            start = end
        if stop - start > most:
            row = max((stride for stride in strides if stride <= most), default=1)
            step = most // row * row
            while stop - start > most:
                yield Block(gather, start, start + step)
                start += step
        end = stop
    if end > start:
        yield Block(gather, start, end)


def _groups(gather: Gather) -> Iterator[tuple[int, set[int]]]:
    """Where a cut goes through no piece, and the strides of the pieces before it, from the last such place."""
    stop, strides = 0, set[int]()
    for piece in sorted(
        (each.piece for each in gather.pieces if each.piece.size), key=lambda piece: piece.target_start
    ):
        if piece.target_start >= stop and strides:
            yield stop, strides
            strides = set()
        stop = max(stop, piece.target_end)
        strides = strides | {dim.target_stride for dim in piece.dims} | {1}
    if gather.size:
        yield gather.size, strides


ReadRange: TypeAlias = Callable[[Path, int, int], memoryview]
"""(path, offset, size) to that many bytes."""


def fill_block(block: Block, read: ReadRange) -> memoryview:
    """The bytes of a block.

    Args:
        block: what to make.
        read: gives bytes of a source; what it gives may be overwritten by its next call.
    """
    import numpy as np

    gather = block.gather
    kind = "u" if gather.item_bytes in (1, 2, 4, 8) else "V"
    # zeros: what the pieces of a damaged manifest leave out must not be what was in memory
    made = np.zeros(block.end - block.start, dtype=f"{kind}{gather.item_bytes}")
    for each in gather.pieces:
        for piece in _inside(each.piece, block.start, block.end):
            for part in _ranges(piece, BLOCK_BYTES // max(gather.item_bytes, gather.source_bytes(each))):
                _copy(gather, each, part, made, block.start, read)
    return made.view("u1").data


def _copy(gather: Gather, each: GatherPiece, part: Piece, made: Array, start: int, read: ReadRange) -> None:
    import numpy as np

    item = gather.source_bytes(each)
    data = read(each.path, each.offset + part.source_start * item, (part.source_end - part.source_start) * item)
    if each.cast is not None:
        data = each.cast.convert(data)
    sizes = [dim.size for dim in part.dims]
    found = np.frombuffer(data, dtype=made.dtype)
    source = np.lib.stride_tricks.as_strided(found, sizes, [dim.source_stride * gather.item_bytes for dim in part.dims])
    place = np.lib.stride_tricks.as_strided(
        made[part.target_start - start :], sizes, [dim.target_stride * gather.item_bytes for dim in part.dims]
    )
    axes = _turned_axes(part)
    if axes is None:
        place[...] = source
        return
    source, place = (np.moveaxis(array, axes, (-2, -1)) for array in (source, place))
    for index in np.ndindex(*place.shape[:-2]):
        _turn(source[index], place[index])


def _turned_axes(part: Piece) -> tuple[int, int] | None:
    """The axes without gaps in the source and in the target, where these are two large ones."""
    across = next((number for number, dim in enumerate(part.dims) if dim.source_stride == 1), None)
    along = next((number for number, dim in enumerate(part.dims) if dim.target_stride == 1), None)
    if across is None or along is None or across == along:
        return None
    return None if min(part.dims[across].size, part.dims[along].size) < _LEAST_TURNED else (across, along)


def _turn(source: Array, place: Array) -> None:
    """`place[...] = source` of matrices, the source without gaps down its columns and the place along its rows.

    In tiles that a cache holds, each through a buffer whose rows are a little longer: rows of a tensor are often a power of
    two apart, and would push each other out of the cache.  On one core that is 7 times as fast as in one assignment.
    """
    import numpy as np

    num_rows, num_columns = place.shape
    side = _TILE_BYTES // place.itemsize
    buffer = np.empty((side, side + 8), dtype=place.dtype)
    for row in range(0, num_rows, side):
        for column in range(0, num_columns, side):
            part = source[row : row + side, column : column + side]
            tile = buffer[: part.shape[1], : part.shape[0]]
            tile[...] = part.T
            place[row : row + side, column : column + side] = tile.T


def _inside(piece: Piece, start: int, end: int) -> Iterator[Piece]:
    """The parts of a piece whose targets lie from `start` to `end`."""
    if not piece.size or piece.target_end <= start or piece.target_start >= end:
        return
    if piece.target_start >= start and piece.target_end <= end:
        yield piece
        return
    dim = piece.dims[0]
    inner = sum((each.size - 1) * each.target_stride for each in piece.dims[1:])
    first = max((start - piece.target_start - inner) // dim.target_stride, 0)
    last = min((end - 1 - piece.target_start) // dim.target_stride + 1, dim.size)
    whole_first = max(-(-(start - piece.target_start) // dim.target_stride), 0)
    whole_last = min((end - 1 - piece.target_start - inner) // dim.target_stride + 1, last)
    if whole_first >= whole_last:
        whole_first = whole_last = last
    for begin, stop in ((first, whole_first), (whole_last, last)):
        for step in range(begin, stop):
            yield from _inside(piece.steps(0, step, step + 1), start, end)
    if whole_first < whole_last:
        yield piece.steps(0, whole_first, whole_last)


def _ranges(piece: Piece, most: int) -> Iterator[Piece]:
    """The parts of a piece whose sources lie in ranges of at most `most` elements, not too sparse."""
    span = piece.source_end - piece.source_start
    if not piece.dims or (span <= most and span <= _SPARSE * piece.size):
        yield piece
        return
    number = max(range(len(piece.dims)), key=lambda place: piece.dims[place].source_stride)
    dim = piece.dims[number]
    inner = span - (dim.size - 1) * dim.source_stride
    together = 1
    if inner <= most and dim.source_stride * dim.size <= _SPARSE * piece.size:
        together = max((most - inner) // dim.source_stride + 1, 1)
    for begin in range(0, dim.size, together):
        part = piece.steps(number, begin, min(begin + together, dim.size))
        if together > 1 or not part.dims:
            yield part
        else:
            yield from _ranges(part, most)
