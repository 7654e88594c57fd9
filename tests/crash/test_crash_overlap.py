"""What is copied while the structural check runs is published only if the check agrees."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kconvert.convert import Options, apply_recipe, prepare
from kconvert.convert import apply as apply_module
from kconvert.errors import RecipeError
from kconvert.rewrite import Job
from tests.crash.bench import finished_in, snapshot, write_small
from tests.support import convert, write_recipe

PATCH = """\
  - kernel: [cpu_fused_swiglu]
    replace: {class: %s, path: "model.layers.*.mlp"}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("overlap") / "source")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kconvert-copy")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checked_when_all_is_copied(monkeypatch: pytest.MonkeyPatch, partial: Path) -> list[int]:
    """The first check begins when every weight file is finished; gives how many were, each time that it began."""
    real: Callable[..., Any] = vars(apply_module)["check"]
    seen: list[int] = []

    def late(*args: Any, **kw: Any) -> Any:
        end = time.monotonic() + 30
        while not seen and len(finished_in(partial)) < 4 and time.monotonic() < end:
            time.sleep(0.005)
        seen.append(len(finished_in(partial)))
        return real(*args, **kw)

    monkeypatch.setattr(apply_module, "check", late)
    return seen


def early_job(monkeypatch: pytest.MonkeyPatch, change: Callable[[Job], Job]) -> None:
    """What is written before the check is another job than the check comes to."""
    real = apply_module._Run.job_of_files

    def job_of_files(run: Any) -> Job | None:
        job = real(run)
        assert job is not None
        return change(job)

    monkeypatch.setattr(apply_module._Run, "job_of_files", job_of_files)


def test_the_check_agrees(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checked_when_all_is_copied(monkeypatch, tmp_path / "out.partial")
    convert("qwen3", source, tmp_path / "out")
    assert seen == [4]
    monkeypatch.undo()
    monkeypatch.setattr(apply_module._Run, "job_of_files", lambda run: None)  # then it is checked first
    convert("qwen3", source, tmp_path / "checked")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "checked")
    assert names(tmp_path) == ["checked", "out"]


def test_the_check_fails_when_all_is_copied(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checked_when_all_is_copied(monkeypatch, tmp_path / "out.partial")
    recipe = write_recipe(tmp_path / "wrong.yaml", PATCH % "LlamaMLP")
    with pytest.raises(RecipeError, match="LlamaMLP") as caught:
        convert(recipe, source, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert seen == [4]
    assert names(tmp_path) == ["wrong.yaml"]


def test_the_check_comes_to_another_job(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before is dropped, and what the check came to is written, under the identity of that."""
    convert("qwen3", source, tmp_path / "expected")
    early_job(monkeypatch, other)
    seen = checked_when_all_is_copied(monkeypatch, tmp_path / "out.partial")
    identities = []
    convert(
        "qwen3", source, tmp_path / "out", on_prepared=lambda prepared, job: identities.append(job.identity["the plan"])
    )
    assert seen == [4, 0]
    assert len(identities) == 1
    assert identities != ["other"]
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")
    assert names(tmp_path) == ["expected", "out"]


def other(job: Job) -> Job:
    """The same files with the bytes of the first one lacking, so that nothing of it may get through."""
    first = replace(job.files[0], extents=job.files[0].extents[:1], same_as=None)
    return replace(job, files=(first, *job.files[1:]), identity={**job.identity, "the plan": "other"})


@pytest.mark.parametrize("published", [False, True])
def test_it_was_stopped_with_the_other_job(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """A run of the checked job was stopped: the same command finds that its first guess is not what is there, and goes on."""
    convert("qwen3", source, tmp_path / "expected")
    early_job(monkeypatch, other)
    stop_before_the_end(monkeypatch, published=published)
    with pytest.raises(KeyboardInterrupt):
        convert("qwen3", source, tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / "out").exists() == published
    assert (tmp_path / "out.partial").exists()

    early_job(monkeypatch, other)
    result = convert("qwen3", source, tmp_path / "out")
    assert result.bytes_resumed > 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")
    assert names(tmp_path) == ["expected", "out"]


def stop_before_the_end(monkeypatch: pytest.MonkeyPatch, *, published: bool) -> None:
    from kconvert.rewrite import output

    real = output.Partial.publish

    def publish(partial: output.Partial, *args: Any, **kw: Any) -> None:
        if published:
            monkeypatch.setattr(output, "sync_directory", stop)  # right after the rename
            real(partial, *args, **kw)
        raise KeyboardInterrupt

    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output.Partial, "publish", publish)


def test_ctrl_c_while_it_is_checked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished by then is kept, and the same command goes on."""
    convert("qwen3", source, tmp_path / "expected")

    def check(*args: Any, **kw: Any) -> Any:
        while len(finished_in(tmp_path / "out.partial")) < 4:
            time.sleep(0.005)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(apply_module, "check", check)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert("qwen3", source, tmp_path / "out")
    assert "4 of 4 weight files are kept" in caught.value.__notes__[0]
    assert names(tmp_path) == ["expected", "out.partial"]
    monkeypatch.undo()
    assert convert("qwen3", source, tmp_path / "out").bytes_resumed > 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")


def test_without_a_check_nothing_is_written_early(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_module._Run, "job_of_files", None)
    result = apply_recipe("qwen3", source, tmp_path / "out", options=Options(), model_check=False)
    assert result.prepared.manifest == prepare("qwen3", source, model_check=False).manifest
