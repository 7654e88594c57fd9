"""`kconvert inspect`: what is said of sources and converted directories, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kconvert.cli import main
from kconvert.kernels.specs import layout_specs
from kconvert.manifest import load_manifest
from kconvert.names import MANIFEST_NAME, starred
from kconvert.recipe import load_recipe, shipped_recipes
from tests.cli.stand_ins import environment
from tests.packages.helpers import copy_example, fuse, run_recipe
from tests.support import RawTensor, qwen3_config, qwen3_tensors, read_raw, write_checkpoint

Capture = pytest.CaptureFixture[str]


def _inspect(capsys: Capture, path: Path) -> dict[str, Any]:
    code = main(["inspect", str(path), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    value: dict[str, Any] = json.loads(captured.out)
    return value


def _shown(capsys: Capture, path: Path | str) -> tuple[str, str]:
    code = main(["inspect", str(path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out, captured.err


def _refused(capsys: Capture, path: Path | str) -> str:
    code = main(["inspect", str(path), "--json"])
    captured = capsys.readouterr()
    assert code == 4, captured.err
    assert json.loads(captured.out)["exit_code"] == 4
    (line,) = captured.err.splitlines()
    return line


def _packable(value: dict[str, Any], layout: str) -> list[tuple[str, int, str]]:
    return [
        (found["modules"], len(found["paths"]), found["state"])
        for found in value["packable"]
        if found["layout"] == layout
    ]


# --- sources ------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two layers of Qwen3 in float32, in two shards, gate and up apart."""
    tensors = qwen3_tensors()
    names = list(tensors)
    cut = names.index("model.layers.1.mlp.up_proj.weight")
    return write_checkpoint(tmp_path / "my-model", tensors, qwen3_config(), [names[:cut], names[cut:]])


