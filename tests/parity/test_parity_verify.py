"""`kconvert verify` as a command: its output, its report, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kconvert import load_converted
from kconvert.cli import main
from kconvert.cli import verify as cli_verify
from kconvert.manifest import canonical_json, sha256_digest
from kconvert.names import CONFIG_NAME, MANIFEST_NAME, PARITY_NAME, is_own_name
from kconvert.parity import ModuleResult, ModulesLevel, Result, Verdict, logits, memory
from tests.packages.helpers import copy_example, fuse, run_recipe
from tests.parity.conftest import PATCHES, Pair
from tests.parity.running import Capture, failing, run
from tests.runtime.pairs import edit_manifest
from tests.support import convert, save_tiny, write_recipe
from tests.test_lightness import run_fresh

# --- what holds -------------------------------------------------------------------------------------


def test_both_levels_hold_with_a_source(pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, pair.converted, "--source", pair.source, "--level", "modules", "--level", "logits")
    assert code == 0, out + err
    assert out.splitlines()[-1] == "OK: the logits agree in float32."
    assert "OK: 6 of 6 patched modules agree." in out.splitlines()
    assert max(map(len, out.splitlines())) <= 80
    for shown in ("model.layers.*.self_attn ", ".input_layernorm ", "cpu_fused_qkv"):
        assert shown in out
    for kernel in ("reference", "cpu_fused_swiglu"):
        assert re.search(rf"{kernel} +equal +\n", out)
    assert "Compared in float32, bfloat16, float16, float64; a difference is a share of the\nlargest stock" in out
    assert err.splitlines() == [
        f"kconvert: the report is in {pair.converted / PARITY_NAME}",
        "kconvert: tensors outside the patched modules are not compared one by one; --level bytes does that",
    ]


def test_names_are_not_broken_inside_a_word(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    paths = ("model.layers.1.post_attention_layernorm", "model.layers.1.mlp")
    found = Result("bfloat16", "auto", "cpu_fused_rmsnorm_swiglu", Verdict.WITHIN, 6.4e-4, 0.0625)
    module = ModuleResult(paths, ("Norm", "MLP"), "norm_gated_mlp", (found,))
    cli_verify._show_modules(ModulesLevel((module,), "bfloat16", True, None, {}), "Modules")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    names = [line[:30].strip() for line in out.splitlines()[4:9]]
    assert names == [
        "model.layers.*",
        ".post_attention_layernorm",
        "+ model.layers.*.mlp",
        "worst: model.layers.1",
        ".post_attention_layernorm",
    ]
    assert re.search(r" 6\.4e-04, allowed +\n.* 0\.062 +\n.* in bfloat16 +\n", out)


def test_json_is_one_value_and_the_report_file_is_the_same(short_pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = short_pair.copy(tmp_path / "out")
    arguments = (converted, "--source", short_pair.source, "--level", "logits", "--level", "modules", "--json")
    code, out, _ = run(capsys, *arguments)
    value = json.loads(out)
    written = (converted / PARITY_NAME).read_bytes()
    assert code == 0
    assert json.loads(written) == value
    assert written == canonical_json(value)
    assert value["holds"] is True
    assert value["stock_weights"] == "source"
    assert value["manifest_digest"] == json.loads((converted / MANIFEST_NAME).read_bytes())["digest"]
    assert value["versions"]["torch"] == torch.__version__
    assert value["device"]["type"] == "cpu"
    modules = {item["path"]: item for item in value["levels"]["modules"]["modules"]}
    assert len(modules) == 6
    attention = modules["model.layers.0.self_attn"]["results"]
    assert {(item["dtype"], item["kernels"], item["kernel"]) for item in attention} == {
        *((dtype, "reference", "reference") for dtype in ("float64", "float32", "bfloat16", "float16")),
        *((dtype, "auto", "cpu_fused_qkv") for dtype in ("float32", "bfloat16", "float16")),
    }
    assert {item["verdict"] for item in attention if item["kernels"] == "reference"} <= {"equal", "within"}
    logits = value["levels"]["logits"]["results"]
    assert [(item["dtype"], item["kernels"]) for item in logits] == [
        ("bfloat16", "reference"),
        ("bfloat16", "auto"),
        ("float32", "reference"),
        ("float32", "auto"),
    ]
    # 3 sequences of 24 tokens; 2 with a mask, one of them padded by 8
    assert {item["positions"] for item in logits} == {3 * 24 + 24 + 16}
    assert [item["max_abs"] for item in logits if item["kernels"] == "reference"] == [0.0, 0.0]
    assert str(tmp_path) not in written.decode()
    assert str(short_pair.source) not in written.decode()
    run(capsys, *arguments)
    assert (converted / PARITY_NAME).read_bytes() == written


def test_without_a_source_it_says_what_is_not_compared(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = pair.copy(tmp_path / "out")
    code, out, err = run(capsys, converted)
    assert code == 0, out + err
    assert "stock weights come from the converted directory itself; --source DIR compares with the checkpoint\n" in err
    assert "Logits" not in out
    assert json.loads((converted / PARITY_NAME).read_bytes())["stock_weights"] == "converted file"


def test_a_fusion_of_a_kernel_package_holds_where_it_is_trusted(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    copy_example("norm_mlp", tmp_path)
    converted = run_recipe(tmp_path, fuse(), pair.source)
    line = failing(capsys, converted, "--source", pair.source, code=8)
    assert "./norm_mlp:RMSNormMLP" in line
    assert "--trust-remote-code" in line
    code, out, err = run(capsys, converted, "--source", pair.source, "--trust-remote-code", "--json")
    assert code == 0, out + err
    (first, _) = json.loads(out)["levels"]["modules"]["modules"]
    assert first["members"] == ["model.layers.0.post_attention_layernorm", "model.layers.0.mlp"]
    assert {item["kernel"] for item in first["results"]} == {"reference", "./norm_mlp:RMSNormMLP"}


def test_the_report_is_ours(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    recipe = write_recipe(tmp_path / "my.yaml", PATCHES)
    converted = convert(recipe, pair.source, tmp_path / "out").output
    assert run(capsys, converted)[0] == 0
    assert is_own_name(PARITY_NAME)
    load_converted(converted)
    assert main(["apply", str(recipe), str(pair.source), "-o", str(converted), "--overwrite"]) == 0
    assert not (converted / PARITY_NAME).exists()


def test_a_packed_save_over_it_takes_the_old_report_away(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = pair.copy(tmp_path / "out")
    run(capsys, converted)
    load_converted(pair.converted).save_pretrained(converted, variant="kconvert")
    assert not (converted / PARITY_NAME).exists()
    line = failing(capsys, converted, "--source", pair.source, code=2)
    assert "save_pretrained" in line
    assert run(capsys, converted)[0] == 0


def test_a_directory_that_cannot_be_written_is_a_warning(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = pair.copy(tmp_path / "out")
    (converted / PARITY_NAME).mkdir()  # root may write everywhere, but not a file over a folder
    code, out, err = run(capsys, converted)
    assert code == 0, out + err
    assert f"kconvert: warning: {PARITY_NAME} cannot be written" in err
    assert sorted(path.name for path in converted.iterdir() if "parity" in path.name) == [PARITY_NAME]


def test_a_manifest_without_patches_has_nothing_to_verify(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = pair.copy(tmp_path / "out")
    edit_manifest(
        converted, lambda old: replace(old, patches=(), tensors=tuple(it for it in old.tensors if it.patch is None))
    )
    assert "no module is patched" in failing(capsys, converted, code=2)


# --- refused ----------------------------------------------------------------------------------------


def test_a_source_of_another_model_is_refused(pair: Pair, llama_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "not the source" in failing(capsys, pair.converted, "--source", llama_dir, code=4)
    wider = save_tiny(tmp_path / "wider", "qwen3", intermediate_size=64)
    assert "bytes, converted were" in failing(capsys, pair.converted, "--source", wider, code=4)
    sharded = save_tiny(tmp_path / "sharded", "qwen3", max_shard_size=10_000)
    assert "its weights are in model-00001-of-" in failing(capsys, pair.converted, "--source", sharded, code=4)
    assert "already converted" in failing(capsys, pair.converted, "--source", pair.converted, code=4)
    line = failing(capsys, pair.converted, "--source", wider, code=4)
    assert line.endswith("; give the checkpoint that was converted"), "without it the wrong source would be forgotten"


def test_a_source_with_another_header_or_config_is_refused(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    renamed = shutil.copytree(pair.source, tmp_path / "renamed")
    data = (renamed / "model.safetensors").read_bytes()
    one, two = b'"model.layers.0.mlp.gate_proj.weight"', b'"model.layers.0.mlp.gate_prok.weight"'
    (renamed / "model.safetensors").write_bytes(data.replace(one, two))
    assert "has other tensors" in failing(capsys, pair.converted, "--source", renamed, code=4)
    edited = shutil.copytree(pair.source, tmp_path / "edited")
    (edited / CONFIG_NAME).write_text((edited / CONFIG_NAME).read_text().replace("1e-06", "1e-05"))
    assert "config.json is not the one" in failing(capsys, pair.converted, "--source", edited, code=4)


def test_a_source_of_the_same_shapes_and_other_values_fails(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    other = save_tiny(tmp_path / "other", "qwen3", seed=1)
    assert (other / CONFIG_NAME).read_bytes() == (pair.source / CONFIG_NAME).read_bytes()
    code, out, _ = run(capsys, pair.converted, "--source", other, "--json")
    assert code == 5
    assert len(json.loads(out)["failures"]) == 6
    assert "make sure that --source is the checkpoint that was converted" in json.loads(out)["error"]


def test_a_damaged_directory_is_refused(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    assert "no kconvert_manifest.json here" in failing(capsys, pair.source, code=4)
    assert f"{tmp_path / 'nowhere'}: no such directory; " in failing(capsys, tmp_path / "nowhere", code=4)
    cut = pair.copy(tmp_path / "cut")
    weights = cut / "model.kconvert.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "cannot be read" in failing(capsys, cut, "--source", pair.source, code=4)
    assert not (cut / PARITY_NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--level", "bits"), ("'bits'", "modules, logits")),
        (("--device", "gpu"), ("unknown device 'gpu'", "cuda:1")),
        (("--device", "cpu:x"), ("unknown device 'cpu:x'",)),
        (("--device", "cuda:99"), ("device 'cuda:99' cannot be used",)),
    ],
)
def test_usage(pair: Pair, capsys: Capture, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = failing(capsys, pair.converted, *arguments, code=2)
    assert [word for word in words if word not in line] == []


def test_a_quantised_checkpoint_needs_its_source(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    converted = pair.copy(tmp_path / "out")
    config = json.loads((converted / CONFIG_NAME).read_text())
    (converted / CONFIG_NAME).write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    digest = sha256_digest((converted / CONFIG_NAME).read_bytes())
    edit_manifest(converted, lambda old: replace(old, config_digest=digest))  # as if it had been converted so
    line = failing(capsys, converted, code=2)
    assert "quantised" in line
    assert "--source" in line


def test_a_model_that_does_not_fit_is_refused(pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 1000)
    line = failing(capsys, pair.converted, code=6)
    assert "not offloaded" in line


def test_float32_that_does_not_fit_is_left_out_and_said(
    short_pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "free_bytes", lambda device: 1000)
    code, out, _ = run(capsys, short_pair.converted, "--source", short_pair.source, "--level", "logits")
    assert code == 0
    assert "the logits agree in bfloat16." in out
    assert "float32, auto: not run: it takes" in out


def test_help_loads_no_torch() -> None:
    run_fresh(["verify", "--help"])


def test_a_stray_report_does_not_make_a_source_a_converted_one(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    source = shutil.copytree(pair.source, tmp_path / "my-model")
    (source / PARITY_NAME).write_text("{}")
    converted = convert(write_recipe(tmp_path / "my.yaml", PATCHES), source, tmp_path / "out").output
    assert not (converted / PARITY_NAME).exists()
    assert run(capsys, converted, "--source", source)[0] == 0
