"""The bytes are those of the naive construction, by every way of copying."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.errors import CheckpointError, PreflightError, UsageError
from kconvert.rewrite import Copy, Extent, Job, OutputFile, copying, rewrite, tasks
from tests.rewrite.conftest import Case, no_copy_threads

UNSUPPORTED = ["EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM", "EBADF"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def broken(monkeypatch: pytest.MonkeyPatch, name: str, code: int | None) -> Counter[tuple[int, int]]:
    """Makes `os.<name>` fail with `code`, or copy nothing (None); counts its calls per (source, target)."""
    calls: Counter[tuple[int, int]] = Counter()

    def fail(first: int, second: int, *rest: Any) -> int:
        calls[first, second] += 1
        if code is None:
            return 0
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)
    return calls


def failing(code: int) -> Callable[..., int]:
    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, slices and buffers even for small files."""
    monkeypatch.setattr(tasks, "PIECE_BYTES", 70_001)
    monkeypatch.setattr(copying, "SLICE_BYTES", 9_001)
    monkeypatch.setattr(copying, "_BUFFER_BYTES", 1_001)


@pytest.mark.parametrize("workers", [None, 1, 2, 7])
def test_content(case: Case, tmp_path: Path, workers: int | None) -> None:
    seen: list[int] = []
    threads: set[threading.Thread] = set()

    def progress(size_bytes: int) -> None:
        seen.append(size_bytes)
        threads.add(threading.current_thread())

    result = rewrite(case.job, tmp_path / "out", workers=workers, on_progress=progress)
    assert tree(tmp_path / "out") == case.expected
    assert result.output == tmp_path / "out"
    assert result.bytes_written == sum(map(len, case.expected.values())) == sum(seen) == case.job.size_bytes
    assert result.copy_seconds > 0
    assert result.sync_seconds > 0
    assert threads == {threading.current_thread()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert no_copy_threads()


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("sendfile", [False, True])
@pytest.mark.parametrize("code", [*UNSUPPORTED, "EIO", None])
def test_each_way(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, sendfile: bool
) -> None:
    number = getattr(errno, code) if code else None
    counts = [broken(monkeypatch, "copy_file_range", number)]
    if not sendfile:
        counts.append(broken(monkeypatch, "sendfile", number))
    rewrite(case.job, tmp_path / "out", workers=2)
    assert tree(tmp_path / "out") == case.expected
    for calls in counts:
        assert calls
        assert max(calls.values()) <= 2, "a way that failed is tried at most once per thread"


@pytest.mark.usefixtures("small_steps")
def test_small_steps(case: Case, tmp_path: Path) -> None:
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


@pytest.mark.parametrize("name", ["copy_file_range", "sendfile", "pwrite"])
def test_short_calls_go_on(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real: dict[str, Callable[..., int]] = {
        call: getattr(os, call) for call in ("copy_file_range", "sendfile", "pwrite")
    }
    if name != "copy_file_range":
        broken(monkeypatch, "copy_file_range", errno.EXDEV)
    if name == "pwrite":
        broken(monkeypatch, "sendfile", errno.EINVAL)
    short: dict[str, Callable[..., int]] = {
        "copy_file_range": lambda s, t, n, i, o: real[name](s, t, min(n, 4099), i, o),
        "sendfile": lambda t, s, i, n: real[name](t, s, i, min(n, 4099)),
        "pwrite": lambda t, data, o: real[name](t, data[:4099], o),
    }
    monkeypatch.setattr(os, name, short[name])
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


@pytest.mark.parametrize("cut", [True, False])
def test_without_the_fast_calls(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.delattr(os, "posix_fallocate")
    if cut:
        monkeypatch.delattr(os, "sendfile")
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


_EXTENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 999), st.integers(0, 400), st.booleans()), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(st.binary(min_size=1, max_size=999), min_size=3, max_size=3),
    files=st.lists(st.tuples(st.binary(max_size=9), _EXTENTS), max_size=4),
    piece=st.integers(1, 500),
    workers=st.integers(1, 4),
)
def test_random_extents(
    sources: list[bytes], files: list[tuple[bytes, list[tuple[int, int, int, bool]]]], piece: int, workers: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "PIECE_BYTES", piece)
        folder = Path(name)
        for number, data in enumerate(sources):
            (folder / f"s{number}").write_bytes(data)
        outputs, expected = [], {}
        for number, (prefix, runs) in enumerate(files):
            extents, content, end = [], prefix, (0, 0)
            for source, offset, size, goes_on in runs:
                source, offset = end if goes_on else (source, offset)
                data = sources[source][offset : offset + size]
                extents.append(Extent(folder / f"s{source}", min(offset, len(sources[source])), len(data)))
                content += data
                end = source, offset + len(data)
            outputs.append(OutputFile(f"o{number}", prefix, tuple(extents)))
            expected[f"o{number}"] = content
        rewrite(Job(tuple(outputs), (), ()), folder / "out", workers=workers)
        assert tree(folder / "out") == expected


