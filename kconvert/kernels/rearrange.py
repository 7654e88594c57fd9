"""Arrangements on tensors: a tensor out of the elements of others, as a view where it can be one.

Nothing is computed, so values are bit-identical in every dtype.  Tensors may be on any one device, meta included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import torch

from kconvert.transforms import Arrangement, Piece

__all__ = ["copy_pieces", "rearrange"]


def rearrange(made: Arrangement, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of `made.shape` that `made` describes.

    Gradients flow through it.  It shares memory with its source where it has one only and its elements lie in there in
    an order that strides can tell; else it is new.
    """
    if len(made.pieces) == 1:
        (piece,) = made.pieces
        source = tensors[piece.source]
        return _strided(source, piece, of_source=True).reshape(made.shape)
    taken = [tensors[name] for name in made.sources]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in taken))
    target = taken[0].new_empty(made.shape, dtype=dtype)
    copy_pieces(made.pieces, tensors, target)
    return target


def copy_pieces(pieces: Iterable[Piece], tensors: Mapping[str, torch.Tensor], target: torch.Tensor) -> None:
    """Write the pieces into `target`, in place; values are converted to its dtype."""
    place = target.contiguous()  # itself, in all but odd cases
    for piece in pieces:
        source = _strided(tensors[piece.source], piece, of_source=True)
        _strided(place, piece, of_source=False).copy_(source)
    if place is not target:
        target.copy_(place)


def _strided(tensor: torch.Tensor, piece: Piece, *, of_source: bool) -> torch.Tensor:
    tensor = tensor.contiguous()
    start = piece.source_start if of_source else piece.target_start
    strides = [dim.source_stride if of_source else dim.target_stride for dim in piece.dims]
    return tensor.as_strided([dim.size for dim in piece.dims], strides, tensor.storage_offset() + start)
