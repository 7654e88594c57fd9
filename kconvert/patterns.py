"""Dotted path patterns: which modules a patch entry takes.

A pattern is matched segment by segment against a whole module path.  A segment is literal
(`mlp`), `*` (exactly one segment) or a number set (`{0-3,7}`).  Dots are literal, nothing is a
substring match, and there is no wildcard for several segments.

    PathPattern.parse("model.layers.{0-3,7}.mlp").match("model.layers.7.mlp")   # ("7",)
    PathPattern.parse("model.layers.*.mlp").match("model.layers.7.mlp.act")     # None
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kconvert.errors import PatternError

__all__ = ["NumberSet", "PathPattern", "braced"]

_LITERAL = re.compile(r"[A-Za-z0-9_\-]+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class NumberSet:
    """A set of numbers as inclusive ranges, sorted and disjoint: `{0-3,7}` is `((0, 3), (7, 7))`."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numbers: Iterable[int]) -> NumberSet:
        """The set of these numbers."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(set(numbers)):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return cls(tuple(ranges))

    def __str__(self) -> str:
        """In the notation of patterns: `{0-3,7}`."""
        listed = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ranges)
        return f"{{{listed}}}"

    @property
    def size(self) -> int:
        """How many numbers are in the set."""
        return sum(high - low + 1 for low, high in self.ranges)

    def __contains__(self, segment: str) -> bool:
        if _NUMBER.fullmatch(segment) is None:
            return False
        return any(low <= int(segment) <= high for low, high in self.ranges)


_Segment = str | NumberSet | None  # None stands for `*`


def _parse_number_set(text: str, pattern: str) -> NumberSet:
    ranges = []
    for item in text[1:-1].split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None:
            raise PatternError(f"path pattern {pattern!r}: {item!r} in {text!r} is no range", fix="write {0-3,7}")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise PatternError(f"path pattern {pattern!r}: range {item!r} runs backwards", fix=f"write {high}-{low}")
        ranges.append((low, high))
    ranges.sort()
    merged = [ranges[0]]
    for low, high in ranges[1:]:
        if low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return NumberSet(tuple(merged))


def _parse_segment(text: str, pattern: str) -> _Segment:
    if text == "*":
        return None
    if text.startswith("{") and text.endswith("}"):
        return _parse_number_set(text, pattern)
    if _LITERAL.fullmatch(text) is None:
        raise PatternError(
            f"path pattern {pattern!r}: segment {text!r} is not literal, '*' or a number set",
            fix="a segment is letters, digits and _, or '*' for exactly one segment, or {0-3,7}",
        )
    return text


@dataclass(frozen=True)
class PathPattern:
    """A parsed pattern.  Two patterns that match the same paths by the same segments are equal."""

    text: str = field(compare=False)
    segments: tuple[_Segment, ...]

    @classmethod
    def parse(cls, text: str) -> PathPattern:
        """Parse a dotted pattern.

        Raises:
            PatternError: an empty segment, a wildcard mixed into a literal, or a bad number set.
        """
        if not text or text != text.strip():
            what = f"path pattern {text!r} is empty or has blanks around it"
            raise PatternError(what, fix="write a dotted module path")
        return cls(text, tuple(_parse_segment(part, text) for part in text.split(".")))

    def match(self, path: str) -> tuple[str, ...] | None:
        """The segments that `*` and number sets took in `path`, or None if the whole path does not match."""
        parts = path.split(".")
        if len(parts) != len(self.segments) or "" in parts:  # the root module's path is ""
            return None
        taken = []
        for segment, part in zip(self.segments, parts, strict=True):
            if segment is None:
                taken.append(part)
            elif isinstance(segment, NumberSet):
                if part not in segment:
                    return None
                taken.append(part)
            elif segment != part:
                return None
        return tuple(taken)

    @property
    def parent(self) -> tuple[_Segment, ...]:
        """All segments but the last."""
        return self.segments[:-1]

    @property
    def last(self) -> str | None:
        """The last segment where it is literal, else None."""
        segment = self.segments[-1]
        return segment if isinstance(segment, str) else None


def braced(paths: Iterable[str]) -> list[str]:
    """Module paths with their numbers as sets, `model.layers.{0-3,7}.mlp`.

    Paths are joined where they differ in the first number only.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()]
        if not places:
            groups.setdefault(tuple(parts), [])
            continue
        place = places[0]
        key = (*parts[:place], "", *parts[place + 1 :])
        groups.setdefault(key, []).append(int(parts[place]))
    return [".".join(part or str(NumberSet.of(numbers)) for part in key) for key, numbers in groups.items()]
