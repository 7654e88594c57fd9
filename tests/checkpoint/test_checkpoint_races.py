"""A sidecar that is another file by the time it is opened: S8 where somebody writes into the source meanwhile."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from kconvert.checkpoint import Checkpoint, Sidecars, list_sidecars, open_checkpoint, open_sidecar
from kconvert.convert import apply_recipe
from kconvert.errors import CheckpointError
from tests.checkpoint.conftest import ModelDir
from tests.fuzz.checkpoints import write_model


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def sound(model: ModelDir) -> ModelDir:
    model.sharded()
    _put(model.path / "sub" / "notes.txt", "notes")
    _put(model.path.parent / "outside" / "notes.txt", "secret")
    return model


def _listed(model: ModelDir) -> Sidecars:
    return list_sidecars(open_checkpoint(model.path))


def _read(model: ModelDir, sidecars: Sidecars, name: str) -> str:
    with open_sidecar(model.path / name, sidecars.roots) as file:
        return file.read().decode()


def test_what_was_listed_is_opened(sound: ModelDir) -> None:
    (sound.path / "alias").symlink_to("sub/notes.txt")
    (sound.path / "folder").symlink_to("sub")
    sidecars = _listed(sound)
    assert [item.name for item in sidecars.copied] == ["alias", "config.json", "folder/notes.txt", "sub/notes.txt"]
    for name in ("alias", "folder/notes.txt", "sub/notes.txt"):
        assert _read(sound, sidecars, name) == "notes"


@pytest.mark.parametrize("kind", ["link", "link to a link", "folder", "sibling with the same beginning"])
def test_a_link_that_was_put_there_meanwhile(sound: ModelDir, kind: str) -> None:
    sidecars = _listed(sound)
    name, outside = sound.path / "sub" / "notes.txt", sound.path.parent / "outside"
    name.unlink()
    if kind == "link":
        name.symlink_to(outside / "notes.txt")
    elif kind == "link to a link":
        (outside / "back").symlink_to(outside / "notes.txt")
        name.symlink_to(outside / "back")
    elif kind == "folder":
        name.parent.rmdir()
        name.parent.symlink_to(outside)
    else:
        _put(sound.path.parent / f"{sound.path.name}-2" / "notes.txt", "secret")
        name.symlink_to(sound.path.parent / f"{sound.path.name}-2" / "notes.txt")
    assert name.read_text() == "secret"
    with pytest.raises(CheckpointError, match=r"notes\.txt: lies outside the model directory, though it was listed"):
        _read(sound, sidecars, "sub/notes.txt")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
def test_what_is_no_file_any_more(sound: ModelDir, kind: str) -> None:
    sidecars = _listed(sound)
    name = sound.path / "sub" / "notes.txt"
    name.unlink()
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "folder":
        name.mkdir()
    elif kind == "device":
        name.symlink_to("/dev/zero")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CheckpointError, match="cannot be opened" if kind == "nothing" else "is not a regular file"):
        _read(sound, sidecars, "sub/notes.txt")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_blob_of_the_cache_is_inside_and_that_of_another_is_not(tmp_path: Path) -> None:
    built = ModelDir(tmp_path / "built")
    built.sharded()
    _put(built.path / "tokenizer.json", "tokens")
    hub = tmp_path / "hub"
    snapshot, blobs = hub / "models--me--tiny" / "snapshots" / "01", hub / "models--me--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in built.path.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    _put(hub / "models--me--private" / "blobs" / "tokenizer.json", "secret")
    cached = ModelDir.__new__(ModelDir)
    cached.path = snapshot
    sidecars = _listed(cached)
    assert _read(cached, sidecars, "tokenizer.json") == "tokens"
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../../models--me--private/blobs/tokenizer.json")
    with pytest.raises(CheckpointError, match="lies outside"):
        _read(cached, sidecars, "tokenizer.json")


def test_blobs_that_are_a_link_are_no_blobs(tmp_path: Path) -> None:
    """A folder that only looks like a cache: what its `blobs` leads to is somebody's home."""
    home = tmp_path / "home"
    _put(home / "secret.txt", "secret")
    snapshot = tmp_path / "clone" / "models--me--evil" / "snapshots" / "01"
    evil = ModelDir(snapshot)
    evil.sharded()
    (snapshot.parents[1] / "blobs").symlink_to(home)
    (snapshot / "notes.txt").symlink_to("../../blobs/secret.txt")
    assert (snapshot / "notes.txt").read_text() == "secret"
    sidecars = _listed(evil)
    assert [item.name for item in sidecars.copied] == ["config.json"]
    assert [(item.name, item.reason) for item in sidecars.omitted] == [
        ("notes.txt", "a link that leaves the model directory")
    ]
    with pytest.raises(CheckpointError, match="lies outside"):
        _read(evil, sidecars, "notes.txt")


def test_apply_does_not_bring_along_what_a_link_points_to_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "in")
    _put(source / "notes.txt", "notes!")
    _put(tmp_path / "secret.txt", "secret")

    def swapped(checkpoint: Checkpoint) -> Sidecars:
        found = list_sidecars(checkpoint)
        (source / "notes.txt").unlink()
        (source / "notes.txt").symlink_to(tmp_path / "secret.txt")
        return found

    monkeypatch.setattr(import_module("kconvert.convert.prepare"), "list_sidecars", swapped)
    with pytest.raises(CheckpointError, match=r"notes\.txt: lies outside the model directory"):
        apply_recipe("qwen3", source, tmp_path / "out", model_check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret.txt"]
