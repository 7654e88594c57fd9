"""Where in the source a byte of a converted tensor belongs, and which parts of a tensor are exchanged.

Told from arrangements and bytes alone.  Whole parts are told by their sha256: a part is out of place where its place
holds the bytes of another part, and not its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import TypeAlias

from kconvert.checkpoint import DTYPE_BITS
from kconvert.rewrite import Extent, Gather, Place, Reader, extents_of
from kconvert.transforms import Arrangement, Piece, invert, whole

__all__ = ["exchanged_parts", "index_of", "source_element"]

_MOST_PLACES = 4096

Digests: TypeAlias = Mapping[str, str]


def source_element(made: Arrangement, element: int) -> tuple[str, int]:
    """The source of an element of `made`, and its number there, both in row-major order.

    Raises:
        ValueError: no piece of `made` has it.
    """
    for piece in made.pieces:
        found = _inside(piece, element)
        if found is not None:
            return piece.source, found
    raise ValueError(f"element {element} comes from nowhere")


def _inside(piece: Piece, element: int) -> int | None:
    """Where in its source a piece takes an element of the target from; None where it has not this one."""
    left, source = element - piece.target_start, piece.source_start
    if not piece.size or left < 0:
        return None
    for dim in piece.dims:  # a step of one is longer than all that is inside of it
        step = min(left // dim.target_stride, dim.size - 1)
        left -= step * dim.target_stride
        source += step * dim.source_stride
    return source if left == 0 else None


def index_of(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index, along each axis, of the element with this number."""
    return tuple(element // prod(shape[axis + 1 :]) % shape[axis] for axis in range(len(shape)))


def exchanged_parts(
    made: Arrangement,
    stored: Place,
    places: Mapping[str, Place],
    shapes: Mapping[str, tuple[int, ...]],
    reader: Reader,
    *,
    on_block: Callable[[], None],
) -> tuple[tuple[str, str], ...]:
    """Pairs of which the first one's place holds the second one: sources, or else places along the first axis.

    Args:
        made: of which elements of the sources the tensor has to consist.
        stored: where it is stored, with the dtype that it has.
        places: where its sources are stored.
        shapes: those of the sources.
        reader: has all of these files open.
        on_block: called after each block that was read.
    """
    read = partial(_blocks, reader, on_block)
    if len(made.sources) > 1:
        own = ((name, extents_of(whole(name, shapes[name]), stored.dtype, places)) for name in made.sources)
        here = _parts_of_sources(made, stored, shapes)
        return _exchanged(*({name: _digest(read(parts)) for name, parts in found} for found in (own, here)))
    size = made.shape[0] if len(made.shape) > 2 else 0
    place_bits = made.size * DTYPE_BITS[stored.dtype] // max(size, 1)
    if not 2 <= size <= _MOST_PLACES or place_bits % 8 or not place_bits:
        return ()
    target = Extent(stored.path, stored.offset, size * place_bits // 8)
    streams = (extents_of(made, stored.dtype, places), (target,))
    return _exchanged(*(dict(_digests_of_places(read(parts), place_bits // 8)) for parts in streams))


def _blocks(reader: Reader, on_block: Callable[[], None], parts: Iterable[Extent | Gather]) -> Iterator[memoryview]:
    for block in reader.blocks(parts):
        yield block
        on_block()


def _exchanged(expected: Digests, found: Digests) -> tuple[tuple[str, str], ...]:
    names = {digest: name for name, digest in expected.items()}
    return tuple(
        (name, names[digest]) for name, digest in found.items() if digest != expected[name] and digest in names
    )


def _parts_of_sources(
    made: Arrangement, stored: Place, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[Extent | Gather, ...]]]:
    """Where each source stands that lies in the tensor whole."""
    for name in made.sources:
        taken = Arrangement(made.shape, tuple(piece for piece in made.pieces if piece.source == name))
        back = invert({"": taken}, shapes)
        if back is not None:
            yield name, extents_of(back[name], stored.dtype, {"": stored})


def _digests_of_places(blocks: Iterable[memoryview], place_bytes: int) -> Iterator[tuple[str, str]]:
    """What stands at each place along the first axis, which has `place_bytes` bytes."""
    hasher, done, number = hashlib.sha256(), 0, 0
    for block in blocks:
        while block.nbytes:
            taken, block = block[: place_bytes - done], block[place_bytes - done :]
            hasher.update(taken)
            done += taken.nbytes
            if done == place_bytes:
                yield f"[{number}]", hasher.hexdigest()
                hasher, done, number = hashlib.sha256(), 0, number + 1


def _digest(blocks: Iterable[memoryview]) -> str:
    hasher = hashlib.sha256()
    for block in blocks:
        hasher.update(block)
    return hasher.hexdigest()
