"""Damaged, hostile and merely odd sources, from end to end: one clean error and nothing written, or a whole result."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert import load_converted
from kconvert.errors import CheckpointError, KernelRefusedError, TrustError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import KERNELS_DIR, MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from tests.support import (
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    write_checkpoint,
    write_recipe,
    write_safetensors,
)

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = list(qwen3_tensors())


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(), [NAMES[:9], NAMES[9:]])


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def expect_refused(source: Path, *words: str, **kw: Any) -> None:
    """Refused as a damaged checkpoint, with and without the structural check."""
    for model_check in (True, False):
        output = source.parent / "out"
        check_refused(CheckpointError, 4, words, "qwen3", source, output, model_check=model_check, **kw)


# --- files that disagree --------------------------------------------------------------------------------


def test_a_tensor_in_two_files(sharded: Path) -> None:
    """A8."""
    first = {name: raw(qwen3_tensors()[name]) for name in NAMES[:9]}
    write_safetensors(sharded / ONE, {**first, NAMES[12]: raw(torch.zeros(16, 8))})
    expect_refused(sharded, f"tensor {NAMES[12]!r} is in two files", ONE, TWO)


def test_a_file_that_the_index_does_not_name(sharded: Path, tmp_path: Path) -> None:
    """A8: `consolidated.safetensors` beside the shards is neither read nor copied."""
    other = {name: raw(torch.full_like(tensor, -1)) for name, tensor in qwen3_tensors().items()}
    write_safetensors(sharded / "consolidated.safetensors", other)
    output = convert("qwen3", sharded, tmp_path / "out").output
    assert read_raw(output)["lm_head.weight"] == raw(qwen3_tensors()["lm_head.weight"])
    assert not (output / "consolidated.safetensors").exists()
    assert [item.name for item in load_manifest(output).omitted] == ["consolidated.safetensors"]


def test_a_copy_beside_a_single_file(single: Path, tmp_path: Path) -> None:
    """A8: the other way in which `consolidated.safetensors` is published."""
    other = {name: raw(torch.full_like(tensor, -1)) for name, tensor in qwen3_tensors().items()}
    expected = read_raw(convert("qwen3", single, tmp_path / "alone").output)
    write_safetensors(single / "consolidated.safetensors", other)
    result = convert("qwen3", single, tmp_path / "out")
    assert read_raw(result.output) == expected
    assert [item.name for item in load_manifest(result.output).omitted] == ["consolidated.safetensors"]
    assert any("'consolidated.safetensors' is not copied" in warning for warning in result.prepared.warnings)


def test_two_files_and_no_index(single: Path) -> None:
    """A8: nothing says which of the two is meant."""
    (single / "model.safetensors").rename(single / ONE)
    write_safetensors(single / "consolidated.safetensors", {"lm_head.weight": raw(torch.zeros(10, 8))})
    expect_refused(single, "consolidated.safetensors", ONE, f"but neither model.safetensors nor {INDEX}")


def test_a_single_file_beside_an_index_of_others(sharded: Path) -> None:
    write_safetensors(sharded / "model.safetensors", {"a": raw(torch.zeros(1))})
    expect_refused(sharded, "holds both model.safetensors and", INDEX)


def test_a_missing_shard(sharded: Path) -> None:
    """A9 (a)."""
    (sharded / TWO).unlink()
    expect_refused(sharded, TWO, "which is missing")


def test_an_indexed_tensor_that_no_shard_has(sharded: Path) -> None:
    """A9 (b)."""
    edit_json(sharded / INDEX, lambda value: value["weight_map"].update({"mtp.fc.weight": TWO}))
    expect_refused(sharded, f"maps 'mtp.fc.weight' to {TWO}, which does not hold it")


def test_a_tensor_that_the_index_omits(sharded: Path, tmp_path: Path) -> None:
    """A9 (c): kept, with a warning."""
    edit_json(sharded / INDEX, lambda value: value["weight_map"].pop("lm_head.weight"))
    result = convert("qwen3", sharded, tmp_path / "out")
    assert read_raw(result.output)["lm_head.weight"] == raw(qwen3_tensors()["lm_head.weight"])
    assert any("omits (lm_head.weight)" in warning for warning in result.prepared.warnings)


def test_a_part_of_a_group_that_the_index_omits(sharded: Path, tmp_path: Path) -> None:
    """A9 (c): it is packed with the others, and not taken for missing."""
    expected = read_raw(convert("qwen3", sharded, tmp_path / "whole").output)
    up = "model.layers.0.mlp.up_proj.weight"
    edit_json(sharded / INDEX, lambda value: value["weight_map"].pop(up))
    result = convert("qwen3", sharded, tmp_path / "out")
    assert read_raw(result.output) == expected
    assert any(f"omits ({up})" in warning for warning in result.prepared.warnings)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_last_shard_that_is_cut(sharded: Path, cut: int) -> None:
    """B2: a download that was stopped."""
    data = (sharded / TWO).read_bytes()
    (sharded / TWO).write_bytes(data[:-cut])
    expect_refused(sharded, TWO, "download or save the file again")


def test_shards_in_folders(sharded: Path, tmp_path: Path) -> None:
    """A9 (d)."""
    (sharded / "model.layers.0").mkdir()
    (sharded / ONE).rename(sharded / "model.layers.0" / "layer.safetensors")

    def move(value: dict[str, Any]) -> None:
        for name in NAMES[:9]:
            value["weight_map"][name] = "model.layers.0/layer.safetensors"

    edit_json(sharded / INDEX, move)
    flat = write_checkpoint(tmp_path / "flat", qwen3_tensors(), qwen3_config())
    assert read_raw(convert("qwen3", sharded, tmp_path / "a").output) == read_raw(
        convert("qwen3", flat, tmp_path / "b").output
    )
    files = {origin.file for record in load_manifest(tmp_path / "a").tensors for origin in record.origins}
    assert files == {"model.layers.0/layer.safetensors", TWO}
    assert not (tmp_path / "a" / "model.layers.0").exists()


def test_other_weights_are_copied_as_they_are(single: Path, tmp_path: Path) -> None:
    """A9 (f)."""
    write_safetensors(single / "projector.safetensors", {"p": raw(torch.ones(2))})
    result = convert("qwen3", single, tmp_path / "out")
    assert (result.output / "projector.safetensors").read_bytes() == (single / "projector.safetensors").read_bytes()
    assert any("'projector.safetensors' is copied as it is" in warning for warning in result.prepared.warnings)
    assert "p" not in load_manifest(result.output).tensors_by_target()


# --- hostile names, links, headers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/abs/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", "a\0.safetensors", "", 7,
     None, ["x"], "sub//x.safetensors", "./x.safetensors", "x.bin"],
)  # fmt: skip
def test_file_names_of_an_index(sharded: Path, name: object) -> None:
    """S1.  The named file exists where it can, with the right tensors: it must not be opened all the same."""
    evil = sharded.parent / "evil.safetensors"
    evil.write_bytes((sharded / TWO).read_bytes())

    def point(value: dict[str, Any]) -> None:
        for key in NAMES[9:]:
            value["weight_map"][key] = name

    edit_json(sharded / INDEX, point)
    expect_refused(sharded, f"weight_map maps {NAMES[9]!r} to")


def test_a_shard_that_is_a_directory(sharded: Path) -> None:
    (sharded / TWO).unlink()
    (sharded / TWO).mkdir()
    expect_refused(sharded, TWO, "is not a regular file")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/abs/x.safetensors", "a.bin", 7])
def test_the_file_that_a_config_names(tmp_path: Path, name: object) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(transformers_weights=name))
    (tmp_path / "evil.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    expect_refused(source, "transformers_weights names", repr(name))


def hub_cache(root: Path, source: Path) -> Path:
    """`source` as the Hub cache stores it: `snapshots/<rev>/NAME` links to `blobs/<hash>`."""
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / "0123abcd"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(repo / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_hub_cache(sharded: Path, tmp_path: Path) -> None:
    """S2: links are followed, names stay, and the output holds real files."""
    (sharded / "tokenizer.model").write_bytes(b"tokens")
    expected = convert("qwen3", sharded, tmp_path / "direct").output
    snapshot = hub_cache(tmp_path / "hub", sharded)
    with pytest.raises(UsageError, match="lies in a Hub cache") as caught:
        convert("qwen3", snapshot, None)  # type: ignore[arg-type]  # no output given
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in snapshot.parent.iterdir()) == ["0123abcd"]
    output = convert("qwen3", snapshot, tmp_path / "out").output
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {
        path.name: path.read_bytes() for path in expected.iterdir()
    }
    assert [path.name for path in output.iterdir() if path.is_symlink() or not path.is_file()] == []
    (tmp_path / "link").symlink_to(snapshot)
    assert read_raw(convert("qwen3", tmp_path / "link", tmp_path / "out2").output) == read_raw(output)


def test_a_broken_link_in_a_hub_cache(sharded: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "hub", sharded)
    Path(os.path.realpath(snapshot / TWO)).unlink()
    words = [TWO, "which is a broken link"]
    check_refused(CheckpointError, 4, words, "qwen3", snapshot, tmp_path / "out")


def header(fields: object) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(shape: list[int], begin: int, end: int, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}) + bytes(12),
        header({"a": tensor([2], 0, 8), "b": tensor([2], 12, 20)}) + bytes(20),
        header({"a": tensor([2], 0, 8)}) + bytes(9),
        header({"a": tensor([2], 0, 8)}) + bytes(7),
        header(b'{"a": %s, "a": %s}' % ((json.dumps(tensor([2], 0, 8)).encode(),) * 2)) + bytes(8),
        header({"a": tensor([2**32, 2**32], 0, 0)}),
        header({"a": tensor([-1], 0, 4)}) + bytes(4),
        header({"a": tensor([2], 0, 8, "F31")}) + bytes(8),
        header({"a": tensor([2], 0, 8, None)}) + bytes(8),
        header({"a": tensor([2], 0, 8), "__metadata__": {"n": 1}}) + bytes(8),
        header({"a": tensor([2], 8, 0)}) + bytes(8),
        header(b"[]"),
        header(b"{"),
        header(b'{"a\xff": 1}'),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
    ids=["empty", "short", "length-2^63", "length-1e9", "overlap", "hole", "trailing", "truncated", "twice", "2^64", "negative", "dtype",
         "no-dtype", "metadata", "backwards", "list", "cut", "utf-8", "lfs"],
)  # fmt: skip
def test_malformed_headers(single: Path, content: bytes) -> None:
    """S3."""
    (single / "model.safetensors").write_bytes(content)
    expect_refused(single, "model.safetensors")


def test_pickle_is_never_opened(single: Path, tmp_path: Path) -> None:
    """S4: a pickle alone is refused; beside safetensors it stays behind."""
    marker = tmp_path / "marker"
    attack = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    (single / "pytorch_model.bin").write_bytes(attack)
    output = convert("qwen3", single, tmp_path / "out").output
    assert not (output / "pytorch_model.bin").exists()
    (single / "model.safetensors").unlink()
    check_refused(CheckpointError, 4, ["holds only pickle weights"], "qwen3", single, tmp_path / "out2")
    assert not marker.exists()


# --- side files, and code ---------------------------------------------------------------------------------


def test_side_files(single: Path, tmp_path: Path) -> None:
    """B25."""
    kept = {
        "generation_config.json": b'{"temperature": 0.5}',
        "chat_template.jinja": b"{{ x }}",
        "tokenizer.model": bytes(range(256)),
        "tokenizer.json": b"{}",
        "preprocessor_config.json": b"{}",
        "README.md": b"# model",
        "1_Pooling/config.json": b"{}",
        "empty.txt": b"",
    }
    left = {
        "pytorch_model.bin": b"",
        "pytorch_model.bin.index.json": b"{}",
        "model.safetensors.index.fp16.json.index.json": b"{}",
        "tf_model.h5": b"",
        "sub/model.safetensors": b"",
        "model-00003-of-00009.safetensors": b"",
        ".git/config": b"x",
    }
    for name, data in {**kept, **left}.items():
        (single / name).parent.mkdir(parents=True, exist_ok=True)
        (single / name).write_bytes(data)
    output = convert("qwen3", single, tmp_path / "out").output
    found = {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    config = {"config.json": (single / "config.json").read_bytes()}
    own = {name for name in found if name.startswith(("kconvert_", "model.kconvert"))}
    assert {name: data for name, data in found.items() if name not in own} == {**kept, **config}
    manifest = load_manifest(output)
    assert set(manifest.sidecars) == {*kept, "config.json"}
    assert {item.name for item in manifest.omitted} == left.keys() - {".git/config"} | {".git"}
    assert all(item.reason for item in manifest.omitted)


def test_names_that_are_not_utf8(single: Path, tmp_path: Path) -> None:
    """A file system takes any bytes as a name; a manifest does not."""
    for name in (b"x\xe9.txt", b"x\xe9.safetensors", b"sub/\xff.json", b"d\xe9/x.txt"):
        path = single / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (single / "x\u00e9.txt").write_text("y")
    result = convert("qwen3", single, tmp_path / "out")
    shown = ["d\\udce9", "sub/\\udcff.json", "x\\udce9.safetensors", "x\\udce9.txt"]
    for text in shown:
        (warning,) = [item for item in result.prepared.warnings if item.startswith(f"{text!r} is not copied")]
        assert "not valid UTF-8" in warning
        warning.encode()
    manifest = load_manifest(result.output)
    assert [item.name for item in manifest.omitted] == shown
    assert set(manifest.sidecars) == {"config.json", "x\u00e9.txt"}
    names = {os.fsencode(path.relative_to(result.output)) for path in result.output.rglob("*") if path.is_file()}
    assert names == {
        b"config.json",
        "x\u00e9.txt".encode(),
        *(name.encode() for name in (MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME)),
    }
    assert load_converted(result.output) is not None
    convert("qwen3", single, tmp_path / "out", overwrite=True)


def test_kernel_packages_of_the_source_stay_behind(single: Path, tmp_path: Path) -> None:
    """S5: a folder under our own name could otherwise be taken for packages that `apply` has put there."""
    package = single / KERNELS_DIR / ("0" * 64)
    package.mkdir(parents=True)
    (package / "layers.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()")
    result = convert("qwen3", single, tmp_path / "out")
    assert not (result.output / KERNELS_DIR).exists()
    assert [item.name for item in load_manifest(result.output).omitted] == [KERNELS_DIR]
    assert any(f"'{KERNELS_DIR}' is not copied" in warning for warning in result.prepared.warnings)
    load_converted(result.output, trust_remote_code=True)
    assert not (tmp_path / "marker").exists()


def test_model_code_is_copied_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = qwen3_config(
        auto_map={"AutoModelForCausalLM": "modeling_x.Qwen3ForCausalLM", "AutoConfig": "modeling_x.C"}
    )
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config)
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    (source / "modeling_x.py").write_text(code)
    before = set(sys.modules)
    for number, model_check in enumerate((True, False)):
        result = convert("qwen3", source, tmp_path / f"out{number}", model_check=model_check, trust_remote_code=True)
        assert (result.output / "modeling_x.py").read_text() == code
        assert any(
            "modeling_x.py" in warning and "was not and will not be run" in warning
            for warning in result.prepared.warnings
        )
    assert not marker.exists()
    assert [name for name in set(sys.modules) - before if "modeling_x" in name] == []


def test_a_class_that_only_the_directory_has(tmp_path: Path) -> None:
    config = qwen3_config(architectures=["XForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config)
    (source / "modeling_x.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'marker')!r}).touch()\n")
    words = ["XForCausalLM is defined by code in this directory"]
    check_refused(TrustError, 8, words, "qwen3", source, tmp_path / "out", trust_remote_code=True)
    assert not (tmp_path / "marker").exists()
    assert (convert("qwen3", source, tmp_path / "out", model_check=False).output / MANIFEST_NAME).is_file()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_code_from_the_hub(tmp_path: Path, key: str) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), {**qwen3_config(), key: "evil/kernel"})
    check_refused(TrustError, 8, ["attention code from the Hub", "'evil/kernel'"], "qwen3", source, tmp_path / "out")


def test_a_kernel_from_the_hub(single: Path, tmp_path: Path) -> None:
    """Nothing is fetched for a recipe that does not trust it; what it trusts is looked for, and there is no network here."""
    target = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: evil/kernel:Thing\n{target}")
    words = ["r.yaml:5", "'evil/kernel:Thing' runs code, and the recipe does not trust it"]
    check_refused(TrustError, 8, words, recipe, single, tmp_path / "out", trust_remote_code=True)
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: evil/kernel:Thing\n    trust_remote_code: true\n{target}")
    for trusted in (True, False):
        words = ["r.yaml:5", "'evil/kernel:Thing'", "is not whole in the Hub cache, and HF_HUB_OFFLINE is set"]
        check_refused(KernelRefusedError, 8, words, recipe, single, tmp_path / "out", trust_remote_code=trusted)


def test_a_local_package_needs_the_trust_of_recipe_and_machine(single: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "layers.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()")
    target = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: ./mine:Thing\n{target}")
    words = ["r.yaml:5", "'./mine:Thing' runs code, and the recipe does not trust it"]
    check_refused(TrustError, 8, words, recipe, single, tmp_path / "out", trust_remote_code=True)
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: ./mine:Thing\n    trust_remote_code: true\n{target}")
    check_refused(TrustError, 8, ["./mine:Thing", "--trust-remote-code"], recipe, single, tmp_path / "out")
    assert not (tmp_path / "marker").exists()


# --- quantised, and renamed ------------------------------------------------------------------------------


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    config = qwen3_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config)
    patch = (
        '  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}\n'
    )
    recipe = write_recipe(tmp_path / "r.yaml", patch)
    for number, model_check in enumerate((True, False)):
        words = ["the checkpoint is quantised (fp8)", "'qkv_proj'"]
        check_refused(CheckpointError, 4, words, "qwen3", source, tmp_path / "out", model_check=model_check)
        output = convert(recipe, source, tmp_path / f"out{number}", model_check=model_check).output
        assert read_raw(output) == read_raw(source)
        assert json.loads((output / "config.json").read_bytes())["quantization_config"]["quant_method"] == "fp8"
        assert not load_manifest(output).model_checked


def test_the_router_and_its_neighbours_pass_through(tmp_path: Path) -> None:
    """A12: only whole path segments are matched."""
    layer = "model.layers.0.mlp"
    shared = {
        f"{layer}.shared_expert.{name}_proj.weight": torch.full((4, 4), float(i))
        for i, name in enumerate(("gate", "up", "down"))
    }
    others = {
        f"{layer}.gate.weight": torch.randn(12, 8),
        f"{layer}.gate_proj.weight": torch.randn(12, 8),
        f"{layer}.shared_expert_gate.weight": torch.randn(1, 8),
        f"{layer}.experts.3.gate_proj.weight": torch.randn(6, 8).to(torch.float8_e4m3fn),
        f"{layer}.experts.3.gate_proj.weight_scale_inv": torch.randn(1, 1),
        f"{layer}.experts.10.gate_proj.weight": torch.randn(6, 8),
    }
    source = write_checkpoint(tmp_path / "in", {**others, **shared}, qwen3_config())
    patch = '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp.shared_expert"}\n'
    output = convert(write_recipe(tmp_path / "r.yaml", patch), source, tmp_path / "out", model_check=False).output
    written = read_raw(output, SINGLE_NAME)
    gate, up, down = shared.values()
    assert written == {
        **{name: raw(tensor) for name, tensor in others.items()},
        f"{layer}.shared_expert.gate_up_proj.weight": raw(torch.cat([gate, up])),
        f"{layer}.shared_expert.down_proj.weight": raw(down),
    }
