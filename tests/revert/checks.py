"""Whether a directory is a source again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from kconvert.convert import RevertResult, revert

__all__ = ["check_given_back", "digests"]


def digests(directory: Path) -> dict[str, str]:
    """The sha256 of every file in a directory, by name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def check_given_back(source: Path, converted: Path, output: Path, *, left_out: Collection[str] = ()) -> RevertResult:
    """Revert, and compare every byte with the source; `left_out` are files that are not brought over."""
    expected = digests(source)
    for name in left_out:
        del expected[name]
    result = revert(converted, output)
    assert digests(output) == expected
    prepared = result.prepared
    assert sorted(item.name for item in prepared.not_restored) == sorted(left_out)
    assert (prepared.is_exact, prepared.notes) == (True, ())
    index = [] if prepared.index is None else [prepared.index]
    assert sorted([*prepared.files, *prepared.sidecars, *index]) == sorted(expected)
    assert result.bytes_written == sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return result
