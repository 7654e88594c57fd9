"""What a rotary embedding of q and k computes, as data: layouts find it in a stock class, kernels of every device compute it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HeadNorms", "Rotation"]


class Rotation(NamedTuple):
    """How heads are rotated.

    Attributes:
        size: elements of a head that are rotated; even.
        start: where in the head they begin.
        is_interleaved: pairs are (0, 1), (2, 3), ...; else (0, size / 2), (1, size / 2 + 1), ...
        writes_halves: pairs are written half a rotation apart, wherever they were read.
        has_half_table: cos and sin have one element for each pair, else one for each element.
        is_wide: torch computes it in float32 at least.
        keeps_dtype: the result is cast to the dtype of q and k, else it is left in the one that torch computes it in.
    """

    size: int
    start: int = 0
    is_interleaved: bool = False
    writes_halves: bool = True
    has_half_table: bool = False
    is_wide: bool = False
    keeps_dtype: bool = False


class HeadNorms(NamedTuple):
    """The RMSNorm of each head of q and k before the rotation; see `kconvert.kernels.ops.rms_norm.layout`."""

    eps: float
    offset: float
    cast_first: bool