def test_a_source(source: Path, capsys: Capture) -> None:
    value = _inspect(capsys, source)
    size = sum(tensor.numel() * 4 for tensor in qwen3_tensors().values())
    assert (value["kind"], value["path"]) == ("source", str(source))
    assert (value["model_type"], value["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (value["num_tensors"], value["size_bytes"]) == (25, size)
    assert value["bytes_by_dtype"] == {"F32": size}
    assert {file["name"]: file["size_bytes"] for file in value["files"]} == {
        path.name: path.stat().st_size for path in source.glob("*.safetensors")
    }
    assert (value["quantization"], value["tied_embeddings"], value["names_unsettled"]) == (None, False, None)
    assert value["warnings"] == []
    groups = {group["name"]: group for group in value["tensors"]}
    assert list(groups) == sorted({starred(name) for name in qwen3_tensors()})
    assert groups["model.layers.*.mlp.gate_proj.weight"] == {
        "name": "model.layers.*.mlp.gate_proj.weight",
        "count": 2,
        "shapes": [[12, 8]],
        "dtypes": ["F32"],
        "size_bytes": 2 * 12 * 8 * 4,
    }


def test_what_could_be_packed(source: Path, capsys: Capture) -> None:
    value = _inspect(capsys, source)
    assert _packable(value, "gated_mlp") == [("model.layers.*.mlp", 2, "ready")]
    (found,) = [found for found in value["packable"] if found["layout"] == "gated_mlp"]
    assert found["paths"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert found["size_bytes"] == 2 * 2 * 12 * 8 * 4
    assert found["joins"] == [
        {"sources": ["gate_proj.weight", "up_proj.weight"], "target": "gate_up_proj.weight"},
    ]
    joining = {name for name, spec in layout_specs().items() if spec.is_proposed and spec.changes_parameters}
    assert {found["layout"] for found in value["packable"]} == joining


def test_recipes_that_fit(source: Path, capsys: Capture) -> None:
    fitting = [name for name, path in shipped_recipes().items() if "qwen3" in load_recipe(path).model_type]
    value = _inspect(capsys, source)
    assert [recipe["name"] for recipe in value["recipes"]] == fitting
    assert {"qwen3", "qwen3-fused-norm-mlp"} <= set(fitting)
    assert value["recipes"][0]["command"] == f"kconvert plan {fitting[0]} {source}"


@pytest.mark.parametrize("columns", ["80", "400"])
def test_the_commands_can_be_pasted(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    moved = source.rename(source.with_name("my model's"))
    out, _ = _shown(capsys, moved)
    pasted = "kconvert() { printf '%s\\n' \"$@\"; }\n" + out.partition("Recipes that fit\n")[2]
    done = subprocess.run([shutil.which("bash") or "sh", "-c", pasted], capture_output=True, text=True, check=True)
    names = [name for name, path in shipped_recipes().items() if "qwen3" in load_recipe(path).model_type]
    assert done.stdout.splitlines() == [word for name in names for word in ("plan", name, str(moved))]
    assert ("\\\n" in out) is (columns == "80")


def test_a_group_that_is_there_in_part(tmp_path: Path, capsys: Capture) -> None:
    tensors = qwen3_tensors(layers=3)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    source = write_checkpoint(tmp_path / "m", tensors, qwen3_config(layers=3))
    value = _inspect(capsys, source)
    assert _packable(value, "gated_mlp") == [("model.layers.*.mlp", 2, "ready"), ("model.layers.*.mlp", 1, "refused")]
    (broken,) = [found for found in value["packable"] if found["state"] == "refused"]
    assert broken["paths"] == ["model.layers.2.mlp"]
    assert "'mlp.up_proj.weight', which the checkpoint does not have" in broken["reason"]
    assert "      in model.layers.{2}.mlp\n" in _shown(capsys, source)[0]


def test_mixed_dtypes(tmp_path: Path, capsys: Capture) -> None:
    tensors = qwen3_tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    source = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    value = _inspect(capsys, source)
    assert list(value["bytes_by_dtype"]) == ["F32", "BF16"]
    (group,) = [group for group in value["tensors"] if group["name"] == "model.layers.*.mlp.up_proj.weight"]
    assert group["dtypes"] == ["F32", "BF16"]
    (broken,) = [found for found in value["packable"] if found["state"] == "refused"]
    assert broken["reason"].startswith("mixed dtypes: gate_proj.weight is F32, up_proj.weight is BF16")
    assert "(1 module, 576 B, cannot be packed)\n      mixed dtypes: gate_proj.weight" in _shown(capsys, source)[0]


def test_modules_that_are_packed_already(tmp_path: Path, capsys: Capture) -> None:
    tensors = qwen3_tensors()
    for layer in range(2):
        parts = [tensors.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    source = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    assert _packable(_inspect(capsys, source), "gated_mlp") == [("model.layers.*.mlp", 2, "already packed")]
    assert "gated_mlp  model.layers.*.mlp  (2 modules, 1.5 kB, already packed)\n" in _shown(capsys, source)[0]


def test_a_quantised_source(tmp_path: Path, capsys: Capture) -> None:
    tensors: dict[str, Any] = dict(qwen3_tensors(layers=1))
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] = RawTensor("F8_E4M3", (12, 8), bytes(96))
    config = qwen3_config(layers=1, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    source = write_checkpoint(tmp_path / "m", tensors, config)
    value = _inspect(capsys, source)
    assert value["quantization"] == config["quantization_config"]
    assert value["bytes_by_dtype"]["F8_E4M3"] == 192
    assert {found["reason"] for found in value["packable"]} == {"the checkpoint is quantised (fp8)"}
    assert re.search(r"quantisation +fp8\n", _shown(capsys, source)[0])


@pytest.mark.parametrize(
    ("config", "tied", "shown"),
    [
        ({"tie_word_embeddings": True}, True, "yes (config.json)"),
        ({"tie_word_embeddings": False}, False, "no (config.json)"),
        ({"text_config": {"tie_word_embeddings": True}}, True, "yes (config.json)"),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False, "no (config.json)"),
        ({}, None, "not said, the model's class decides"),
    ],
)
def test_tied_embeddings(
    tmp_path: Path, capsys: Capture, config: dict[str, Any], tied: bool | None, shown: str
) -> None:
    base = {key: value for key, value in qwen3_config().items() if key != "tie_word_embeddings"}
    source = write_checkpoint(tmp_path / "m", qwen3_tensors(), {**base, **config})
    assert _inspect(capsys, source)["tied_embeddings"] is tied
    assert f"tied embeddings  {shown}\n" in _shown(capsys, source)[0]


def test_a_type_whose_names_transformers_changes(tmp_path: Path, capsys: Capture) -> None:
    source = write_checkpoint(tmp_path / "m", qwen3_tensors(), qwen3_config(model_type="mixtral"))
    reason = _inspect(capsys, source)["names_unsettled"]
    assert reason == "transformers renames or joins tensors of model type 'mixtral' while loading"
    out = " ".join(_shown(capsys, source)[0].split())
    assert f"{reason}: modules may have other names than shown here" in out


def test_nothing_that_fits(tmp_path: Path, capsys: Capture) -> None:
    config = {key: value for key, value in qwen3_config().items() if key not in ("model_type", "architectures")}
    source = write_checkpoint(tmp_path / "m", {"a.weight": np.ones((2, 2), np.float32)}, config)
    value = _inspect(capsys, source)
    assert (value["model_type"], value["architectures"], value["recipes"], value["packable"]) == (None, [], [], [])
    out = _shown(capsys, source)[0]
    assert re.search(r"model type +not said\n", out)
    assert "nothing that a layout of this version joins" in out
    assert " ".join(out.partition("Recipes that fit\n")[2].split()) == (
        "none that comes with kconvert is for config.json, which names no model_type; "
        "docs/recipe.md shows how to draft one"
    )


def test_warnings_go_to_stderr(source: Path, capsys: Capture) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["lm_head.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    out, err = _shown(capsys, source)
    assert "omits (lm_head.weight)" in err
    assert "omits" not in out
    (warning,) = _inspect(capsys, source)["warnings"]
    assert "omits (lm_head.weight)" in warning


# --- converted directories ----------------------------------------------------------------------------


def test_a_converted_directory(converted_sharded_dir: Path, capsys: Capture) -> None:
    value = _inspect(capsys, converted_sharded_dir)
    manifest, stored = load_manifest(converted_sharded_dir), read_raw(converted_sharded_dir)
    assert value["kind"] == "converted"
    assert (value["recipe"], value["written_by"], value["model_checked"]) == ("qwen3", "apply", True)
    assert value["kconvert_version"] == manifest.kconvert_version
    assert value["transformers_version"] == manifest.transformers_version
    assert (value["num_tensors"], value["size_bytes"]) == (len(stored), sum(len(item.data) for item in stored.values()))
    assert [file["name"] for file in value["files"]] == list(manifest.weight_files)
    for file in value["files"]:
        assert file["size_bytes"] == (converted_sharded_dir / file["name"]).stat().st_size
    (mlp,) = [patch for patch in value["patches"] if patch["layout"] == "gated_mlp"]
    inside = {name: len(item.data) for name, item in stored.items() if ".mlp." in name}
    packed = {name: size for name, size in inside.items() if name.endswith("gate_up_proj.weight")}
    assert len(packed) == 2
    assert (mlp["size_bytes"], mlp["packed_bytes"]) == (sum(inside.values()), sum(packed.values()))
    assert mlp["kernels"] == ["cuda_fused_swiglu", "npu_fused_swiglu", "cpu_fused_swiglu"]
    assert (mlp["kind"], mlp["modules"], mlp["package"]) == ("replace", 2, None)
    assert mlp["patterns"] == [
        {
            "class": "Qwen3MLP",
            "path": "model.layers.*.mlp",
            "matched": ["model.layers.0.mlp", "model.layers.1.mlp"],
        }
    ]


def test_a_fusion(converted_fused_dir: Path, capsys: Capture) -> None:
    value = _inspect(capsys, converted_fused_dir)
    (fused,) = [patch for patch in value["patches"] if patch["kind"] == "fuse"]
    assert [pattern["path"] for pattern in fused["patterns"]] == [
        "model.layers.*.post_attention_layernorm",
        "model.layers.*.mlp",
    ]
    assert "(fusion, 2 modules, " in _shown(capsys, converted_fused_dir)[0]


def test_a_kernel_package(qwen3_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    copy_example("norm_mlp", tmp_path)
    output = run_recipe(tmp_path, fuse(), qwen3_dir)
    capsys.readouterr()
    (patch,) = _inspect(capsys, output)["patches"]
    (record,) = load_manifest(output).patches
    assert record.layout.package is not None
    assert patch["package"]["package_id"] == "./norm_mlp:RMSNormMLP"
    assert patch["package"]["digest"] == record.layout.package.digest
    out = _shown(capsys, output)[0]
    assert f"package: ./norm_mlp:RMSNormMLP\n        {record.layout.package.digest}\n" in out


def test_carried_and_left_out(tmp_path: Path, capsys: Capture) -> None:
    tensors = {**qwen3_tensors(), "mtp.fc.weight": torch.ones(8, 8)}
    source = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    (source / "pytorch_model.bin").write_bytes(b"x")
    assert main(["apply", "qwen3", str(source), "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    value = _inspect(capsys, tmp_path / "out")
    assert value["carried"] == ["mtp.fc.weight"]
    assert [item["name"] for item in value["omitted"]] == ["pytorch_model.bin"]
    out = _shown(capsys, tmp_path / "out")[0]
    assert "carried along without a place in the model: mtp.fc.weight\n" in out
    assert "left out: pytorch_model.bin (" in out


def test_a_conversion_without_the_model_check(source: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["apply", "qwen3", str(source), "-o", str(tmp_path / "out"), "--no-model-check"]) == 0
    capsys.readouterr()
    assert _inspect(capsys, tmp_path / "out")["model_checked"] is False
    out = " ".join(_shown(capsys, tmp_path / "out")[0].split())
    assert "model checked no: tensors without a place in the model are not known" in out


def test_a_config_that_was_changed(converted_qwen3_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    copied = Path(shutil.copytree(converted_qwen3_dir, tmp_path / "c"))
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    (warning,) = _inspect(capsys, copied)["warnings"]
    assert warning.endswith("config.json was changed after the conversion")


# --- refused ------------------------------------------------------------------------------------------


def test_refused_sources(source: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "no such directory" in _refused(capsys, tmp_path / "nowhere")
    assert "is not a directory" in _refused(capsys, source / "config.json")
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in _refused(capsys, tmp_path / "empty")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    assert "only pickle weights" in _refused(capsys, pickled)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"{shard}: " in _refused(capsys, source)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _replace_weights(path: Path) -> None:
    shutil.copy(path.parent.parent / "other.safetensors", path)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model.kconvert.safetensors", _cut, "model.kconvert.safetensors: "),
        ("model.kconvert.safetensors", Path.unlink, "is missing"),
        (
            "model.kconvert.safetensors",
            _replace_weights,
            "is F32 [48, 32] in the files and absent in the manifest (14 differ)",
        ),
        (MANIFEST_NAME, _cut, f"{MANIFEST_NAME}: cannot be read"),
        (MANIFEST_NAME, Path.unlink, f"without {MANIFEST_NAME}: left over from an unfinished or damaged conversion"),
        ("config.json", Path.unlink, "config.json: is missing"),
        ("config.json", _cut, "config.json is not valid JSON"),
    ],
)
def test_refused_conversions(
    converted_qwen3_dir: Path, qwen3_dir: Path, tmp_path: Path, capsys: Capture, name: str, damage: Any, words: str
) -> None:
    copied = Path(shutil.copytree(converted_qwen3_dir, tmp_path / "c"))
    shutil.copy(qwen3_dir / "model.safetensors", tmp_path / "other.safetensors")
    damage(copied / name)
    assert words in _refused(capsys, copied)


# --- how it looks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_nothing_is_wider_than_the_terminal(
    source: Path, converted_fused_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(source.parent)
    for path in (Path(source.name), converted_fused_dir):
        out, _ = _shown(capsys, path)
        assert max(map(len, out.splitlines())) <= columns
        assert "…" not in out


def test_long_names_are_folded_after_dots_and_never_cut(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = f"model.layers.7.{'encoder_attention.' * 5}out.weight"
    wide = f"model.{'x' * 100}.weight"
    tensors = {name: np.ones((2, 2), np.float32), wide: np.ones((2, 2), np.float32)}
    out, _ = _shown(capsys, write_checkpoint(tmp_path / "m", tensors, qwen3_config()))
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    start = lines.index("model.layers.*") + 1
    whole = ""
    for number, line in enumerate(lines[start:]):
        assert line.startswith(".") is (number > 0)
        whole += line
        if line.endswith("weight"):
            break
    assert whole == starred(name).removeprefix("model.layers.*.")
    assert out.count("x") >= 100


def test_names_are_no_commands_for_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    tensors = {"a.\x1b[31mred\n.weight": np.ones((2, 2), np.float32)}
    source = write_checkpoint(tmp_path / "m", tensors, qwen3_config(model_type="qw\x1b[2Jen", architectures=["\x07"]))
    out, _ = _shown(capsys, source)
    assert not set(out) & {"\x1b", "\x07"}
    assert r"\x1b[31mred\n.weight" in out
    assert _inspect(capsys, source)["model_type"] == "qw\x1b[2Jen"


def test_tensors_of_numbered_modules_stand_together(tmp_path: Path, capsys: Capture) -> None:
    names = ["z.0.a", "z.1.b", "head.weight", "z.norm.weight"]
    source = write_checkpoint(tmp_path / "m", {name: np.ones(2, np.float32) for name in names}, qwen3_config())
    out, _ = _shown(capsys, source)
    table = out.partition(" name ")[2].partition("What could")[0]
    assert [line.split()[0] for line in table.splitlines()[2:] if line.strip()] == [
        "head.weight", "z.*", "a", "b", "z.norm.weight"
    ]  # fmt: skip


# --- lightness ----------------------------------------------------------------------------------------

PROBE = """
import json, sys
from kconvert.cli import main
code = main(sys.argv[1:])
print()
print(json.dumps({"code": code, "heavy": sorted({"torch", "transformers"} & set(sys.modules))}))
"""


def test_no_torch_and_no_code(source: Path, converted_fused_dir: Path, tmp_path: Path) -> None:
    """Neither is loaded, and code that lies in the directory is not run, nor a package beside it."""
    for name in ("modeling_mine.py", "layers.py", "sitecustomize_mine.py"):
        (source / name).write_text("raise SystemExit('this was run')\n")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_mine.Mine"}}))
    for path in (source, converted_fused_dir):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, "inspect", str(path)],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert json.loads(done.stdout.splitlines()[-1]) == {"code": 0, "heavy": []}, done.stderr
        assert "this was run" not in done.stdout + done.stderr


def test_only_headers_are_read(source: Path, capsys: Capture) -> None:
    """A file of which everything but the header is a hole of 4 GB: reading it would be seen."""
    size = 4 * 2**30
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    for path in source.glob("*.safetensors*"):
        path.unlink()
    path = source / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    value = _inspect(capsys, source)
    assert value["size_bytes"] == size
