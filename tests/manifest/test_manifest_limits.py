"""Files in a manifest's place that never end, or that hold more than a manifest may."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kconvert.errors import ManifestError
from kconvert.manifest import canonical_json, load_manifest, sha256_digest
from kconvert.names import MANIFEST_NAME
from tests.fuzz.checkpoints import prepared_manifests


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/dev/null"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ManifestError, match=r"cannot be read .*not a regular file") as caught:
        load_manifest(tmp_path)
    assert str(path) in str(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_beyond_all_sizes_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / MANIFEST_NAME
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file
    monkeypatch.setattr("kconvert.manifest.schema._LIMIT_BYTES", 1000)
    with pytest.raises(ManifestError, match="larger than the 1000 bytes allowed"):
        load_manifest(tmp_path)


def test_what_would_be_too_large_to_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(prepared_manifests()[0])
    manifest = load_manifest(tmp_path)
    size = len(manifest.to_bytes())
    monkeypatch.setattr("kconvert.manifest.schema._LIMIT_BYTES", size)
    assert len(manifest.to_bytes()) == size
    monkeypatch.setattr("kconvert.manifest.schema._LIMIT_BYTES", size - 1)
    with pytest.raises(ManifestError, match=f"the manifest would have {size} bytes, {size - 1} are allowed"):
        manifest.to_bytes()


def _changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A sound manifest with one change, and the digest that fits it."""
    value: dict[str, Any] = json.loads(prepared_manifests()[0])
    del value["digest"]
    change(value)
    return canonical_json({**value, "digest": sha256_digest(canonical_json(value))})


def _with_facts(facts: object) -> bytes:
    return _changed(lambda value: value["patches"][0].update(facts=facts))


@pytest.mark.parametrize("place", ["target", "part", "origin"])
@pytest.mark.parametrize(
    "shape", [[2**60 + 1], [2**31, 2**30], [2**60] * 2000, [2**40, 2**40, 0], [10**4000], [-(2**61)]]
)
def test_shapes_beyond_all_tensors(shape: list[int], place: str, tmp_path: Path) -> None:
    """A product of very many numbers takes very long."""

    def change(value: dict[str, Any]) -> None:
        record = value["tensors"][0]
        part = record["parts"][0]
        {"target": record, "part": part, "origin": part["origins"][0]}[place]["shape"] = shape

    (tmp_path / MANIFEST_NAME).write_bytes(_changed(change))
    with pytest.raises(ManifestError, match=r"a shape has more than 2\*\*60 elements"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("place", ["part", "origin"])
@pytest.mark.parametrize(
    "piece",
    [[0, 0, *(number for dim in range(61, 0, -1) for number in (2, 2 ** (dim - 1), 2 ** (dim - 1)))], [2**61, 0], [0, 0, 2, 1, 10**90]],
    ids=["61 dims", "start", "stride"],
)  # fmt: skip
def test_pieces_beyond_all_tensors(piece: list[int], place: str, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        part = value["tensors"][0]["parts"][0]
        (part if place == "part" else part["origins"][0])["pieces"] = [piece]

    (tmp_path / MANIFEST_NAME).write_bytes(_changed(change))
    with pytest.raises(ManifestError, match="a piece has more dims or steps than any tensor"):
        load_manifest(tmp_path)


def test_facts_are_single_values(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    facts = {"Qwen3RMSNorm": {"offset": 0.0, "cast_first": True, "kind": "llama", "other": None}}
    path.write_bytes(_with_facts(facts))
    assert load_manifest(tmp_path).patches[0].facts == facts


@pytest.mark.parametrize("depth", [1, 500])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_facts_that_go_on_and_on(kind: str, depth: int, tmp_path: Path) -> None:
    """Such a manifest could be read, and not be written again."""
    fact: Any = 1
    for _ in range(depth):
        fact = [fact] if kind == "list" else {"a": fact}
    (tmp_path / MANIFEST_NAME).write_bytes(_with_facts({"Qwen3RMSNorm": {"offset": fact}}))
    with pytest.raises(ManifestError, match="is no single value"):
        load_manifest(tmp_path)
