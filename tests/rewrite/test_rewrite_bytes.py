"""The bytes are those of the naive construction, by every way of copying."""

from __future__ import annotations

import errno
import os
import subprocess
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
from kconvert.rewrite import Copy, Extent, Job, OutputFile, copying, execute, reading, rewrite, tasks, workers
from kconvert.rewrite.reading import OpenFile
from kconvert.rewrite.ways import KernelCopies, kernel_copies
from tests.rewrite.conftest import Case, let_the_kernel_copy, no_copy_threads

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
    monkeypatch.setattr(reading, "BUFFER_BYTES", 1_001)


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
@pytest.mark.parametrize("code", [*UNSUPPORTED, "EIO", None])
def test_where_the_kernel_does_not_copy(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    let_the_kernel_copy(monkeypatch)
    calls = broken(monkeypatch, "copy_file_range", getattr(errno, code) if code else None)
    rewrite(case.job, tmp_path / "out", workers=2)
    assert tree(tmp_path / "out") == case.expected
    assert calls
    assert max(calls.values()) <= 2, "what failed is tried at most once per thread"


@pytest.mark.parametrize("where", ["ALWAYS", "ALIGNED", "NEVER"])
def test_the_kernel_copies_where_it_pays(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The case's offsets are at no border of a block, but for those of whole files."""
    let_the_kernel_copy(monkeypatch, KernelCopies[where])
    real, copied = os.copy_file_range, []

    def count(*args: Any) -> int:
        copied.append(real(*args))
        return copied[-1]

    monkeypatch.setattr(os, "copy_file_range", count)
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected
    whole = 77 + 77 + 200_001
    data = case.job.size_bytes - len(b"prefix") - sum(len(item) for _, item in case.job.final)
    assert sum(copied) == {"ALWAYS": data, "ALIGNED": whole, "NEVER": 0}[where]


def test_what_the_kernel_is_asked_on_this_disk(tmp_path: Path) -> None:
    """By the type that `stat` tells: only where blocks are shared or a server copies."""
    (tmp_path / "a").touch()
    name = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.strip()
    wanted = {"btrfs": "ALIGNED", "xfs": "ALIGNED", "nfs": "ALWAYS", "fuseblk": "ALWAYS", "ceph": "ALWAYS"}
    with (tmp_path / "a").open("rb") as one, (tmp_path / "a").open("rb") as two:
        assert kernel_copies(one.fileno(), two.fileno()) is KernelCopies[wanted.get(name, "NEVER")]
    with Path("/proc/self/status").open("rb") as one, (tmp_path / "a").open("rb") as two:
        assert kernel_copies(one.fileno(), two.fileno()) is KernelCopies.NEVER


@pytest.mark.usefixtures("small_steps")
def test_small_steps(case: Case, tmp_path: Path) -> None:
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


@pytest.mark.parametrize("name", ["copy_file_range", "pwrite", "preadv"])
def test_short_calls_go_on(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "copy_file_range":
        let_the_kernel_copy(monkeypatch)
    real: Callable[..., int] = getattr(os, name)
    short: dict[str, Callable[..., int]] = {
        "copy_file_range": lambda s, t, n, i, o: real(s, t, min(n, 4099), i, o),
        "pwrite": lambda t, data, o: real(t, data[:4099], o),
        "preadv": lambda s, buffers, o: real(s, [buffers[0][:4099]], o),
    }
    monkeypatch.setattr(os, name, short[name])
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


def test_without_calls_that_not_every_system_has(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_kernel_copy(monkeypatch)
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.delattr(os, "posix_fallocate")
    rewrite(case.job, tmp_path / "out")
    assert tree(tmp_path / "out") == case.expected


def test_the_disk_begins_while_a_file_is_written(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def begin(fd: int) -> None:
        begun.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        assert threading.current_thread().name == "kconvert-copy-sync"

    monkeypatch.setattr(workers, "FLUSH_BYTES", 60_000)
    monkeypatch.setattr(reading, "BUFFER_BYTES", 10_000)
    monkeypatch.setattr(execute, "start_writing", begin)
    rewrite(case.job, tmp_path / "out", workers=1)
    assert 1 <= begun.count("two") <= 500_000 // 60_000
    assert {*begun} <= {"two"}


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
    source, target = OpenFile(tmp_path / "s", 3), OpenFile(tmp_path / "t", 4)
    extents = [Extent(source.path, 100 + 10 * number, 10) for number in range(50)]
    extents.insert(7, Extent(tmp_path / "s", 0, 0))
    pieces = list(tasks.cut(extents, {source.path: source}, target, 8))
    assert pieces == [copying.Piece(source, 100, target, 8, 500)]


def test_workers_share_the_last_file(tmp_path: Path) -> None:
    source, one, two = (OpenFile(tmp_path / name, fd) for fd, name in enumerate("sot"))
    extents = [Extent(source.path, 0, 3 * tasks.PIECE_BYTES)]
    files = {str(target.fd): tasks.cut(extents, {source.path: source}, target, 0) for target in (one, two)}
    finished: list[str] = []
    queue = tasks.TaskQueue(files, finished.append)
    taken = [queue.take(worker) for worker in (0, 1, 0, 1, 0)]
    assert [file for file, _ in filter(None, taken)] == ["1", "2", "1", "2", "1"]
    for file in ("1", "1"):
        queue.done(file)
    assert queue.take(0) == ("2", copying.Piece(source, 64 << 20, two, 64 << 20, 32 << 20))
    assert not finished  # one task is with a worker
    queue.done("1")
    assert finished == ["1"]
    assert [queue.take(worker) for worker in (1, 0)] == [None, None]
    for _ in range(3):
        assert finished == ["1"]
        queue.done("2")
    assert finished == ["1", "2"]


def test_a_file_without_tasks_is_finished_when_it_is_looked_at() -> None:
    finished: list[str] = []
    queue = tasks.TaskQueue({"empty": iter(())}, finished.append)
    assert queue.take(0) is None
    assert finished == ["empty"]


@pytest.mark.parametrize("call", ["copy_file_range", "preadv"])
def test_source_cut_short_meanwhile(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(copying, "SLICE_BYTES", 1 << 16)
    if call == "copy_file_range":
        let_the_kernel_copy(monkeypatch)
    real = getattr(os, call)

    def copy_then_cut(*args: Any) -> Any:
        copied = real(*args)
        os.truncate(case.source / "a", 5)
        return copied

    monkeypatch.setattr(os, call, copy_then_cut)
    job = Job((OutputFile("x", b"p", case.job.files[1].extents * 40),), (), case.job.final)
    with pytest.raises(CheckpointError, match=r"source/a: ends early: no data at byte \d+, .* size is now 5"):
        rewrite(job, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert no_copy_threads()


def test_source_cannot_be_read(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_kernel_copy(monkeypatch)
    for name in ("copy_file_range", "preadv"):
        monkeypatch.setattr(os, name, failing(errno.EIO))
    with pytest.raises(CheckpointError, match="cannot be read at byte"):
        rewrite(case.job, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["copy_file_range", "pwrite", "fsync", "posix_fallocate"])
def test_disk_full(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "copy_file_range":
        let_the_kernel_copy(monkeypatch)
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
