"""Patterns for a given set of module paths: `*` where all numbers are in it, else number sets.

    model.layers.0.mlp, model.layers.1.mlp, model.layers.4.mlp   ->   model.layers.{0-1,4}.mlp

Several numbers in a path may need several patterns: each stands for a product of sets.  A pattern never matches a
path of the model that is not in the set, so `*` is given up where a name would stand among the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kconvert.errors import PatternError
from kconvert.patterns import NumberSet, PathPattern

__all__ = ["cover_paths", "is_expressible", "path_shape"]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def is_expressible(path: str) -> bool:
    """Whether a module path can be written as a pattern."""
    try:
        return PathPattern.parse(path).match(path) is not None
    except PatternError:
        return False


def path_shape(path: str) -> tuple[str | None, ...]:
    """The segments of a path, None for a number."""
    return tuple(None if _NUMBER.fullmatch(part) else part for part in path.split("."))


def _numbers(path: str) -> tuple[int, ...]:
    return tuple(int(part) for part in path.split(".") if _NUMBER.fullmatch(part))


def cover_paths(members: Sequence[str], paths: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Patterns that together match these module paths and no other, each with the paths that it matches.

    Args:
        members: paths of one shape, sorted.
        paths: every module path of the model.
    """
    shape = path_shape(members[0])
    every = _write(shape, [None] * shape.count(None))
    if _matched(every, paths) == set(members) or None not in shape or not is_expressible(members[0]):
        yield every, tuple(members)
        return
    by_numbers = {_numbers(path): path for path in members}
    for box in _boxes(list(by_numbers)):
        taken = tuple(path for numbers, path in by_numbers.items() if all(map(_contains, box, numbers)))
        chosen: list[tuple[int, ...] | None] = list(box)
        for place in range(len(box)):
            wider = [*chosen[:place], None, *chosen[place + 1 :]]
            if _matched(_write(shape, wider), paths) == set(taken):
                chosen = wider
        yield _write(shape, chosen), taken


def _contains(numbers: tuple[int, ...], number: int) -> bool:
    return number in numbers


def _matched(pattern: str, paths: Sequence[str]) -> set[str]:
    try:
        parsed = PathPattern.parse(pattern)
    except PatternError:
        return set()
    return {path for path in paths if parsed.match(path) is not None}


def _boxes(points: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Tuples of numbers as products of sets: `(0, 1), (0, 2), (5, 1), (5, 2)` is `{0, 5} x {1, 2}`."""
    if not points[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in sorted(points):
        tails.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rests in tails.items():
        firsts.setdefault(tuple(_boxes(rests)), []).append(first)
    return [(tuple(numbers), *box) for boxes, numbers in firsts.items() for box in boxes]


def _write(shape: Sequence[str | None], numbers: Sequence[tuple[int, ...] | None]) -> str:
    """A pattern of this shape; None among the numbers is `*`."""
    left = iter(numbers)
    return ".".join(part if part is not None else _write_numbers(next(left)) for part in shape)


def _write_numbers(numbers: tuple[int, ...] | None) -> str:
    """A segment that matches these numbers: `*`, `7`, or `{0-3,7}`."""
    if numbers is None:
        return "*"
    if len(numbers) == 1:
        return str(numbers[0])
    return str(NumberSet.of(numbers))
