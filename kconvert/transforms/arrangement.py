"""Arrangements: of which elements of which tensors a tensor consists, and where each stands.

Joining, splitting, stacking, transposing and interleaving move elements and change none.  So a tensor that is made by
any chain of these is a set of strided pieces of its sources, whatever the dtype, and that says everything: how to copy
the bytes, how to undo it, and what another op makes of the result.

    gate, up = whole("gate", (12, 8)), whole("up", (12, 8))
    concatenate([gate, up], axis=0)     # two pieces: 96 elements from gate 0 to 0, 96 from up 0 to 96

Indices count elements in row-major order.  Reshaping keeps that order, so it costs nothing.  Ops take and give
`Arrangement`s; shapes that an op cannot take are a `ShapeError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge
from itertools import accumulate, chain, pairwise, product
from math import gcd, prod
from typing import NamedTuple

_MAX_UNITS = 2**26

__all__ = [
    "Arrangement",
    "Dim",
    "Piece",
    "Run",
    "ShapeError",
    "chunk",
    "compose",
    "concatenate",
    "cuts_bytes",
    "has_overlap",
    "interleave",
    "invert",
    "narrow",
    "permute",
    "reshape",
    "runs_of",
    "split",
    "stack",
    "transpose",
    "whole",
]


class ShapeError(ValueError):
    """Sources whose shapes the op cannot take."""


class Dim(NamedTuple):
    """`size` steps, each of so many elements in the source and in the target."""

    size: int
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of the tensor `source`: index i, j, ... in `dims` stands at `start + i * stride + j * stride + ...`.

    `dims` go from the largest target stride to the smallest; adjacent ones that are one run in both tensors are one.
    """

    source: str
    source_start: int
    target_start: int
    dims: tuple[Dim, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(dim.size for dim in self.dims)

    @property
    def run_size(self) -> int:
        """How many of its elements are adjacent in the source and in the target, at a time."""
        if self.dims and self.dims[-1][1:] == (1, 1):
            return self.dims[-1].size
        return min(self.size, 1)

    @property
    def source_end(self) -> int:
        """One past the last element in the source."""
        return self.source_start + sum((dim.size - 1) * dim.source_stride for dim in self.dims) + 1

    @property
    def target_end(self) -> int:
        """One past the last element in the target."""
        return self.target_start + sum((dim.size - 1) * dim.target_stride for dim in self.dims) + 1

    def steps(self, number: int, begin: int, end: int) -> Piece:
        """The piece with steps `begin` to `end` of dim `number` only."""
        dim = self.dims[number]
        kept = (Dim(end - begin, *dim[1:]),) if end - begin > 1 else ()
        return replace(
            self,
            source_start=self.source_start + begin * dim.source_stride,
            target_start=self.target_start + begin * dim.target_stride,
            dims=(*self.dims[:number], *kept, *self.dims[number + 1 :]),
        )

    def numbers(self) -> tuple[int, ...]:
        """As plain numbers: both starts, then size and both strides of each dim."""
        return (self.source_start, self.target_start, *chain.from_iterable(self.dims))

    @classmethod
    def from_numbers(cls, source: str, numbers: Sequence[int]) -> Piece:
        """The inverse of `numbers`.

        Raises:
            ValueError: numbers that are no piece, or no normal one.
        """
        if len(numbers) < 2 or len(numbers) % 3 != 2 or min(numbers) < 0:
            raise ValueError(f"{list(numbers)} is no piece")
        rest = numbers[2:]
        dims = tuple(Dim(*rest[place : place + 3]) for place in range(0, len(rest), 3))
        is_empty = dims == (_NOTHING,)
        if not is_empty and any(dim.size < 2 for dim in dims):
            raise ValueError(f"{list(numbers)} has a dim of one place or none")
        for outer, inner in pairwise(dims):
            if outer.target_stride <= inner.target_stride or _is_one_run(outer, inner):
                raise ValueError(f"{list(numbers)} is no piece in normal form")
        return cls(source, numbers[0], numbers[1], dims)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A tensor of `shape`, every element of which comes from one of the `pieces`."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, in the order of their first elements."""
        if len(self.pieces) == 1:
            return (self.pieces[0].source,)
        ordered = sorted(self.pieces, key=lambda piece: piece.target_start)
        return tuple(dict.fromkeys(piece.source for piece in ordered))

    def is_whole(self, source_shape: tuple[int, ...]) -> bool:
        """Whether it is one source of that shape, unchanged."""
        if self.shape != source_shape or len(self.pieces) != 1:
            return False
        (piece,) = self.pieces
        return piece.source_start == piece.target_start == 0 and piece.dims == _one_run(self.size)


_NOTHING = Dim(0, 0, 0)
"""The one dim of a piece without elements."""


class Run(NamedTuple):
    """Adjacent elements of one source that are adjacent in the target."""

    target_start: int
    source_start: int
    size: int
    source: str


def _is_one_run(outer: Dim, inner: Dim) -> bool:
    """Whether two dims are one in both tensors."""
    return outer[1:] == (inner.size * inner.source_stride, inner.size * inner.target_stride)


def _normal(piece: Piece) -> Piece:
    dims: list[Dim] = []
    for dim in sorted(piece.dims, key=lambda dim: -dim.target_stride):
        if dim.size == 0:
            return replace(piece, dims=(_NOTHING,))
        if dim.size == 1:
            continue
        if dims and _is_one_run(dims[-1], dim):
            dim = Dim(dims.pop().size * dim.size, *dim[1:])
        dims.append(dim)
    return Piece(piece.source, piece.source_start, piece.target_start, tuple(dims))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _axis(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"no axis {axis} in shape {list(shape)}")
    return axis % len(shape)


def whole(source: str, shape: tuple[int, ...]) -> Arrangement:
    """The tensor `source` as it is."""
    return Arrangement(shape, (Piece(source, 0, 0, _one_run(prod(shape))),))


@lru_cache(maxsize=1024)  # most tensors of a model are as large as many others, and what is shared takes no memory
def _one_run(size: int) -> tuple[Dim, ...]:
    """The dims, in normal form, of `size` elements that are adjacent in source and target."""
    if size == 1:
        return ()
    return (Dim(size, 1, 1) if size else _NOTHING,)


def _factor(piece: Piece, block: int) -> Iterator[Piece]:
    """The piece in parts of which every dim moves by whole blocks of the target, or stays inside of one."""
    inside = []
    for number, dim in enumerate(piece.dims):
        if dim.target_stride % block == 0:
            continue
        per_block = block // dim.target_stride if block % dim.target_stride == 0 else 0
        if per_block and dim.size > per_block and dim.size % per_block == 0 and piece.target_start % block == 0:
            pair = (
                Dim(dim.size // per_block, dim.source_stride * per_block, block),
                Dim(per_block, *dim[1:]),
            )
            yield from _factor(replace(piece, dims=(*piece.dims[:number], *pair, *piece.dims[number + 1 :])), block)
            return
        inside.append((number, dim))
    first = piece.target_start % block
    if first + sum((dim.size - 1) * dim.target_stride for _, dim in inside) < block:
        yield piece
        return
    number, dim = max(inside, key=lambda item: (item[1].size - 1) * item[1].target_stride)
    per_block = max(block // dim.target_stride, 1)
    at = -(-(block - first) // dim.target_stride) if first else dim.size // per_block * per_block
    at = min(max(at, 1), dim.size - 1)
    for begin, end in ((0, at), (at, dim.size)):
        yield from _factor(piece.steps(number, begin, end), block)


def _place(made: Arrangement, strides: Sequence[int], start: int = 0) -> Iterator[Piece]:
    """The pieces in a target in which axis number i of `made` moves by `strides[i]`, beginning at `start`."""
    if not made.size:
        yield from (_normal(piece) for piece in made.pieces)
        return
    axes = [axis for axis, size in enumerate(made.shape) if size != 1]
    own = _strides(made.shape)
    pieces: Iterable[Piece] = made.pieces
    for axis in axes:
        pieces = [part for piece in pieces for part in _factor(piece, own[axis])]

    def moved(index: int, *, is_stride: bool) -> int:
        """Where the flat `index` comes to stand; the stride of a dim belongs to a single axis."""
        if is_stride:
            axis = next(axis for axis in axes if index >= own[axis])
            return index // own[axis] * strides[axis]
        total = 0
        for axis in axes:
            place, index = divmod(index, own[axis])
            total += place * strides[axis]
        return total

    for piece in pieces:
        if not piece.size:  # of a source that has no elements, beside others that have
            yield piece
            continue
        dims = tuple(Dim(*dim[:2], moved(dim.target_stride, is_stride=True)) for dim in piece.dims)
        yield _normal(replace(piece, target_start=start + moved(piece.target_start, is_stride=False), dims=dims))


def _shifted(made: Arrangement, start: int) -> Iterator[Piece]:
    """The pieces in a target in which all of `made` stands as it is, from the flat index `start`."""
    for piece in made.pieces:
        if start and piece.size:
            piece = Piece(piece.source, piece.source_start, piece.target_start + start, piece.dims)
        yield piece


def concatenate(parts: Sequence[Arrangement], axis: int = 0) -> Arrangement:
    """The parts one after another along `axis`."""
    shapes = [part.shape for part in parts]
    if not shapes or any(not -len(shape) <= axis < len(shape) for shape in shapes):
        raise ShapeError(f"no axis {axis} in shapes {list(map(list, shapes))}")
    axis = _axis(shapes[0], axis)
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) != 1:
        raise ShapeError(f"shapes {list(map(list, shapes))} differ outside axis {axis}")
    sizes = [shape[axis] for shape in shapes]
    shape = (*shapes[0][:axis], sum(sizes), *shapes[0][axis + 1 :])
    if prod(shape[:axis]) == 1:  # each part is one run of the target
        ends = accumulate(part.size for part in parts)
        moved = (piece for part, end in zip(parts, ends, strict=True) for piece in _shifted(part, end - part.size))
        return Arrangement(shape, tuple(moved))
    strides = _strides(shape)
    starts = accumulate(sizes, initial=0)
    pieces = (
        piece
        for part, start in zip(parts, starts, strict=False)
        for piece in _place(part, strides, start * strides[axis])
    )
    return Arrangement(shape, tuple(pieces))


def stack(parts: Sequence[Arrangement], axis: int = 0) -> Arrangement:
    """Parts of one shape along a new axis, at `axis` of the result."""
    shapes = {part.shape for part in parts}
    if len(shapes) != 1:
        raise ShapeError(f"shapes {sorted(map(list, shapes))} cannot be stacked")
    inner = shapes.pop()
    axis = _axis((*inner, 1), axis)
    return concatenate([reshape(part, (*inner[:axis], 1, *inner[axis:])) for part in parts], axis)


def narrow(made: Arrangement, axis: int, start: int, size: int) -> Arrangement:
    """`size` places along `axis`, from `start`."""
    axis = _axis(made.shape, axis)
    if start < 0 or size < 0 or start + size > made.shape[axis]:
        raise ShapeError(f"no places {start} to {start + size} along axis {axis} of shape {list(made.shape)}")
    shape = (*made.shape[:axis], size, *made.shape[axis + 1 :])
    if not prod(shape):
        return Arrangement(shape, tuple(_normal(replace(piece, dims=(_NOTHING,))) for piece in made.pieces))
    # with the axis in front, the places are one run of the target
    order = (axis, *(other for other in range(len(shape)) if other != axis))
    front = permute(made, order)
    stride = _strides(front.shape)[0]
    kept = []
    for piece in front.pieces:
        for part in _cut(piece, start * stride):
            if part.target_start < start * stride:
                continue
            for end in _cut(part, (start + size) * stride):
                if end.target_start < (start + size) * stride:
                    kept.append(_normal(replace(end, target_start=end.target_start - start * stride)))
    back = tuple(order.index(place) for place in range(len(shape)))
    return permute(Arrangement((size, *front.shape[1:]), tuple(kept)), back)


def _cut(piece: Piece, at: int) -> Iterator[Piece]:
    """The piece in parts that lie wholly before, or wholly from, the flat target index `at`."""
    if piece.target_end <= at or piece.target_start >= at:
        yield piece
        return
    dim, *rest = piece.dims
    whole_steps = -(-(at - piece.target_start) // dim.target_stride)
    inner = sum((each.size - 1) * each.target_stride for each in rest)
    clean = max((at - piece.target_start - inner - 1) // dim.target_stride + 1, 0)  # steps that end before `at`
    bounds = sorted({0, min(clean, dim.size), min(whole_steps, dim.size), dim.size})
    for begin, end in pairwise(bounds):
        part = piece.steps(0, begin, end)
        if part.target_end <= at or part.target_start >= at or end - begin == 1:
            yield from _cut(part, at)
        else:
            for step in range(begin, end):
                yield from _cut(piece.steps(0, step, step + 1), at)


def split(made: Arrangement, sizes: Sequence[int], axis: int = 0) -> list[Arrangement]:
    """Parts with these sizes along `axis`, which they fill."""
    axis = _axis(made.shape, axis)
    if sum(sizes) != made.shape[axis]:
        raise ShapeError(f"sizes {list(sizes)} do not add up to axis {axis} of shape {list(made.shape)}")
    starts = accumulate(sizes, initial=0)
    return [narrow(made, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def chunk(made: Arrangement, count: int, axis: int = 0) -> list[Arrangement]:
    """`count` parts along `axis`, equal but for a smaller last one, as `torch.chunk` makes them."""
    axis = _axis(made.shape, axis)
    places = made.shape[axis]
    size = -(-places // count)
    if (count - 1) * size >= places:
        raise ShapeError(f"axis {axis} of shape {list(made.shape)} does not make {count} parts")
    return split(made, [size] * (count - 1) + [places - (count - 1) * size], axis)


def permute(made: Arrangement, order: Sequence[int]) -> Arrangement:
    """The axes in another order, as `numpy.transpose` counts them."""
    if sorted(order) != list(range(len(made.shape))):
        raise ShapeError(f"{list(order)} is no order of the axes of shape {list(made.shape)}")
    shape = tuple(made.shape[axis] for axis in order)
    after = _strides(shape)
    strides = [after[order.index(axis)] for axis in range(len(shape))]
    return Arrangement(shape, tuple(_place(made, strides)))


def transpose(made: Arrangement, one: int, two: int) -> Arrangement:
    """Two axes exchanged."""
    order = list(range(len(made.shape)))
    one, two = _axis(made.shape, one), _axis(made.shape, two)
    order[one], order[two] = order[two], order[one]
    return permute(made, order)


def reshape(made: Arrangement, shape: tuple[int, ...]) -> Arrangement:
    """The same elements in the same order under another shape."""
    if prod(shape) != made.size:
        raise ShapeError(f"shape {list(made.shape)} cannot become {list(shape)}")
    return Arrangement(shape, made.pieces)


def interleave(made: Arrangement, groups: int, axis: int = 0) -> Arrangement:
    """Places of an axis dealt out to `groups` in turn: a0 b0 a1 b1 becomes a0 a1 b0 b1 with two of them.

    With the number of places in a group instead, it is undone.
    """
    axis = _axis(made.shape, axis)
    size = made.shape[axis]
    if groups < 1 or size % groups:
        raise ShapeError(f"axis {axis} of shape {list(made.shape)} has no {groups} equal groups")
    apart = reshape(made, (*made.shape[:axis], size // groups, groups, *made.shape[axis + 1 :]))
    return reshape(transpose(apart, axis, axis + 1), made.shape)


def invert(made: Mapping[str, Arrangement], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Arrangement] | None:
    """The sources out of the targets, or None where an element of a source is in none of them, or in several.

    Args:
        made: target name to what it consists of.
        shapes: the shape of every source.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for target, arrangement in made.items():
        for piece in arrangement.pieces:
            dims = tuple(Dim(dim.size, dim.target_stride, dim.source_stride) for dim in piece.dims)
            pieces[piece.source].append(_normal(Piece(target, piece.target_start, piece.source_start, dims)))
    for source, found in pieces.items():
        if sum(piece.size for piece in found) != prod(shapes[source]):
            return None
    return {source: Arrangement(shapes[source], tuple(found)) for source, found in pieces.items()}


def compose(made: Arrangement, parts: Mapping[str, Arrangement]) -> Arrangement:
    """What `made` consists of, told by what its sources consist of.

    Args:
        made: a tensor out of the `parts`.
        parts: each source of `made`, out of other tensors; of the shape that `made` takes it for.
    """
    pieces: list[Piece] = []
    for piece in made.pieces:
        part = parts[piece.source]
        if len(part.pieces) == 1 and _is_all_of(part.pieces[0], part.size):
            start = part.pieces[0].source_start
            pieces.append(replace(piece, source=part.pieces[0].source, source_start=start + piece.source_start))
        elif piece.size == part.size and _is_all_of(piece, part.size):
            pieces += (replace(each, target_start=each.target_start + piece.target_start) for each in part.pieces)
        elif piece.size:
            pieces += _taken(piece, part)
    if not pieces:  # no elements at all: the sources are still named
        pieces = [replace(each, source=part.source) for each in made.pieces for part in parts[each.source].pieces]
    return Arrangement(made.shape, tuple(pieces))


def _is_all_of(piece: Piece, size: int) -> bool:
    """Whether a piece is one run of `size` elements."""
    return piece.size == size and piece.run_size == size


def _taken(piece: Piece, part: Arrangement) -> Iterator[Piece]:
    """The elements of `part` that a piece takes, where the piece puts them."""
    dims = sorted(piece.dims, key=lambda dim: -dim.source_stride)
    span = piece.source_end - piece.source_start
    flat = narrow(reshape(part, (part.size,)), 0, piece.source_start, span)
    yield from _place(_strided(flat, dims), [dim.target_stride for dim in dims], piece.target_start)


def _strided(made: Arrangement, dims: Sequence[Dim]) -> Arrangement:
    """The last axis of `made` as one axis for each of `dims`, which step through it by their source strides.

    The axis ends with the last element that they reach.
    """
    *outer, span = made.shape
    if not dims:
        return reshape(made, tuple(outer))
    (size, stride, _), *rest = dims
    inner = span - (size - 1) * stride
    if inner > stride:  # steps that lie between each other's elements
        steps = [narrow(made, -1, step * stride, inner) for step in range(size)]
        apart = stack(steps, len(outer))
    elif inner == stride:
        apart = reshape(made, (*outer, size, stride))
    else:
        whole_steps = reshape(narrow(made, -1, 0, (size - 1) * stride), (*outer, size - 1, stride))
        last = reshape(narrow(made, -1, (size - 1) * stride, inner), (*outer, 1, inner))
        apart = concatenate([narrow(whole_steps, -1, 0, inner), last], len(outer))
    return _strided(apart, rest)


def has_overlap(pieces: Iterable[Piece]) -> bool:
    """Whether two elements are put to one place of the target.

    Told exactly where pieces lie apart, and else by marking places, in units of the longest runs that all pieces share;
    of more than 2**26 such units only the pieces' own steps are looked at.
    """
    ordered = sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.target_start)
    if any(_meets_itself(piece) for piece in ordered):
        return True
    if all(one.target_end <= two.target_start for one, two in pairwise(ordered)):
        return False
    unit = gcd(
        *(piece.target_start for piece in ordered),
        *(piece.run_size for piece in ordered),
        *(dim.target_stride for piece in ordered for dim in piece.dims if dim[1:] != (1, 1)),
    )
    num_units = max(piece.target_end for piece in ordered) // unit + 1
    return num_units <= _MAX_UNITS and _meet(ordered, unit, num_units)


def _meets_itself(piece: Piece) -> bool:
    """Whether a step of a dim is shorter than what the dims inside of it take."""
    inner = 1
    for dim in reversed(piece.dims):
        if dim.target_stride < inner:
            return True
        inner += (dim.size - 1) * dim.target_stride
    return False


def _meet(pieces: Iterable[Piece], unit: int, num_units: int) -> bool:
    import numpy as np

    taken = np.zeros(num_units, dtype=bool)
    for piece in pieces:
        # a run is one place per unit; every other dim moves by whole units
        dims = [
            (dim.size // unit, 1) if dim[1:] == (1, 1) else (dim.size, dim.target_stride // unit) for dim in piece.dims
        ]
        places = np.lib.stride_tricks.as_strided(
            taken[piece.target_start // unit :], [size for size, _ in dims], [stride for _, stride in dims]
        )
        if places.any():
            return True
        places[...] = True
    return False


def runs_of(pieces: Iterable[Piece]) -> Iterator[Run]:
    """The pieces as runs, in the order of the target."""
    runs = [*map(_runs, pieces)]
    return runs[0] if len(runs) == 1 else merge(*runs)


def cuts_bytes(pieces: Iterable[Piece], bits: int) -> bool:
    """Whether a run of elements of so many bits begins or ends inside of a byte, in the source or in the target."""
    return bits % 8 != 0 and any(place * bits % 8 for run in runs_of(pieces) for place in run[:3])


def _runs(piece: Piece) -> Iterator[Run]:
    if piece.size == 0:
        return
    size = piece.run_size
    if size == piece.size:
        yield Run(piece.target_start, piece.source_start, size, piece.source)
        return
    dims = piece.dims[:-1] if size > 1 else piece.dims
    for places in product(*(range(dim.size) for dim in dims)):
        source = sum(place * dim.source_stride for place, dim in zip(places, dims, strict=True))
        target = sum(place * dim.target_stride for place, dim in zip(places, dims, strict=True))
        yield Run(piece.target_start + target, piece.source_start + source, size, piece.source)
