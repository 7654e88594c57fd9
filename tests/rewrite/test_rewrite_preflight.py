"""What is refused before the first byte: names, inodes, sizes; and digests taken on the way."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kconvert.errors import PreflightError
from kconvert.rewrite import (
    Cast,
    Computed,
    Copy,
    Digested,
    Extent,
    Gather,
    GatherPiece,
    Job,
    OutputFile,
    Writing,
    rewrite,
)
from kconvert.transforms import whole
from kconvert.transforms.arrangement import transpose
from tests.rewrite.conftest import Case


def only_source(tmp_path: Path) -> bool:
    return [path.name for path in tmp_path.iterdir()] == ["source"]


def test_not_enough_inodes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_bavail=10**9, f_frsize=4096, f_files=1000, f_favail=9, f_namemax=255)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    with pytest.raises(PreflightError, match="not enough inodes: 10 files and folders needed, 9 free") as caught:
        rewrite(case.job, tmp_path / "out")
    assert caught.value.exit_code == 6
    assert only_source(tmp_path)
    status.f_favail = 10
    rewrite(case.job, tmp_path / "out")


def test_a_name_that_the_file_system_does_not_hold(case: Case, tmp_path: Path) -> None:
    name = "sub/" + 128 * "\u00e9"  # 256 bytes
    copy = Copy(name, case.source / "config.json", 77)
    with pytest.raises(PreflightError, match="has 256 bytes, 255 are allowed here"):
        rewrite(Job(case.job.files, (copy,), ()), tmp_path / "out")
    assert only_source(tmp_path)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EILSEQ, "does not take this file name"),
        (errno.EEXIST, "two output names are one file here"),
        (errno.EROFS, "the file system is read-only"),
    ],
)
def test_a_file_that_cannot_be_made_shows_before_any_is_filled(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    real, copied = os.open, []

    def make(path: Any, *args: Any, **kw: Any) -> int:
        if Path(path).name == "x.py" and "output" in Path(path).parts:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kw)

    monkeypatch.setattr(os, "open", make)
    monkeypatch.setattr(os, "preadv", lambda *args: copied.append(args))
    with pytest.raises(PreflightError, match=said):
        rewrite(case.job, tmp_path / "out")
    assert not copied
    assert only_source(tmp_path)


def test_a_file_larger_than_the_file_system_holds(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "too large")

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(PreflightError, match="does not hold files of this size"):
        rewrite(case.job, tmp_path / "out")
    assert only_source(tmp_path)


# ---- digests


@pytest.mark.parametrize("workers", [1, 3])
def test_digests_are_those_of_what_is_written(case: Case, tmp_path: Path, workers: int) -> None:
    a = case.source / "a"
    numbers = np.frombuffer(a.read_bytes()[:240_000], dtype="<u2").reshape(300, 400)
    turned = transpose(whole("t", (300, 400)), 0, 1)
    parts: dict[str, tuple[Extent | Gather | Computed, ...]] = {
        "plain": (Extent(a, 5, 200_000), Extent(a, 0, 3)),
        "turned": (Gather(120_000, 2, tuple(GatherPiece(a, 0, piece) for piece in turned.pieces)),),
        "cast": (Extent(a, 0, 4_000, Cast("BF16", "F32")),),
        "made": (Computed("made", 3, lambda: memoryview(b"abc")),),
        "empty": (),
    }
    file = OutputFile("f", b"p", tuple(Digested(name, extents) for name, extents in parts.items()))
    with Writing(Job((file,), ()), tmp_path / "out", workers=workers) as writing:
        digests = writing.wait()
        writing.publish()
    content, found, start = (tmp_path / "out" / "f").read_bytes(), {}, 1
    for name, extents in parts.items():
        size = sum(extent.target_bytes for extent in extents)
        found[name] = hashlib.sha256(content[start : start + size]).hexdigest()
        start += size
    assert digests == found
    assert content[1 + 200_003 :][:240_000] == numbers.T.tobytes()
    assert len(content) == start
