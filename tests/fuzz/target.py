"""What a fuzz target is: how inputs are made, and what may never happen with one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, Protocol

from kconvert.errors import KconvertError

__all__ = ["Fault", "MemoryFile", "Outcome", "Target", "check_refusal", "make_input"]

Outcome = Literal["accepted", "refused", "refused by kconvert alone"]


class Fault(Exception):
    """An input did what no input may do."""


class Target(Protocol):
    """A kind of file from elsewhere."""

    name: str

    def make(self, rng: Random) -> bytes:
        """A valid file, or nearly."""
        ...

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """A file that is like another in all but one place."""
        ...

    def check(self, data: bytes) -> Outcome:
        """Read a file.

        Raises:
            Fault: it was accepted though it may not be, or anything but a clean refusal came out.
        """
        ...


def check_refusal(error: KconvertError, exit_code: int) -> None:
    """A refusal is one line of bearable length that can be printed, and has the exit code of its kind."""
    text = str(error)
    if "\n" in text or len(text) > 5000 or error.exit_code != exit_code:
        raise Fault(f"no clean refusal: {text[:300]!r}") from error
    text.encode()


def make_input(target: Target, rng: Random) -> bytes:
    """A made file with no, one or a few mutations."""
    data = target.make(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        data = target.mutate(data, rng)
    return data


@dataclass
class MemoryFile:
    """A file that has a path but lies in memory only."""

    descriptor: int
    path: Path

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[MemoryFile]:
        """A new, empty one; gone afterwards."""
        descriptor = os.memfd_create("fuzz")
        try:
            yield cls(descriptor, Path(f"/proc/self/fd/{descriptor}"))
        finally:
            os.close(descriptor)

    def fill(self, data: bytes) -> None:
        """Make `data` its content."""
        os.truncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)
