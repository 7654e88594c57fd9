"""What may be replaced, what is left alone, and what stands under the final name when."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kconvert.errors import OutputError, PreflightError, UsageError
from kconvert.rewrite import Extent, Job, OutputFile, check_output, copying, rewrite
from kconvert.rewrite import output as output_module
from kconvert.rewrite.durable import exchange
from kconvert.rewrite.journal import JOURNAL_NAME
from kconvert.rewrite.output import LOCK_NAME
from tests.rewrite.conftest import Case, no_copy_threads
from tests.support import manifest_bytes

OLD = manifest_bytes("a")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def converted(folder: Path) -> Path:
    folder.mkdir()
    (folder / "kconvert_manifest.json").write_bytes(OLD)
    (folder / "sub").mkdir()
    return folder


def test_modes_come_from_the_umask(case: Case, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        rewrite(case.job, tmp_path / "new" / "out")
    finally:
        os.umask(before)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


# ---- relation to the source


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("source", "is the source itself"),
        ("source/../source", "is the source itself"),
        ("link", "is the source itself"),
        ("source/out", "lies inside the source"),
        ("link/new/out", "lies inside the source"),
        (".", "holds the source"),
        ("up", "holds the source"),
    ],
)
def test_output_and_source(case: Case, tmp_path: Path, output: str, text: str) -> None:
    (tmp_path / "link").symlink_to(case.source)
    (tmp_path / "up").symlink_to(tmp_path)
    for source in (case.source, tmp_path / "link"):
        with pytest.raises(UsageError, match=text) as caught:
            check_output(tmp_path / output, source=source, overwrite=True)
        assert caught.value.exit_code == 2


def test_output_beside_the_source(case: Case, tmp_path: Path) -> None:
    check_output(tmp_path / "source2", source=case.source, overwrite=False)
    with pytest.raises(OutputError, match="--overwrite"):
        check_output(converted(tmp_path / "out"), source=case.source, overwrite=False)


def test_sources_that_lie_in_the_old_output(case: Case, tmp_path: Path) -> None:
    out = converted(tmp_path / "out")
    (case.source / "a").rename(out / "a")
    (case.source / "a").symlink_to(out / "a")
    with pytest.raises(UsageError, match="holds the source file"):
        rewrite(case.job, out, overwrite=True)
    assert names(out) == ["a", "kconvert_manifest.json", "sub"]


# ---- what may be replaced


def test_existing_output(case: Case, tmp_path: Path) -> None:
    out = converted(tmp_path / "out")
    with pytest.raises(OutputError, match="--overwrite") as caught:
        rewrite(case.job, out)
    assert caught.value.exit_code == 7
    assert names(out) == ["kconvert_manifest.json", "sub"]
    rewrite(case.job, out, overwrite=True)
    assert (out / "one").read_bytes() == case.expected["one"]
    assert not (out / "sub").exists()
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files(case: Case, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    with pytest.raises(OutputError, match="holds files that kconvert did not write"):
        rewrite(case.job, tmp_path / "out", overwrite=overwrite)
    assert names(tmp_path / "out") == ["thesis.txt"]
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("added", ["notes.txt", "checkpoint-500/optimizer.pt", "model.kconvert.safetensors"])
def test_files_added_to_an_output_of_ours(case: Case, tmp_path: Path, added: str) -> None:
    out = converted(tmp_path / "out")
    (out / added).parent.mkdir(exist_ok=True)
    (out / added).write_text("mine")
    with pytest.raises(OutputError, match=f"holds '{added}', which kconvert did not write") as caught:
        rewrite(case.job, out, overwrite=True)
    assert caught.value.exit_code == 7
    assert (out / added).read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [(manifest_bytes(written_by="save_pretrained"), "that a model was saved as"), (b"{}", "cannot be read")],
)
def test_an_output_that_is_more_than_a_conversion(case: Case, tmp_path: Path, content: bytes, said: str) -> None:
    out = converted(tmp_path / "out")
    (out / "kconvert_manifest.json").write_bytes(content)
    with pytest.raises(OutputError, match=said):
        rewrite(case.job, out, overwrite=True)
    assert (out / "kconvert_manifest.json").read_bytes() == content


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_directory_is_filled(case: Case, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    rewrite(case.job, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "two").read_bytes() == case.expected["two"]


def test_a_link_to_an_empty_directory_is_followed(case: Case, tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    rewrite(case.job, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "real" / "two").read_bytes() == case.expected["two"]
    assert names(tmp_path / "disk") == ["real"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_directory(case: Case, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, text in [("file", "not a directory"), ("dangling", "link to nothing")]:
        with pytest.raises(OutputError, match=text):
            rewrite(case.job, tmp_path / name, overwrite=overwrite)
    with pytest.raises(OutputError, match="mount point"):
        rewrite(case.job, Path("/proc"), overwrite=overwrite)
    assert names(tmp_path) == ["dangling", "file", "source"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_old_output_is_there_until_the_new_one_is(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    out = converted(tmp_path / "out")
    monkeypatch.setattr(output_module, "exchange", lambda one, other: can_exchange and exchange(one, other))
    rewrite(case.job, out, overwrite=True)
    assert names(tmp_path) == ["out", "source"]
    assert (out / "one").read_bytes() == case.expected["one"]


def test_the_old_output_comes_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = converted(tmp_path / "out")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(target) == out and Path(source).name == "output":
            raise OSError(errno.EIO, "broken")
        real(source, target)

    monkeypatch.setattr(output_module, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(PreflightError, match="reports an error"):
        rewrite(case.job, out, overwrite=True)
    assert (out / "kconvert_manifest.json").read_bytes() == OLD
    assert names(tmp_path) == ["out", "source"]


def test_an_output_that_appears_meanwhile(case: Case, tmp_path: Path) -> None:
    def progress(size_bytes: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "x").touch()

    with pytest.raises(OutputError, match="did not write"):
        rewrite(case.job, tmp_path / "out", on_progress=progress)
    assert names(tmp_path) == ["out", "source"]
    assert names(tmp_path / "out") == ["x"]


# ---- preflight


def test_not_enough_space(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=25, f_frsize=4096, f_files=0))
    with pytest.raises(PreflightError, match=r"0\.5 MB needed, 0\.1 MB free") as caught:
        rewrite(case.job, tmp_path / "new" / "out")
    assert caught.value.exit_code == 6
    assert names(tmp_path) == ["source"]


def test_space_in_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "s").open("wb") as file:
        file.truncate(3_000_000_000)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2_500_000, f_frsize=1000))
    with pytest.raises(PreflightError, match=r"3\.0 GB needed, 2\.5 GB free"):
        rewrite(Job((OutputFile("x", b"", (Extent(tmp_path / "s", 0, 3_000_000_000),)),), (), ()), tmp_path / "out")


@pytest.mark.parametrize("parent", ["file", "locked"])
def test_parent(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "locked").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and real(path, mode))
    with pytest.raises(PreflightError, match="not a writable directory"):
        rewrite(case.job, tmp_path / parent / "new" / "out")


def test_too_many_files(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (60, 60))
    with pytest.raises(PreflightError, match="ulimit -n"):
        rewrite(case.job, tmp_path / "out")


# ---- the partial directory


def test_stale_partial_is_used_again(case: Case, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "output" / "code" / "deep").mkdir(parents=True)
    for name in (LOCK_NAME, JOURNAL_NAME, "output/one", "output/code/deep/x.py", "output/code/stray"):
        (partial / name).write_text("stale")
    (partial / "output" / "link").symlink_to(case.source)
    rewrite(case.job, tmp_path / "out")
    assert names(tmp_path / "out") == sorted({name.split("/")[0] for name in case.expected})
    assert names(tmp_path / "out" / "code") == ["deep"]
    assert names(case.source) == ["a", "b", "config.json"]
    assert names(tmp_path) == ["out", "source"]


def test_a_partial_with_more_than_we_make_is_left_alone(case: Case, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name in (LOCK_NAME, "thesis.txt"):
        (partial / name).write_text("mine")
    with pytest.raises(OutputError, match="not left from a kconvert run"):
        rewrite(case.job, tmp_path / "out")
    assert names(partial) == [LOCK_NAME, "thesis.txt"]


def test_foreign_partial_is_left_alone(case: Case, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "x").write_text("mine")
    with pytest.raises(OutputError, match="not left from a kconvert run") as caught:
        rewrite(case.job, tmp_path / "out")
    assert caught.value.exit_code == 7
    assert names(partial) == ["x"]
    (partial / "x").unlink()
    partial.rmdir()
    for make in (lambda: partial.write_text("x"), lambda: partial.symlink_to(case.source)):
        make()
        with pytest.raises(OutputError, match="not left from"):
            rewrite(case.job, tmp_path / "out")
        partial.unlink()


def test_a_lock_file_that_is_a_link(case: Case, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / LOCK_NAME).symlink_to(case.source / "a")
    with pytest.raises(OutputError, match="not left from"):
        rewrite(case.job, tmp_path / "out")


def test_a_second_run_meanwhile(case: Case, tmp_path: Path) -> None:
    errors: list[OutputError] = []

    def progress(size_bytes: int) -> None:
        if not errors:
            with pytest.raises(OutputError, match="another live run") as caught:
                rewrite(case.job, tmp_path / "out")
            errors.append(caught.value)

    rewrite(case.job, tmp_path / "out", on_progress=progress)
    assert errors[0].exit_code == 7
    assert (tmp_path / "out" / "two").read_bytes() == case.expected["two"]


def test_a_lock_that_was_removed_meanwhile(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run ended between our open and our lock: what we hold guards nothing."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / LOCK_NAME).touch()
    monkeypatch.setattr(fcntl, "flock", lambda fd, mode: (partial / LOCK_NAME).unlink())
    with pytest.raises(OutputError, match="another live run"):
        rewrite(case.job, tmp_path / "out")


def test_a_foreign_partial_that_took_the_place_is_left_alone(case: Case, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"

    def progress(size_bytes: int) -> None:
        partial.rename(tmp_path / "moved")
        partial.mkdir()
        (partial / "x").touch()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        rewrite(case.job, tmp_path / "out", on_progress=progress)
    assert names(partial) == ["x"]


# ---- order and interruption


def test_order_of_the_last_steps(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_sync, real_rename = os.fsync, os.rename
    tree = tmp_path / "out.partial" / "output"

    def fsync(fd: int) -> None:
        steps.append(os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), tmp_path))
        if steps[-1] == "out.partial/output/index.json":
            assert not (tree / "kconvert_manifest.json").exists()
        real_sync(fd)

    def rename(source: Path, target: Path) -> None:
        steps.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    rewrite(case.job, tmp_path / "out")
    journal, root = "out.partial/journal.jsonl", "out.partial/output"
    folders = [f"{root}/code/deep", f"{root}/code", root]
    assert steps[:2] == [journal, "out.partial"]  # what the run is about stands there before the first byte
    data = [name for name in steps[2:] if name not in (journal, *folders)][:5]
    assert sorted(data) == sorted(f"{root}/{name}" for name in ("one", "two", "empty", "config.json", "code/deep/x.py"))
    for name in ("one", "two", "empty"):  # a file is noted after it is on the disk
        assert steps[steps.index(f"{root}/{name}") + 1] == journal
    assert steps[10:] == [
        *folders,
        f"{root}/index.json",
        f"{root}/kconvert_manifest.json",
        *folders,
        journal,
        "rename",
        ".",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("when", [1, 3, -1])
def test_an_error_of_the_callback(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], when: int
) -> None:
    monkeypatch.setattr(copying, "SLICE_BYTES", 1000)
    out = converted(tmp_path / "out")
    total, calls = 0, 0

    def progress(size_bytes: int) -> None:
        nonlocal total, calls
        total, calls = total + size_bytes, calls + 1
        if calls == when or total == case.job.size_bytes:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        rewrite(case.job, out, overwrite=True, on_progress=progress)
    assert no_copy_threads()
    assert names(out) == ["kconvert_manifest.json", "sub"]
    assert names(tmp_path) == ["out", "source"]


def test_no_descriptor_is_left_open(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(Path("/proc/self/fd"))
    rewrite(case.job, tmp_path / "out")
    with pytest.raises(OutputError):
        rewrite(case.job, tmp_path / "out")
    monkeypatch.setattr(os, "preadv", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        rewrite(case.job, tmp_path / "out2")
    assert names(Path("/proc/self/fd")) == before
