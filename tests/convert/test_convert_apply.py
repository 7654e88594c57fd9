"""`apply` from end to end: bytes, shards, order of gate and up, determinism, and what happens to an old output."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kconvert import load_converted
from kconvert.convert import build_job, default_output, final_items, prepare
from kconvert.errors import CheckpointError, OutputError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import INDEX_NAME, MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from tests.support import (
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    read_raw,
    unpacked,
    write_checkpoint,
)

STOCK_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
PACKED = "model.layers.1.mlp.gate_up_proj.weight"


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp"])
@pytest.mark.parametrize("source", ["qwen3_dir", "qwen3_sharded_dir"])
def test_cutting_by_the_manifest_restores_every_source(
    recipe: str, source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory: Path = request.getfixturevalue(source)
    output = convert(recipe, directory, tmp_path / "out").output
    manifest = load_manifest(output)
    written = read_raw(output)
    assert set(written) == {record.target for record in manifest.tensors}
    assert unpacked(manifest, written) == read_raw(directory)
    assert {origin.file for record in manifest.tensors for origin in record.origins} == {
        file.name for file in manifest.source_files
    }


def test_llama_too(llama_dir: Path, converted_llama_dir: Path) -> None:
    assert unpacked(load_manifest(converted_llama_dir), read_raw(converted_llama_dir)) == read_raw(llama_dir)


def test_a_group_split_over_shards(
    qwen3_sharded_dir: Path, converted_sharded_dir: Path, converted_qwen3_dir: Path
) -> None:
    """A1: gate and up lie in different shards, and the result is that of the unsharded file."""
    weight_map = json.loads((qwen3_sharded_dir / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert weight_map[GATE] != weight_map[UP]
    assert read_raw(converted_sharded_dir) == read_raw(converted_qwen3_dir)


@pytest.mark.parametrize("missing", [GATE, UP, "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_missing_member(tmp_path: Path, missing: str, model_check: bool, sharded: bool) -> None:
    """A2: the target and what it lacks are named, before anything is written."""
    tensors = qwen3_tensors()
    del tensors[missing]
    names = list(tensors)
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(), [names[:9], names[9:]] if sharded else None)
    words = [f"the checkpoint does not have {missing!r}" if "down" in missing else f"{PACKED!r} needs {missing!r}"]
    check_refused(CheckpointError, 4, words, "qwen3", source, tmp_path / "out", model_check=model_check)


def test_gate_rows_come_first_by_value(tmp_path: Path) -> None:
    """A3: x = [1, -1], gate = I, up = 2 I; silu(gate) * up = [1.4621, 0.5379], swapped it would be [1.7616, 0.2384]."""
    sizes = {
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
    one = torch.eye(2)
    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": torch.ones(10, 2),
        "lm_head.weight": torch.ones(10, 2),
        "model.norm.weight": torch.ones(2),
        **{f"{layer}.{name}_layernorm.weight": torch.ones(2) for name in ("input", "post_attention")},
        **{f"{layer}.self_attn.{name}_norm.weight": torch.ones(2) for name in "qk"},
        **{f"{layer}.self_attn.{name}_proj.weight": one.clone() for name in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": one,
        f"{layer}.mlp.up_proj.weight": 2 * one,
        f"{layer}.mlp.down_proj.weight": one.clone(),
    }
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(1, **sizes))
    output = convert("qwen3", source, tmp_path / "out").output
    stored = load_file(output / SINGLE_NAME)[f"{layer}.mlp.gate_up_proj.weight"]
    assert stored.tolist() == [[1, 0], [0, 1], [2, 0], [0, 2]]
    for kernels, name in (("auto", "cpu_fused_swiglu"), ("reference", "reference")):
        model = load_converted(output, kernels=kernels)
        assert [item.kernel for item in model.kconvert_report.modules if item.path == f"{layer}.mlp"] == [name]
        with torch.no_grad():
            found = model.model.layers[0].mlp(torch.tensor([[[1.0, -1.0]]]))
        torch.testing.assert_close(found, torch.tensor([[[1.4621, 0.5379]]]), rtol=0, atol=5e-5)
    record = load_manifest(output).tensors_by_target()[f"{layer}.mlp.gate_up_proj.weight"]
    assert [part.source.split(".")[-2] for part in record.parts] == ["gate_proj", "up_proj"]


def test_head_dim_need_not_be_hidden_by_heads(qwen3_dir: Path, converted_qwen3_dir: Path) -> None:
    """B9: q has 4 * 16 rows, hidden is 32; nothing is cut by the config."""
    layer = "model.layers.0.self_attn"
    written, read = read_raw(converted_qwen3_dir), read_raw(qwen3_dir)
    parts = [read[f"{layer}.{name}_proj.weight"] for name in "qkv"]
    assert [part.shape for part in parts] == [(64, 32), (32, 32), (32, 32)]
    packed = written[f"{layer}.qkv_proj.weight"]
    assert (packed.shape, packed.data) == ((128, 32), b"".join(part.data for part in parts))
    assert written[f"{layer}.o_proj.weight"] == read[f"{layer}.o_proj.weight"]


# --- the same bytes every time --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp"])
def test_the_output_is_the_same_wherever_it_is_made(qwen3_sharded_dir: Path, tmp_path: Path, recipe: str) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(qwen3_sharded_dir, moved)
    first = files_of(convert(recipe, qwen3_sharded_dir, tmp_path / "one").output)
    second = files_of(convert(recipe, moved, tmp_path / "deep" / "two").output)
    assert first == second
    assert MANIFEST_NAME in first
    assert SOURCE_HEADERS_NAME in first
    assert str(tmp_path).encode() not in first[MANIFEST_NAME]
    assert first[SOURCE_HEADERS_NAME][4:8] == bytes(4)  # the time in a gzip header: two runs within a second hide it


def test_the_source_is_not_touched(qwen3_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(qwen3_dir, source)
    before = {name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir() for name in [path.name]}
    convert("qwen3", source, tmp_path / "out")
    assert before == {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}


def test_progress_adds_up_and_nothing_is_published_before_it_is_prepared(qwen3_dir: Path, tmp_path: Path) -> None:
    output, seen, sizes = tmp_path / "out", list[int](), list[int]()

    def prepared(_: Any, job: Any) -> None:
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
        assert not seen
        sizes.append(job.size_bytes)

    result = convert("qwen3", qwen3_dir, output, on_prepared=prepared, on_progress=seen.append)
    last = ("config.json", SOURCE_HEADERS_NAME, MANIFEST_NAME)
    assert sum(seen) == sizes[0] == sum(path.stat().st_size for path in output.iterdir() if path.name not in last)
    assert result.bytes_transformed == 2 * (2 * 48 + (4 + 2 + 2) * 16) * 32 * 4
    assert (
        result.bytes_copied
        == sum(len(tensor.data) for tensor in read_raw(qwen3_dir).values()) - result.bytes_transformed
    )


# --- the index, old outputs -----------------------------------------------------------------------------


def test_the_index_is_our_own_and_fits_the_shards(qwen3_sharded_dir: Path, converted_sharded_dir: Path) -> None:
    """A7, B5: own weight map and an integer sum of tensor bytes; the source's index is not brought along."""
    index = json.loads((converted_sharded_dir / INDEX_NAME).read_bytes())
    held = {}
    for path in converted_sharded_dir.glob("*.safetensors"):
        held.update(dict.fromkeys(load_file(path), path.name))
    assert index["weight_map"] == held
    total = sum(len(tensor.data) for tensor in read_raw(qwen3_sharded_dir).values())
    assert index["metadata"] == {"total_size": total}
    assert type(index["metadata"]["total_size"]) is int
    assert [name for name in STOCK_NAMES if (converted_sharded_dir / name).exists()] == []
    assert not (converted_sharded_dir / SINGLE_NAME).exists()
    manifest = load_manifest(converted_sharded_dir)
    assert sorted(manifest.weight_files) == sorted(set(held.values()))


