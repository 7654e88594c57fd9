"""What `verify --level bytes` found, as plain data.

It proves what it has compared and nothing else: without the source and without digests the values were compared with
nothing, and a tensor that was computed is no copy of anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kconvert.parity.results import Failure

__all__ = ["BytesLevel", "Difference", "How", "TensorGroup"]


class How(StrEnum):
    """What the stored bytes were compared with."""

    SOURCE = "source"
    DIGESTS = "digests"
    BOTH = "source and digests"
    STRUCTURE = "structure"


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that came about in one way, and how many of them were compared and are wrong.

    Attributes:
        kind: `copied` as they were, `joined` out of others or rearranged, or `computed`.
        num_tensors, size_bytes: all of them.
        num_compared: those whose bytes were compared.
        num_wrong: those that differ.
    """

    kind: str
    num_tensors: int
    size_bytes: int
    num_compared: int
    num_wrong: int


@dataclass(frozen=True)
class Difference:
    """A tensor whose bytes are not those of the source.

    Attributes:
        target: its name.
        num_bytes, size_bytes: how many of its bytes differ, of how many.
        source: the tensor in the source's files in which the first of them lies.
        index: of the element there.
        exchanged: pairs of tensors, or of places along the first axis, of which the first one's place holds the other.
        is_as_written: whether the stored bytes have the digest of the conversion; None where that is not known.
    """

    target: str
    num_bytes: int
    size_bytes: int
    source: str
    index: tuple[int, ...]
    exchanged: tuple[tuple[str, str], ...] = ()
    is_as_written: bool | None = None

    @property
    def text(self) -> str:
        """For an error line."""
        what = f"{self.num_bytes} of {self.size_bytes} bytes differ, first in {self._place}"
        if self.exchanged:
            what += f"; {self._exchanged}"
        if self.is_as_written:
            what += "; the file has the digest of the conversion, so the source has changed"
        return what

    @property
    def _place(self) -> str:
        if len(self.index) > 2:
            return f"element {list(self.index)} of {self.source}"
        if not self.index:
            return self.source
        return f"{'row' if len(self.index) == 2 else 'element'} {self.index[0]} of {self.source}"

    @property
    def _exchanged(self) -> str:
        place, held = self.exchanged[0]
        if (held, place) in self.exchanged:
            found, num = f"{place} and {held} are exchanged", 2
        else:
            found, num = f"{held} stands in the place of {place}", 1
        more = len(self.exchanged) - num
        return f"{found}, and {more} more are out of place" if more else found


@dataclass(frozen=True)
class BytesLevel:
    """A converted directory beside its manifest, and beside the source or the digests.

    Attributes:
        how: what the bytes were compared with.
        groups: the tensors.
        num_files: files that are not weights, and kernel packages; their digests were compared.
        num_wrong_files: those that are missing or have another one.
        num_compared_bytes: of tensors.
        not_compared: the tensors whose bytes were compared with nothing.
        differences: tensors that differ from the source.
        found: everything that does not hold, worst first.
        is_whole: whether the weight files are those of the manifest, so that a model can be loaded.
    """

    how: How
    groups: tuple[TensorGroup, ...]
    num_files: int
    num_wrong_files: int
    num_compared_bytes: int
    not_compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    found: tuple[Failure, ...]
    is_whole: bool

    @property
    def num_tensors(self) -> int:
        """All that the manifest has."""
        return sum(group.num_tensors for group in self.groups)

    @property
    def unproved(self) -> str | None:
        """What was not shown, or None."""
        if self.how is How.STRUCTURE:
            return "the values of the tensors were compared with nothing"
        if not self.not_compared:
            return None
        count, example = len(self.not_compared), self.not_compared[0]
        return f"{count} {'tensor was' if count == 1 else 'tensors were'} compared with nothing, e.g. {example}"

    def failures(self) -> tuple[Failure, ...]:
        """What does not hold, the worst first."""
        return self.found

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "how": self.how.value,
            "is_whole": self.is_whole,
            "num_tensors": self.num_tensors,
            "num_compared_bytes": self.num_compared_bytes,
            "num_files": self.num_files,
            "num_wrong_files": self.num_wrong_files,
            "groups": [asdict(group) for group in self.groups],
            "not_compared": list(self.not_compared),
            "differences": [asdict(difference) for difference in self.differences],
        }
