"""A job refuses contradictions when it is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconvert.errors import CheckpointError
from kconvert.rewrite import Copy, Extent, Job, OutputFile


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "", "a\\b", " a"])
def test_unsafe_names(name: str) -> None:
    with pytest.raises(CheckpointError, match="is refused"):
        Job((OutputFile(name, b"", ()),), (), ())
    with pytest.raises(CheckpointError, match="is refused"):
        Job((), (Copy(name, Path("x"), 0),), ())
    with pytest.raises(CheckpointError, match="is refused"):
        Job((), (), ((name, b""),))


def test_a_name_twice() -> None:
    with pytest.raises(CheckpointError, match="'x' is refused: written twice"):
        Job((OutputFile("x", b"", ()),), (), (("x", b""),))


def test_a_file_that_is_also_a_folder() -> None:
    with pytest.raises(CheckpointError, match="'a/b' is both a file and the folder of 'a/b/c'"):
        Job((OutputFile("a/b", b"", ()),), (Copy("a/b/c", Path("x"), 0),), ())


def test_negative_numbers() -> None:
    with pytest.raises(CheckpointError, match="offset -1"):
        Extent(Path("x"), -1, 0)
    with pytest.raises(CheckpointError, match="size -1"):
        Extent(Path("x"), 0, -1)
    with pytest.raises(CheckpointError, match="bad size -1"):
        Copy("x", Path("x"), -1)


def test_size() -> None:
    file = OutputFile("x", b"abc", (Extent(Path("s"), 5, 10), Extent(Path("s"), 0, 1)))
    assert file.size_bytes == 14
    assert Job((file,), (Copy("y", Path("s"), 20),), (("z", b"12"),)).size_bytes == 36