def test_a_single_file_has_no_index(converted_qwen3_dir: Path) -> None:
    assert sorted(path.name for path in converted_qwen3_dir.glob("*safetensors*")) == [SINGLE_NAME]


def test_index_then_manifest_come_last(qwen3_sharded_dir: Path) -> None:
    prepared = prepare("qwen3", qwen3_sharded_dir)
    last = [name for name, _ in final_items(prepared, {})]
    assert last == ["config.json", INDEX_NAME, SOURCE_HEADERS_NAME, MANIFEST_NAME]
    names = list(build_job(prepared.opened, prepared.plan).names())
    assert all(name.startswith("model.kconvert-") for name in names[:5])


def test_an_empty_output_is_used(qwen3_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (convert("qwen3", qwen3_dir, tmp_path / "out").output / MANIFEST_NAME).is_file()


@pytest.mark.parametrize("stale", ["model.safetensors", "model-00001-of-00010.safetensors", "notes.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_in_the_output_are_kept(qwen3_dir: Path, tmp_path: Path, stale: str, overwrite: bool) -> None:
    """A7 (b): nothing is put beside them, and nothing that kconvert did not write is removed."""
    output = tmp_path / "out"
    output.mkdir()
    (output / stale).write_bytes(b"mine")
    check_refused(
        OutputError, 7, ["holds files that kconvert did not write"], "qwen3", qwen3_dir, output, overwrite=overwrite
    )
    assert files_of(output) == {stale: b"mine"}


def test_a_second_run_with_fewer_shards(qwen3_sharded_dir: Path, qwen3_dir: Path, tmp_path: Path) -> None:
    """A7 (c): refused without `overwrite`; with it nothing of the first run is left."""
    output = convert("qwen3", qwen3_sharded_dir, tmp_path / "out").output
    first = files_of(output)
    check_refused(OutputError, 7, ["output exists", "--overwrite"], "qwen3", qwen3_dir, output)
    assert files_of(output) == first
    convert("qwen3", qwen3_dir, output, overwrite=True)
    assert files_of(output) == files_of(convert("qwen3", qwen3_dir, tmp_path / "fresh").output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def test_a_failed_second_run_keeps_the_first(qwen3_dir: Path, tmp_path: Path) -> None:
    output = convert("qwen3", qwen3_dir, tmp_path / "out").output
    first = files_of(output)
    tensors = qwen3_tensors()
    del tensors[UP]
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    check_refused(CheckpointError, 4, [UP], "qwen3", source, output, overwrite=True)
    assert files_of(output) == first


@pytest.mark.parametrize("where", ["same", "inside", "around", "link"])
def test_the_output_may_not_touch_the_source(qwen3_dir: Path, tmp_path: Path, where: str) -> None:
    """B3."""
    source = tmp_path / "above" / "in"
    shutil.copytree(qwen3_dir, source)
    (tmp_path / "link").symlink_to(source)
    output = {"same": source, "inside": source / "out", "around": tmp_path / "above", "link": tmp_path / "link"}[where]
    before = files_of(source)
    with pytest.raises(UsageError) as caught:
        convert("qwen3", source, output, overwrite=True)
    assert caught.value.exit_code == 2
    assert files_of(source) == before


def test_the_default_output_lies_beside_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_output(tmp_path / "qwen") == tmp_path / "qwen-kconvert"
    (tmp_path / "qwen").mkdir()
    monkeypatch.chdir(tmp_path / "qwen")
    assert default_output(Path()) == tmp_path / "qwen-kconvert"
    with pytest.raises(UsageError, match="lies in a Hub cache"):
        default_output(tmp_path / "models--a--b" / "snapshots" / "0123")


# --- stock loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["converted_qwen3_dir", "converted_sharded_dir", "converted_fused_dir"])
def test_a_stock_from_pretrained_stops(fixture: str, request: pytest.FixtureRequest) -> None:
    """A20: it must not start with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    directory: Path = request.getfixturevalue(fixture)
    choices: list[dict[str, Any]] = [{}, {"use_safetensors": True}, {"use_safetensors": False}]
    for kwargs in choices:
        for cls in (AutoModelForCausalLM, Qwen3ForCausalLM):
            with pytest.raises(OSError, match=r"no file named|does not appear to have a file named"):
                cls.from_pretrained(str(directory), **kwargs)


def test_and_so_it_does_where_the_config_names_its_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = qwen3_config(transformers_weights="mine.safetensors")
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config)
    (source / "model.safetensors").rename(source / "mine.safetensors")
    (source / "model.safetensors").write_bytes(b"never read")
    output = convert("qwen3", source, tmp_path / "out").output
    manifest = load_manifest(output)
    assert [file.name for file in manifest.source_files] == ["mine.safetensors"]
    assert [item.name for item in manifest.omitted] == ["model.safetensors"]
    assert sorted(path.name for path in output.iterdir()) == sorted(
        ["config.json", MANIFEST_NAME, SOURCE_HEADERS_NAME, SINGLE_NAME]
    )
    assert (output / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with pytest.raises(OSError, match=r"mine\.safetensors"):
        AutoModelForCausalLM.from_pretrained(str(output))
    assert torch.equal(load_converted(output).lm_head.weight, qwen3_tensors()["lm_head.weight"])


@pytest.mark.parametrize("again", ["qwen3", "qwen3-fused-norm-mlp", "llama"])
@pytest.mark.parametrize("fixture", ["converted_qwen3_dir", "converted_sharded_dir"])
def test_an_output_is_not_converted_again(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path, again: str
) -> None:
    """A11."""
    source: Path = request.getfixturevalue(fixture)
    for model_check in (True, False):
        words = ["already converted", MANIFEST_NAME, "give the original checkpoint"]
        check_refused(CheckpointError, 4, words, again, source, tmp_path / "out", model_check=model_check)


def test_nor_is_one_whose_manifest_is_gone(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(converted_qwen3_dir, source)
    (source / MANIFEST_NAME).unlink()
    check_refused(CheckpointError, 4, [SINGLE_NAME, "left over"], "qwen3", source, tmp_path / "out")


def test_every_tensor_in_a_file_is_aligned(converted_fused_dir: Path) -> None:
    from kconvert.checkpoint import DTYPE_BITS, read_header

    header = read_header(converted_fused_dir / SINGLE_NAME)
    assert header.data_offset % 8 == 0
    assert [entry.name for entry in header.tensors if entry.offset % (DTYPE_BITS[entry.dtype] // 8)] == []
    assert all(a.offset + a.size_bytes == b.offset for a, b in pairwise(header.tensors))
