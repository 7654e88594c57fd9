"""Files that are a source file, byte for byte: copied, hard-linked or cloned."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kconvert.checkpoint import FileStamp
from kconvert.errors import CheckpointError, PreflightError
from kconvert.rewrite import Digested, Extent, Job, OutputFile, execute, rewrite
from kconvert.rewrite.durable import clone

DATA = bytes(range(256)) * 1000


def make_job(tmp_path: Path, *, digests: bool = False) -> Job:
    """`same` is the file `a`; `other` holds a part of it behind another prefix."""
    path = tmp_path / "source" / "a"
    path.parent.mkdir()
    path.write_bytes(b"head" + DATA)
    tensor = Extent(path, 4, len(DATA))
    same = OutputFile("same", b"head", (Digested("t", (tensor,)) if digests else tensor,), path)
    other = OutputFile("other", b"HEAD", (tensor,))
    return Job((same, other), (), (("kconvert_manifest.json", b"{}"),), {path: FileStamp.of(path)})


def test_copied_by_default(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    result = rewrite(job, tmp_path / "out")
    assert (tmp_path / "out" / "same").read_bytes() == b"head" + DATA
    assert (tmp_path / "out" / "same").stat().st_nlink == 1
    assert result.bytes_linked == 0


@pytest.mark.parametrize("digests", [False, True])
def test_a_hard_link_is_that_very_file_and_only_where_nothing_changes(tmp_path: Path, digests: bool) -> None:
    job = make_job(tmp_path, digests=digests)
    seen: list[int] = []
    result = rewrite(job, tmp_path / "out", reuse="hardlink", on_progress=seen.append)
    assert (tmp_path / "out" / "same").samefile(tmp_path / "source" / "a")
    assert (tmp_path / "out" / "other").stat().st_nlink == 1
    assert (tmp_path / "out" / "other").read_bytes() == b"HEAD" + DATA
    assert result.bytes_linked == 4 + len(DATA)
    assert sum(seen) == job.size_bytes


def test_a_link_in_the_source_is_followed(tmp_path: Path) -> None:
    """As in a Hub cache: what is linked is the file itself, never the link."""
    job = make_job(tmp_path)
    path = tmp_path / "source" / "a"
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    rewrite(Job(job.files, (), job.final, {path: FileStamp.of(path)}), tmp_path / "out", reuse="hardlink")
    assert not (tmp_path / "out" / "same").is_symlink()
    assert (tmp_path / "out" / "same").samefile(tmp_path / "blob")


def test_a_source_that_was_written_to_is_refused_although_it_is_linked(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    path = tmp_path / "source" / "a"

    def touch(size_bytes: int) -> None:
        with path.open("r+b") as file:
            file.write(b"HEAD")

    with pytest.raises(CheckpointError, match="has changed"):
        rewrite(job, tmp_path / "out", reuse="hardlink", on_progress=touch)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_source_that_is_another_file_when_it_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened and checked is what has to stand in the output."""
    job = make_job(tmp_path)
    path, link = tmp_path / "source" / "a", os.link

    def replaced_first(source: Path, target: Path) -> None:
        path.rename(tmp_path / "source" / "b")
        path.write_bytes(b"HEAD" + DATA)
        link(source, target)

    monkeypatch.setattr(os, "link", replaced_first)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        rewrite(job, tmp_path / "out", reuse="hardlink")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def shares_all_blocks(source_fd: int, path: Path) -> None:
    """What a file system that can do it would give."""
    path.write_bytes(Path(f"/proc/self/fd/{source_fd}").read_bytes())


def test_a_clone_is_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "clone", shares_all_blocks)
    result = rewrite(make_job(tmp_path), tmp_path / "out", reuse="reflink")
    assert (tmp_path / "out" / "same").read_bytes() == b"head" + DATA
    assert not (tmp_path / "out" / "same").samefile(tmp_path / "source" / "a")
    assert result.bytes_linked == 4 + len(DATA)


def fails(code: int) -> Callable[..., Any]:
    def fail(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("reuse", ["hardlink", "reflink"])
def test_what_cannot_be_linked_is_said_and_never_copied_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reuse: Any
) -> None:
    job = make_job(tmp_path)
    monkeypatch.setattr(os, "link", fails(code))
    monkeypatch.setattr(execute, "clone", fails(code))
    with pytest.raises(PreflightError, match=f"cannot be used again as a {reuse}: .*; use --reuse copy") as caught:
        rewrite(job, tmp_path / "out", reuse=reuse)
    assert caught.value.exit_code == 6
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_clone_where_the_file_system_does_not_do_that(tmp_path: Path) -> None:
    """With the real call, where there is such a file system at hand; any error of it is one that is told."""
    (tmp_path / "a").write_bytes(DATA)
    with (tmp_path / "a").open("rb") as file:
        try:
            clone(file.fileno(), tmp_path / "b")
        except OSError as error:
            assert error.errno in execute._NO_LINK
        else:
            assert (tmp_path / "b").read_bytes() == DATA
