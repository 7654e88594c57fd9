"""What goes along with the weights: B25, S2, S5, S8 on real files and links."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kconvert.checkpoint import Sidecars, list_sidecars, open_checkpoint
from kconvert.errors import CheckpointError
from tests.checkpoint.conftest import ModelDir


@pytest.fixture
def sound(model: ModelDir) -> ModelDir:
    model.sharded()
    return model


def _put(model: ModelDir, *names: str) -> None:
    for name in names:
        path = model.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def _list(model: ModelDir) -> Sidecars:
    return list_sidecars(open_checkpoint(model.path))


def _copied(result: Sidecars) -> list[str]:
    return [sidecar.name for sidecar in result.copied]


def _reasons(result: Sidecars) -> dict[str, str]:
    return {item.name: item.reason for item in result.omitted}


def test_all_files_but_weights_are_copied_sorted(sound: ModelDir) -> None:
    names = [
        ".gitattributes", "README.md", "chat_template.jinja", "generation_config.json", "preprocessor_config.json",
        "sub/deeper/vocab.txt", "sub/x.json", "tokenizer.model",
    ]  # fmt: skip
    _put(sound, *names)
    result = _list(sound)
    assert _copied(result) == sorted([*names, "config.json"])
    assert result.omitted == ()
    assert result.warnings == ()
    sizes = {sidecar.name: sidecar.size_bytes for sidecar in result.copied}
    assert sizes["sub/x.json"] == len("sub/x.json")


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "model.gguf", "optimizer.pt",
        "other.safetensors.index.json", "original/consolidated.00.pth", "sub/MODEL.BIN",
    ],
)  # fmt: skip
def test_stock_weight_names_stay_behind_at_any_depth(sound: ModelDir, name: str) -> None:
    _put(sound, name)
    result = _list(sound)
    assert list(_reasons(result)) == [name]
    assert _copied(result) == ["config.json"]


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "model-00003-of-00010.safetensors", "2_Dense/model.safetensors"]
)
def test_an_unindexed_stock_safetensors_file_stays_behind_with_a_warning(sound: ModelDir, name: str) -> None:
    sound.weights(name, "z") if "/" not in name else _put(sound, name)
    result = _list(sound)
    assert list(_reasons(result)) == [name]
    assert name in result.warnings[0]


def test_an_unindexed_file_of_another_name_is_copied_with_a_warning(sound: ModelDir) -> None:
    _put(sound, "projector.safetensors")
    result = _list(sound)
    assert _copied(result) == ["config.json", "projector.safetensors"]
    assert len(result.warnings) == 1
    assert "projector.safetensors" in result.warnings[0]


def test_weights_chosen_by_the_config_are_not_copied(model: ModelDir) -> None:
    model.weights("sub/mine.safetensors", "a")
    model.index({"a": "sub/mine.safetensors"}, "my.safetensors.index.json")
    model.config({"transformers_weights": "my.safetensors.index.json"})
    result = _list(model)
    assert _copied(result) == ["config.json"]
    assert result.omitted == ()


def test_own_names_at_the_top_are_never_brought_along(sound: ModelDir) -> None:
    _put(sound, "kconvert_kernels/abc/layers.py", "kconvert_source_headers.json.gz", "sub/kconvert_kernels/x.txt")
    result = _list(sound)
    assert list(_reasons(result)) == ["kconvert_kernels", "kconvert_source_headers.json.gz"]
    assert _copied(result) == ["config.json", "sub/kconvert_kernels/x.txt"]
    assert len(result.warnings) == 2


@pytest.mark.parametrize("folder", [".git", ".cache", "__pycache__", "sub/.cache", "sub/__pycache__"])
def test_caches_and_version_control_stay_behind(sound: ModelDir, folder: str) -> None:
    _put(sound, f"{folder}/x")
    result = _list(sound)
    assert list(_reasons(result)) == [folder]
    assert _copied(result) == ["config.json"]
    assert result.warnings == ()


def test_model_code_is_copied_and_said_not_to_be_run(sound: ModelDir) -> None:
    _put(sound, "modeling_x.py", "sub/more.py")
    result = _list(sound)
    assert _copied(result) == ["config.json", "modeling_x.py", "sub/more.py"]
    (warning,) = result.warnings
    assert "modeling_x.py" in warning
    assert "not" in warning
    assert "run" in warning


def test_what_is_no_file_stays_behind(sound: ModelDir) -> None:
    os.mkfifo(sound.path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(sound.path)  # a socket's path may only have about 100 characters
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        result = _list(sound)
    assert _reasons(result) == {"pipe": "not a regular file", "socket": "not a regular file"}
    assert len(result.warnings) == 2


@pytest.mark.parametrize("name", [b"bad\xff.txt", b"a\\b.txt", b"new\nline.txt", b" blank.txt"])
def test_a_name_that_no_manifest_may_hold_stays_behind(sound: ModelDir, name: bytes) -> None:
    (sound.path / os.fsdecode(name)).write_text("")
    result = _list(sound)
    assert _copied(result) == ["config.json"]
    assert "its name is refused" in result.warnings[0]
    result.warnings[0].encode()


def test_links_inside_the_tree_are_followed(sound: ModelDir) -> None:
    _put(sound, "sub/x.txt")
    (sound.path / "alias.txt").symlink_to("sub/x.txt")
    (sound.path / "absolute.txt").symlink_to(sound.path / "sub" / "x.txt")
    (sound.path / "again").symlink_to("sub")
    result = _list(sound)
    assert _copied(result) == ["absolute.txt", "again/x.txt", "alias.txt", "config.json", "sub/x.txt"]
    assert {s.name: s.size_bytes for s in result.copied}["alias.txt"] == len("sub/x.txt")
    assert result.warnings == ()


@pytest.mark.parametrize("kind", ["file", "folder", "link to a link", "sibling with the same beginning", "in a folder"])
def test_a_link_that_leaves_the_tree_is_not_followed(sound: ModelDir, kind: str) -> None:
    outside = sound.path.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    name = "notes"
    target: Path = outside / "secret.txt"
    if kind == "folder":
        target = outside
    elif kind == "link to a link":
        (outside / "back").symlink_to(outside / "secret.txt")
        target = outside / "back"
    elif kind == "sibling with the same beginning":
        target = sound.path.parent / "model2"
        target.write_text("secret")
    elif kind == "in a folder":
        (sound.path / "sub").mkdir()
        name = "sub/notes"
    (sound.path / name).symlink_to(target)
    result = _list(sound)
    assert _reasons(result) == {name: "a link that leaves the model directory"}
    assert _copied(result) == ["config.json"]
    assert name in result.warnings[0]


def test_a_link_into_a_folder_that_stays_behind_is_not_followed(sound: ModelDir) -> None:
    _put(sound, ".git/config")
    (sound.path / "notes").symlink_to(".git/config")
    assert set(_reasons(_list(sound))) == {".git", "notes"}


@pytest.mark.parametrize("target", ["gone", "notes"], ids=["broken", "to itself"])
def test_a_broken_link_stays_behind_with_a_warning(sound: ModelDir, target: str) -> None:
    (sound.path / "notes").symlink_to(target)
    result = _list(sound)
    assert _reasons(result) == {"notes": "a broken link"}
    assert "notes" in result.warnings[0]


def test_a_second_name_of_the_weights_is_not_copied(sound: ModelDir) -> None:
    (sound.path / "alias").symlink_to("model-00001-of-00002.safetensors")
    result = _list(sound)
    assert _copied(result) == ["config.json"]
    assert _reasons(result) == {"alias": "a second name of weights that were read"}


def test_folders_that_link_to_each_other_end(sound: ModelDir) -> None:
    folders = [f"f{number}" for number in range(12)]
    for folder in folders:
        _put(sound, f"{folder}/x.txt")
        for other in folders:
            (sound.path / folder / f"to_{other}").symlink_to(f"../{other}")
        (sound.path / folder / "up").symlink_to("..")
    result = _list(sound)
    copied = _copied(result)
    assert "f0/to_f1/x.txt" in copied
    assert len(copied) == 1 + 12 + 12 * 11
    assert "f0/to_f0" in _reasons(result)
    assert "f0/up" in _reasons(result)


def test_a_config_behind_a_link_that_leaves_the_tree_is_an_error(sound: ModelDir) -> None:
    config = sound.path / "config.json"
    config.rename(sound.path.parent / "elsewhere.json")
    config.symlink_to(sound.path.parent / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"config\.json: a link that leaves"):
        _list(sound)


@pytest.mark.parametrize("through_link", [False, True])
def test_a_hub_snapshot_is_followed_into_its_own_blobs_only(tmp_path: Path, through_link: bool) -> None:
    repo = tmp_path / "hub" / "models--me--tiny"
    other = tmp_path / "hub" / "models--me--private" / "blobs"
    other.mkdir(parents=True)
    (other / "sha9").write_text("secret")
    built = ModelDir(tmp_path / "built")
    built.sharded()
    _put(built, "tokenizer.json", "sub/x.json", "pytorch_model.bin")
    snapshot = repo / "snapshots" / "0123"
    (repo / "blobs").mkdir(parents=True)
    files = sorted(path for path in built.path.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        link = snapshot / path.relative_to(built.path)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(repo / "blobs" / f"sha{number}")
        link.symlink_to(os.path.relpath(repo / "blobs" / f"sha{number}", link.parent))
    (snapshot / "stolen.json").symlink_to("../../../models--me--private/blobs/sha9")
    (snapshot / "blobs").symlink_to("../../blobs")
    (repo / "blobs" / "folder").mkdir()
    (snapshot / "folder").symlink_to("../../blobs/folder")
    model_dir = snapshot
    if through_link:
        model_dir = tmp_path / "link"
        model_dir.symlink_to(snapshot)
    result = list_sidecars(open_checkpoint(model_dir))
    assert _copied(result) == ["config.json", "sub/x.json", "tokenizer.json"]
    assert set(_reasons(result)) == {"blobs", "folder", "pytorch_model.bin", "stolen.json"}
    assert [sidecar.path for sidecar in result.copied][2] == model_dir / "tokenizer.json"
