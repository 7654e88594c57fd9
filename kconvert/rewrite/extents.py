"""From elements to bytes: the runs of files that a tensor consists of, or a gather where these would be too short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kconvert.checkpoint import DTYPE_BITS
from kconvert.rewrite.cast import Cast
from kconvert.rewrite.gather import Gather, GatherPiece
from kconvert.rewrite.job import Extent
from kconvert.transforms import Arrangement, Piece, runs_of

__all__ = ["Place", "extents_of"]

_SHORT_RUN_BYTES = 64 << 10
"""Runs shorter than this are gathered in memory: a system call for each would cost more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor's data begin, and its dtype as safetensors names it."""

    path: Path
    offset: int
    dtype: str


def extents_of(made: Arrangement, dtype: str, places: Mapping[str, Place]) -> tuple[Extent | Gather, ...]:
    """The bytes of a tensor in the order in which they are stored.

    Args:
        made: of which elements of the tensors in `places` it consists; runs of a dtype below a byte begin and end at bytes.
        dtype: what it is stored as; tensors of another dtype are converted.
        places: where each of its sources is stored.
    """
    casts = {name: Cast(places[name].dtype, dtype) if places[name].dtype != dtype else None for name in {*made.sources}}
    bits = DTYPE_BITS[dtype]
    if bits >= 8 and any(_is_scattered(piece, bits // 8) for piece in made.pieces):
        pieces = (
            GatherPiece(places[piece.source].path, places[piece.source].offset, piece, casts[piece.source])
            for piece in made.pieces
        )
        return (Gather(made.size, bits // 8, tuple(pieces)),)
    found = []
    for run in runs_of(made.pieces):
        place = places[run.source]
        start, size = (count * DTYPE_BITS[place.dtype] // 8 for count in (run.source_start, run.size))
        found.append(Extent(place.path, place.offset + start, size, casts[run.source]))
    return tuple(found)


def _is_scattered(piece: Piece, item_bytes: int) -> bool:
    """Whether a piece is many short runs."""
    return piece.run_size < piece.size and piece.run_size * item_bytes < _SHORT_RUN_BYTES
