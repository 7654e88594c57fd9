"""How an output is written: beside the check, with digests, in shards of a size, with links."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kconvert import load_converted
from kconvert.cli.app import run
from kconvert.convert import apply as apply_module
from kconvert.convert.prepare import Opened, Prepared, check, plan_of_files
from kconvert.errors import CheckpointError, PreflightError
from kconvert.manifest import load_manifest
from tests.support import check_refused, convert, qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe

NORM = """  - kernel: cpu_fused_rmsnorm
    replace: {class: Qwen3RMSNorm, path: "model.norm"}
"""


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---- beside the check


def test_bytes_move_while_the_check_runs(
    qwen3_dir: Path, converted_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def looking(opened: Opened, **kw: Any) -> Prepared:
        sizes.extend(path.stat().st_size for path in (tmp_path / "out.partial" / "output").glob("*.safetensors"))
        return check(opened, **kw)

    monkeypatch.setattr(apply_module, "check", looking)
    result = convert("qwen3", qwen3_dir, tmp_path / "out")
    assert sizes == [(result.output / "model.kconvert.safetensors").stat().st_size]
    assert content_of(result.output) == content_of(converted_qwen3_dir)


def test_nothing_is_left_where_the_check_fails_meanwhile(qwen3_dir: Path, tmp_path: Path) -> None:
    """The file's name for a tensor is that of the model, but its shape is not: only the model shows that."""
    tensors = qwen3_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].repeat(2)
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    check_refused(CheckpointError, 4, ["model.norm.weight"], "qwen3", source, tmp_path / "out")


def test_what_the_check_comes_to_is_written(
    qwen3_dir: Path, converted_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plan than that of the files alone: what was copied early is dropped."""
    early: list[int] = []

    def other(opened: Opened, **kw: Any) -> Any:
        early.append(1)
        return plan_of_files(opened, max_shard_bytes=3000)

    monkeypatch.setattr(apply_module, "plan_of_files", other)
    result = convert("qwen3", qwen3_dir, tmp_path / "out")
    assert early
    assert content_of(result.output) == content_of(converted_qwen3_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# ---- digests


def test_digests_of_all_tensors(qwen3_sharded_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert run(["apply", "qwen3", str(qwen3_sharded_dir), "-o", str(output), "--digests", "--json", "-q"]) == 0
    value = json.loads(capsys.readouterr().out)
    written = read_raw(output)
    assert value["digests"] == len(written)
    manifest = load_manifest(output)
    assert manifest.digests == {name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in written.items()}
    without = convert("qwen3", qwen3_sharded_dir, tmp_path / "without").output
    assert load_manifest(without).digests is None
    assert {path.name: path.read_bytes() for path in output.glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in without.glob("*.safetensors")
    }
    assert load_converted(output) is not None


# ---- shards of a size


def test_shards_of_a_size_load_the_same(qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert run(["apply", "qwen3", str(qwen3_dir), "-o", str(output), "--max-shard-size", "40KB", "-q"]) == 0
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 2
    whole = convert("qwen3", qwen3_dir, tmp_path / "whole").output
    assert read_raw(output) == read_raw(whole)
    sizes = {name: len(tensor.data) for name, tensor in read_raw(output).items()}
    index = json.loads((output / "model.safetensors.index.kconvert.json").read_bytes())["weight_map"]
    for path in files:
        held = [size for name, size in sizes.items() if index[name] == path.name]
        assert sum(held) <= 40_000 or len(held) == 1
    assert load_converted(output) is not None


# ---- links


def test_unchanged_files_are_linked_and_no_others(qwen3_sharded_dir: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", NORM)
    copied = convert(recipe, qwen3_sharded_dir, tmp_path / "copied")
    linked = convert(recipe, qwen3_sharded_dir, tmp_path / "linked", reuse="hardlink")
    assert content_of(linked.output) == content_of(copied.output)
    sources = sorted(qwen3_sharded_dir.glob("*.safetensors"))
    outputs = sorted(linked.output.glob("*.safetensors"))
    assert [one.samefile(two) for one, two in zip(sources, outputs, strict=True)] == [True] * len(sources)
    assert linked.bytes_linked == sum(path.stat().st_size for path in sources)
    assert copied.bytes_linked == 0
    assert [path.stat().st_nlink for path in copied.output.glob("*.safetensors")] == [1] * len(sources)
    packed = convert("qwen3", qwen3_sharded_dir, tmp_path / "packed", reuse="hardlink")
    same = {path.name for path in packed.output.glob("*.safetensors") if path.stat().st_nlink > 1}
    for shard in packed.prepared.plan.shards:
        assert (shard.name in same) == (shard.same_as is not None)


def test_a_reuse_that_there_is_not(qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["apply", "qwen3", str(qwen3_dir), "-o", str(tmp_path / "out"), "--reuse", "symlink"]) == 2
    assert "--reuse 'symlink' is unknown; one of copy, hardlink, reflink" in capsys.readouterr().err


def test_links_to_another_file_system_are_refused(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", link)
    recipe = write_recipe(tmp_path / "r.yaml", NORM)
    words = ["cannot be used again as a hardlink: it is on another file system", "use --reuse copy"]
    check_refused(PreflightError, 6, words, recipe, qwen3_dir, tmp_path / "out", reuse="hardlink")
