"""A source that is changed while it is converted: after its headers were read, or while its bytes are copied."""

from __future__ import annotations

import json
import os
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kconvert import load_converted
from kconvert.checkpoint import open_checkpoint
from kconvert.checkpoint.header import read_header
from kconvert.convert import final_items, prepare
from kconvert.errors import CheckpointError
from tests.support import convert, qwen3_config, qwen3_tensors, raw, write_checkpoint, write_safetensors

NAMES = list(qwen3_tensors())
SHARD = "model-00002-of-00002.safetensors"
SAID = "has changed since its header was read"


def _in_another_order(path: Path) -> bytes:
    """A valid file of the same tensors and the same size, where the offsets of the first header are wrong."""
    tensors = {name: raw(tensor) for name, tensor in reversed(qwen3_tensors().items()) if name in _names_in(path)}
    beside = path.with_name("other")
    write_safetensors(beside, tensors)
    data = beside.read_bytes()
    beside.unlink()
    (length,) = struct.unpack_from("<Q", data)
    padding = path.stat().st_size - len(data)
    assert padding >= 0
    made = struct.pack("<Q", length + padding) + data[8 : 8 + length] + b" " * padding + data[8 + length :]
    assert made != path.read_bytes()
    return made


def _names_in(path: Path) -> set[str]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return set(json.loads(data[8 : 8 + length]))


def replace(path: Path) -> None:
    """As a download does: another file under the name, with the times of the old one."""
    before, beside = path.stat(), path.with_name("new")
    beside.write_bytes(_in_another_order(path))
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.rename(path)


def rewrite_in_place(path: Path) -> None:
    path.write_bytes(_in_another_order(path))


def rewrite_with_old_times(path: Path) -> None:
    before = path.stat()
    path.write_bytes(_in_another_order(path))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def change_one_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


CHANGES = [replace, rewrite_in_place, rewrite_with_old_times, truncate, change_one_byte]
Change = Callable[[Path], None]


@pytest.fixture(params=["single", "sharded"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The weight file that will be changed: the only one, or the second of two."""
    is_single = request.param == "single"
    shards = None if is_single else [NAMES[:11], NAMES[11:]]
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(), shards)
    path = source / ("model.safetensors" if is_single else SHARD)
    _pad_header(path)
    return path


def _pad_header(path: Path) -> None:
    """Room in the header, so that another order of the same tensors fits into the same size."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    room = 256 + -length % 8
    path.write_bytes(struct.pack("<Q", length + room) + data[8 : 8 + length] + b" " * room + data[8 + length :])


def expect_refused(source: Path, words: str, **kw: Any) -> None:
    """Refused as a bad source; neither an output nor a partial directory nor anything else is left."""
    output = source.parent / "outputs" / "out"
    output.parent.mkdir()
    with pytest.raises(CheckpointError, match=words) as caught:
        convert("qwen3", source, output, **kw)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert list(output.parent.iterdir()) == []


def once(change: Change, path: Path) -> Callable[..., None]:
    """A callback that makes the change when it is first called."""
    done: list[bool] = []

    def call(*_: Any) -> None:
        if not done:
            time.sleep(0.02)  # times in a file system go by ticks of the kernel
            change(path)
            done.append(True)

    return call


@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_between_the_check_and_the_copy(weights: Path, change: Change, model_check: bool) -> None:
    expect_refused(weights.parent, f"{weights}: {SAID}", on_prepared=once(change, weights), model_check=model_check)


@pytest.mark.parametrize("change", [replace, rewrite_in_place, rewrite_with_old_times, change_one_byte])
def test_changed_while_it_is_copied(weights: Path, change: Change) -> None:
    expect_refused(weights.parent, f"{weights}: {SAID}", on_progress=once(change, weights), model_check=False)


def test_cut_while_it_is_copied(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, copy = once(truncate, weights), os.preadv

    def cut_then_copy(*args: Any) -> int:
        cut()
        return copy(*args)

    monkeypatch.setattr(os, "preadv", cut_then_copy)
    expect_refused(weights.parent, f"{weights}: ends early", model_check=False)


def test_changed_while_its_header_is_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(path: Path) -> Any:
        found = read_header(path)
        if path == weights:
            once(rewrite_in_place, path)()
        return found

    monkeypatch.setattr("kconvert.checkpoint.reader.read_header", slow)
    with pytest.raises(CheckpointError, match=f"{weights}: {SAID}"):
        open_checkpoint(weights.parent)


def test_an_unchanged_file_may_be_read_and_linked(weights: Path, tmp_path: Path) -> None:
    """The reverse: reading moves no time that counts, and a source behind a link is the same file."""
    (tmp_path / "link").symlink_to(weights.parent)
    convert("qwen3", tmp_path / "link", tmp_path / "out", on_prepared=lambda *_: weights.read_bytes())
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("reuse", ["copy", "hardlink"])
def test_a_hard_link_that_is_made_meanwhile(weights: Path, tmp_path: Path, reuse: Any) -> None:
    """By another conversion, or `cp -al`."""
    link = tmp_path / "another name"
    convert("qwen3", weights.parent, tmp_path / "out", reuse=reuse, on_prepared=lambda *_: link.hardlink_to(weights))
    assert link.samefile(weights)


def test_a_hard_link_that_hides_a_change(weights: Path, tmp_path: Path) -> None:
    """The file is another one by then, although it has more links."""

    def changed(*_: Any) -> None:
        weights.write_bytes(weights.read_bytes() + b"x")
        (tmp_path / "another name").hardlink_to(weights)

    with pytest.raises(CheckpointError, match=SAID):
        convert("qwen3", weights.parent, tmp_path / "out", on_prepared=changed)


def test_the_config_is_read_once(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config())
    checked = (source / "config.json").read_bytes()
    prepared = prepare("qwen3", source, model_check=False)
    (source / "config.json").unlink()
    assert dict(final_items(prepared, {}))["config.json"] == checked


@pytest.mark.parametrize("moment", ["on_prepared", "on_progress"])
def test_the_config_that_was_checked_is_the_one_that_is_written(tmp_path: Path, moment: str) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config())
    path = source / "config.json"
    checked = path.read_bytes()

    def edit(_: Path) -> None:
        path.write_bytes(checked.replace(b'"silu"', b'"gelu"'))

    result = convert("qwen3", source, tmp_path / "out", **{moment: once(edit, path)})
    assert path.read_bytes() != checked
    assert (result.output / "config.json").read_bytes() == checked
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = load_converted(result.output)
    assert [str(warning.message) for warning in caught if "config" in str(warning.message)] == []
    assert model.config.hidden_act == "silu"