def test_touching_extents_are_one_task(tmp_path: Path) -> None:
    source, target = copying.OpenFile(tmp_path / "s", 3), copying.OpenFile(tmp_path / "t", 4)
    extents = [Extent(source.path, 100 + 10 * number, 10) for number in range(50)]
    extents.insert(7, Extent(tmp_path / "s", 0, 0))
    pieces = list(tasks.cut(extents, {source.path: source}, target, 8))
    assert pieces == [copying.Piece(source, 100, target, 8, 500)]


def test_workers_share_the_last_file(tmp_path: Path) -> None:
    source, one, two = (copying.OpenFile(tmp_path / name, fd) for fd, name in enumerate("sot"))
    extents = [Extent(source.path, 0, 3 * tasks.PIECE_BYTES)]
    queue = tasks.TaskQueue(tasks.cut(extents, {source.path: source}, target, 0) for target in (one, two))
    taken = [queue.take(worker) for worker in (0, 1, 0, 1, 0, 0, 1, 0)]
    fds = [piece.target.fd if piece else None for piece in taken]
    assert fds == [1, 2, 1, 2, 1, 2, None, None]


@pytest.mark.parametrize("way", ["copy_file_range", "sendfile", "memory"])
def test_source_cut_short_meanwhile(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(copying, "SLICE_BYTES", 1 << 16)
    if way != "copy_file_range":
        broken(monkeypatch, "copy_file_range", errno.EXDEV)
    if way == "memory":
        broken(monkeypatch, "sendfile", errno.EINVAL)

    def progress(size_bytes: int) -> None:
        os.truncate(case.source / "a", 5)

    job = Job((OutputFile("x", b"p", case.job.files[1].extents * 40),), (), case.job.final)
    with pytest.raises(CheckpointError, match=r"source/a: ends early: no data at byte \d+, .* size is now 5"):
        rewrite(job, tmp_path / "out", on_progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert no_copy_threads()


def test_source_cannot_be_read(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_file_range", "sendfile", "preadv"):
        monkeypatch.setattr(os, name, failing(errno.EIO))
    with pytest.raises(CheckpointError, match="cannot be read at byte"):
        rewrite(case.job, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["copy_file_range", "sendfile", "pwrite", "fsync", "posix_fallocate"])
def test_disk_full(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "sendfile":
        broken(monkeypatch, "copy_file_range", errno.EXDEV)
    monkeypatch.setattr(os, name, failing(errno.ENOSPC))
    with pytest.raises(PreflightError, match="disk is full"):
        rewrite(case.job, tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_source_is_checked_first(case: Case, tmp_path: Path) -> None:
    a = case.source / "a"
    for job, text in [
        (Job((OutputFile("x", b"", (Extent(a, 299_999, 2),)),), (), ()), "300001 bytes needed, 300000 found"),
        (Job((OutputFile("x", b"", (Extent(tmp_path / "no", 0, 2),)),), (), ()), "No such file"),
        (Job((OutputFile("x", b"", (Extent(tmp_path, 0, 0),)),), (), ()), "not a regular file"),
        (Job((), (Copy("x", a, 299_999),), ()), "has changed"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            rewrite(job, tmp_path / "new" / "out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        rewrite(Job((), (Copy("x", tmp_path / "pipe", 0),), ()), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "source"]


def test_no_workers(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 0"):
        rewrite(case.job, tmp_path / "out", workers=0)
