"""The command line as a person or a script meets it: exit codes, stdout, stderr, and nothing half written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert import load_converted
from kconvert.cli import main
from kconvert.cli.app import app
from kconvert.cli.output import format_bytes
from kconvert.kernels.registry import Registry
from kconvert.manifest import load_manifest
from tests.support import qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe

Capture = pytest.CaptureFixture[str]


def _run(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    code = main([str(item) for item in argv])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def _error_line(err: str) -> str:
    """The one error line; warnings and announcements may stand before it."""
    lines = [line for line in err.splitlines() if line.startswith("kconvert: error: ")]
    assert len(lines) == 1, err
    return lines[0]


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def source(qwen3_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen3_dir, tmp_path / "my-model"))


def test_apply_writes_beside_the_source_and_prints_the_path(source: Path, capsys: Capture) -> None:
    code, out, err = _run(capsys, "apply", "qwen3", source)
    target = source.with_name("my-model-kconvert")
    assert code == 0
    assert out.strip() == str(target)
    assert (target / "kconvert_manifest.json").is_file()
    assert "load_converted" in err


def test_apply_json_is_one_value_with_the_figures(source: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = _run(capsys, "apply", "qwen3", source, "-o", tmp_path / "out", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["output"] == str(tmp_path / "out")
    assert value["bytes_transformed"] > 0
    written = sum(len(tensor.data) for tensor in read_raw(tmp_path / "out").values())
    assert value["bytes_copied"] + value["bytes_transformed"] == written
    assert value["total_seconds"] >= value["copy_seconds"] + value["sync_seconds"]
    assert value["peak_rss_bytes"] > 1_000_000


@pytest.mark.parametrize("command", [["plan"], ["apply", "--dry-run"]])
def test_plan_and_dry_run_show_the_trace_and_write_nothing(source: Path, capsys: Capture, command: list[str]) -> None:
    before = sorted(source.parent.iterdir())
    code, out, _ = _run(capsys, *command, "qwen3", source)
    assert code == 0
    assert "model.layers.*.mlp.gate_up_proj.weight" in out
    assert re.search(r"model\.layers\.\*\.mlp\s+Qwen3MLP\s+gated_mlp\s+2", out)
    assert sorted(source.parent.iterdir()) == before


def test_plan_json_holds_every_match_and_every_tensor(source: Path, capsys: Capture) -> None:
    code, out, _ = _run(capsys, "plan", "qwen3", source, "--json")
    value = json.loads(out)
    assert code == 0
    mlp = [patch for patch in value["patches"] if patch["layout"] == "gated_mlp"]
    assert mlp[0]["patterns"][0]["matched"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    packed = next(item for item in value["tensors"] if item["target"] == "model.layers.0.mlp.gate_up_proj.weight")
    assert [part["source"] for part in packed["parts"]] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]


@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp"])
def test_plan_fits_80_columns(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(source.parent)
    _, out, _ = _run(capsys, "plan", recipe, "my-model")
    assert max(map(len, out.splitlines())) <= 80
    assert "post_attention_layernorm " in out.partition("Matched")[0], "no name is broken inside a word"
    assert out.endswith(f"\n\nConvert it\n  kconvert apply {recipe} my-model\n")


def test_plan_ends_with_the_command_that_does_it(source: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = write_recipe(
        tmp_path / "my recipe.yaml",
        '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n',
    )
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / "0123abc"
    shutil.copytree(source, snapshot)
    (snapshot.parents[1] / "blobs").mkdir()
    for model_dir, more in ((source, []), (snapshot, ["-o", "OUTPUT"])):
        _, out, _ = _run(capsys, "plan", recipe, model_dir, "--no-model-check")
        shown = out.partition("Convert it\n")[2].replace("\\\n", "")
        command = ["kconvert", "apply", str(recipe), str(model_dir), *more, "--no-model-check"]
        assert shlex.split(shown) == command
    assert "Convert it" not in _run(capsys, "apply", recipe, source, "--dry-run", "--no-model-check")[1]


def _matched(out: str) -> list[str]:
    """The lines of the plan's part on matches."""
    return out.partition("Matched\n")[2].partition("\n\nTensors\n")[0].splitlines()


def test_plan_shows_every_match_with_its_place_in_the_recipe_and_its_kernels(source: Path, capsys: Capture) -> None:
    _, out, _ = _run(capsys, "plan", "qwen3", source)
    norm_kernels = "      kernels: cuda_fused_rmsnorm, npu_fused_rmsnorm, cpu_fused_rmsnorm"
    assert _matched(out) == [
        "  qwen3.yaml:6  rms_norm",
        "      Qwen3RMSNorm at model.layers.{0-1}.input_layernorm",
        norm_kernels,
        "  qwen3.yaml:8  rms_norm",
        "      Qwen3RMSNorm at model.layers.{0-1}.post_attention_layernorm",
        norm_kernels,
        "  qwen3.yaml:10  rms_norm",
        "      Qwen3RMSNorm at model.layers.{0-1}.self_attn.q_norm",
        norm_kernels,
        "  qwen3.yaml:12  rms_norm",
        "      Qwen3RMSNorm at model.layers.{0-1}.self_attn.k_norm",
        norm_kernels,
        "  qwen3.yaml:14  rms_norm",
        "      Qwen3RMSNorm at model.norm",
        norm_kernels,
        "  qwen3.yaml:16  qkv_proj",
        "      Qwen3Attention at model.layers.{0-1}.self_attn",
        "      kernels: cuda_fused_qkv, npu_fused_qkv, cpu_fused_qkv",
        "  qwen3.yaml:18  gated_mlp",
        "      Qwen3MLP at model.layers.{0-1}.mlp",
        "      kernels: cuda_fused_swiglu, npu_fused_swiglu, cpu_fused_swiglu",
    ]


def test_plan_shows_what_a_number_set_took_of_a_fusion(tmp_path: Path, capsys: Capture) -> None:
    source = write_checkpoint(tmp_path / "my-model", qwen3_tensors(layers=12), qwen3_config(layers=12))
    recipe = write_recipe(
        tmp_path / "my.yaml",
        "  - kernel: cpu_fused_rmsnorm_swiglu\n    fuse:\n"
        '      - {class: Qwen3RMSNorm, path: "model.layers.{0-2,5,9-11}.post_attention_layernorm"}\n'
        '      - {class: Qwen3MLP, path: "model.layers.{11,0-2,5,9-10}.mlp"}\n',
    )
    _, out, _ = _run(capsys, "apply", recipe, source, "--dry-run", "--no-model-check")
    assert _matched(out) == [
        "  my.yaml:5  norm_gated_mlp",
        "      Qwen3RMSNorm at model.layers.{0-2,5,9-11}.post_attention_layernorm",
        "      Qwen3MLP at model.layers.{0-2,5,9-11}.mlp",
        "      kernels: cpu_fused_rmsnorm_swiglu",
    ]


def test_the_plan_is_the_same_without_the_model_check(source: Path, capsys: Capture) -> None:
    checked = json.loads(_run(capsys, "plan", "qwen3", source, "--json")[1])
    unchecked = json.loads(_run(capsys, "plan", "qwen3", source, "--json", "--no-model-check")[1])
    assert checked.pop("model_checked") is True
    assert unchecked.pop("model_checked") is False
    more = checked["expected"].pop("bytes") - unchecked["expected"].pop("bytes")
    assert 0 < more < 1000, "the manifest says what was found in the model"
    assert checked == unchecked


def test_list_kernels_json(capsys: Capture) -> None:
    code, out, _ = _run(capsys, "list-kernels", "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert code == 0
    assert [row["id"] for row in rows] == list(Registry.catalog())
    for row in rows:
        assert set(row) == {"id", "device", "layout", "available", "reason"}
        assert bool(row["reason"]) is not row["available"]
    assert {row["id"] for row in rows if row["available"]} >= {"cpu_fused_rmsnorm", "cpu_fused_swiglu"}


def test_list_kernels_by_device_and_without_probe(capsys: Capture) -> None:
    _, out, _ = _run(capsys, "list-kernels", "--device", "npu", "--no-probe", "--json")
    rows = json.loads(out)
    names = [*("decoder_layer", "gated_rmsnorm", "geglu", "moe", "moe_transposed", "qkv", "rmsnorm")]
    names += ["rmsnorm_swiglu", "rope", "router", "swiglu"]
    assert [row["id"] for row in rows] == [f"npu_fused_{name}" for name in names]
    assert {row["available"] for row in rows} == {None}


def test_list_kernels_table_names_reasons(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = _run(capsys, "list-kernels")
    assert code == 0
    assert re.search(r"cpu_fused_swiglu\s+cpu\s+gated_mlp\s+yes", out)
    found = re.search(r"npu_fused_swiglu\s+npu\s+gated_mlp\s+no \((\d+)\)", out)
    assert found is not None
    assert f"\nno ({found[1]}): torch_npu is not installed\n" in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("_fused_" in line for line in lines) == len({line.split()[0] for line in lines if "_fused_" in line})
    reasons = [line for line in lines if line.startswith("no (")]
    assert len(reasons) == len({line.partition(":")[2] for line in reasons})


def test_help_names_every_exit_code(capsys: Capture) -> None:
    code, out, _ = _run(capsys, "--help")
    text = " ".join(out.split())
    assert code == 0
    for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 130):
        assert re.search(rf"(: |; ){number} [a-z]", text), number


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_help_of_a_command_says_where_the_exit_codes_are(capsys: Capture, command: str) -> None:
    code, out, _ = _run(capsys, command, "-h")
    assert code == 0
    assert out.rstrip().endswith("\n\n  Exit codes: see kconvert --help.")


def test_usage_errors(capsys: Capture, source: Path) -> None:
    for argv in (["nonsense"], ["apply"], ["apply", "qwen3", source, "--jsn"], ["list-kernels", "--device", "tpu"], []):
        code, out, _ = _run(capsys, *argv)
        assert code == 2, argv
        assert not (out and argv)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["plan", "--jso"], "No such option: --jso (Possible options: --json); `kconvert plan --help` shows the usage"),
        (["apply"], "Missing argument 'RECIPE'; `kconvert apply --help` shows the usage"),
        (["pln"], "No such command 'pln'. Did you mean 'plan'? `kconvert --help` shows the usage"),
        (["--nn"], "No such option: --nn; `kconvert --help` shows the usage"),
    ],
)
def test_a_usage_error_is_a_sentence_and_names_the_help(capsys: Capture, argv: list[str], line: str) -> None:
    code, _, err = _run(capsys, *argv)
    assert (code, err) == (2, f"kconvert: error: {line}\n")


def test_a_name_on_the_hub_is_no_folder(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    code, _, err = _run(capsys, "plan", "qwen3", "Qwen/Qwen3-0.6B")
    assert code == 4
    assert _error_line(err) == (
        "kconvert: error: Qwen/Qwen3-0.6B: no such directory; download a model from the Hub first "
        "(`hf download Qwen/Qwen3-0.6B`) and give the folder that it prints"
    )
    for path in ("models/mine", "mine", "/no/mine", "a/b/mine", "../mine", str(tmp_path / "mine")):
        assert "hf download" not in _run(capsys, "plan", "qwen3", path)[2], path


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_output_equal_to_inside_or_around_the_source(source: Path, capsys: Capture, where: str) -> None:
    code, _, err = _run(capsys, "apply", "qwen3", source, "-o", source / where)
    assert code == 2
    assert str(source) in _error_line(err)


def test_recipe_errors_are_code_3_with_file_and_line(source: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = write_recipe(
        tmp_path / "my.yaml",
        '  - kernel: cpu_fused_swigul\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n',
    )
    code, _, err = _run(capsys, "apply", recipe, source)
    line = _error_line(err)
    assert code == 3
    assert re.search(r"my\.yaml:\d+: unknown kernel 'cpu_fused_swigul'; did you mean cpu_fused_swiglu", line)
    assert _run(capsys, "apply", "llama", source)[0] == 3
    assert _run(capsys, "apply", "no-such-recipe", source)[0] == 3
    assert not source.with_name("my-model-kconvert").exists()


def test_source_errors_are_code_4(source: Path, tmp_path: Path, capsys: Capture) -> None:
    assert _run(capsys, "apply", "qwen3", tmp_path / "absent")[0] == 4
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 4
    assert "model.safetensors" in _error_line(err)
    weights.rename(source / "pytorch_model.bin")
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 4
    assert "pickle" in _error_line(err)
    assert not source.with_name("my-model-kconvert").exists()


def test_converting_twice_is_code_4(source: Path, capsys: Capture) -> None:
    assert _run(capsys, "apply", "qwen3", source)[0] == 0
    code, _, err = _run(capsys, "apply", "qwen3", source.with_name("my-model-kconvert"))
    assert code == 4
    assert "already converted" in _error_line(err)


def test_disk_full_is_code_6(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.statvfs

    def full(path: Any) -> Any:
        found = real(path)
        return os.statvfs_result((*found[:2], found.f_blocks, 0, 0, *found[5:]))

    monkeypatch.setattr(os, "statvfs", full)
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 6
    assert "free" in _error_line(err)
    assert not source.with_name("my-model-kconvert").exists()


def test_existing_output_is_code_7_until_overwritten(source: Path, capsys: Capture) -> None:
    assert _run(capsys, "apply", "qwen3", source)[0] == 0
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 7
    assert "--overwrite" in _error_line(err)
    assert _run(capsys, "apply", "qwen3", source, "--dry-run")[0] == 7
    assert _run(capsys, "apply", "qwen3", source, "--overwrite")[0] == 0


def test_overwrite_does_not_touch_foreign_files(source: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert _run(capsys, "apply", "qwen3", source, "-o", tmp_path / "mine", "--overwrite")[0] == 7
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("added", ["notes.txt", "checkpoint-500/optimizer.pt", "model.safetensors"])
def test_overwrite_keeps_an_output_with_files_that_were_added(source: Path, capsys: Capture, added: str) -> None:
    output = source.with_name("my-model-kconvert")
    assert _run(capsys, "apply", "qwen3", source)[0] == 0
    (output / added).parent.mkdir(exist_ok=True)
    (output / added).write_text("mine")
    before = _files(source.parent)
    for more in ([], ["--dry-run"]):
        code, out, err = _run(capsys, "apply", "qwen3", source, "--overwrite", *more)
        assert (code, out) == (7, "")
        assert f"{output}: output holds {added!r}, which kconvert did not write" in _error_line(err)
    assert _files(source.parent) == before
    (output / added).unlink()
    assert _run(capsys, "apply", "qwen3", source, "--overwrite")[0] == 0
    assert sorted(path.name for path in source.parent.iterdir()) == ["my-model", "my-model-kconvert"]


@pytest.mark.parametrize("place", ["elsewhere", "into the output"])
def test_overwrite_keeps_what_a_model_was_saved_as(source: Path, capsys: Capture, place: str) -> None:
    """It may hold weeks of training; what `apply` wrote can be made again."""
    output = source.with_name("my-model-kconvert")
    assert _run(capsys, "apply", "qwen3", source)[0] == 0
    saved = output if place == "into the output" else source.with_name("trained")
    load_converted(output).save_pretrained(saved, variant="kconvert")
    before = _files(source.parent)
    code, _, err = _run(capsys, "apply", "qwen3", source, "-o", saved, "--overwrite")
    assert code == 7
    assert f"{saved}: output holds weights that a model was saved as" in _error_line(err)
    assert _files(source.parent) == before


def test_untrusted_package_is_code_8(source: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "layers.py").write_text("raise SystemExit('imported')\n")
    entry = (
        "  - kernel: ./package:Norm\n    trust_remote_code: true\n"
        '    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'
    )
    recipe = write_recipe(tmp_path / "my.yaml", entry)
    code, _, err = _run(capsys, "apply", recipe, source)
    assert code == 8
    assert "--trust-remote-code" in _error_line(err)


NOISY = """
import sys
from torch import nn

print("imported")
sys.stdout.write("no line end")

class Norm:
    def forward(self, hidden_states):
        return hidden_states * self.weight

class NormLayout(nn.Module):
    conversion_mapping = ()

    def __init__(self, hidden_size, eps=1e-6):
        print("made")
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(1, hidden_size).weight[:, 0])
"""


@pytest.mark.parametrize("command", [["apply"], ["apply", "--dry-run"], ["plan"]])
def test_json_is_one_value_whatever_a_package_prints(
    source: Path, tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    (tmp_path / "package").mkdir()
    # the digest names the module: text of its own, so that it is imported by this test
    (tmp_path / "package" / "layers.py").write_text(f"# {command}\n{NOISY}")
    entry = (
        "  - kernel: ./package:Norm\n    trust_remote_code: true\n"
        '    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'
    )
    recipe = write_recipe(tmp_path / "my.yaml", entry)
    code, out, err = _run(capsys, *command, recipe, source, "--trust-remote-code", "--json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)
    assert [text for text in ("imported", "no line end", "made") if text not in err] == []


def test_interrupt_is_code_130_and_the_same_command_goes_on(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kconvert.rewrite.output import Partial

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Partial, "publish", interrupted)  # the last moment: everything is written, nothing renamed
        code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 130
    partial = source.parent / "my-model-kconvert.partial"
    kept, error = err.splitlines()[-2:]
    assert kept == f"kconvert: 1 of 1 weight files are kept in {partial}; the same command goes on from there"
    assert error == "kconvert: error: interrupted; no output was changed"
    assert sorted(path.name for path in source.parent.iterdir()) == ["my-model", partial.name]
    code, out, _ = _run(capsys, "apply", "qwen3", source, "--json")
    assert code == 0
    assert json.loads(out)["bytes_resumed"] > 0
    assert sorted(path.name for path in source.parent.iterdir()) == ["my-model", "my-model-kconvert"]


def test_an_unexpected_error_is_code_1_without_traceback(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kconvert.cli.plan as plan

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("of our own making\nsecond line")

    monkeypatch.setattr(plan, "prepare", broken)
    code, out, err = _run(capsys, "plan", "qwen3", source, "--json")
    assert code == 1
    assert "ZeroDivisionError: of our own making;" in _error_line(err)
    assert json.loads(out)["exit_code"] == 1
    monkeypatch.setenv("KCONVERT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["plan", "qwen3", str(source)])


def test_errors_with_json_are_one_value_too(source: Path, capsys: Capture) -> None:
    code, out, err = _run(capsys, "apply", "llama", source, "--json")
    value = json.loads(out)
    assert value["exit_code"] == code == 3
    assert value["error"] in _error_line(err)


def test_a_snapshot_in_a_hub_cache_needs_an_output(qwen3_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    repo = tmp_path / "hub" / "models--me--tiny"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(qwen3_dir.iterdir())):
        shutil.copyfile(path, repo / "blobs" / f"sha{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"sha{number}")
    code, _, err = _run(capsys, "apply", "qwen3", snapshot)
    assert code == 2
    assert "-o OUTPUT" in _error_line(err)
    assert _run(capsys, "apply", "qwen3", snapshot, "-o", tmp_path / "out")[0] == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_carried_tensors_are_announced(tmp_path: Path, capsys: Capture) -> None:
    tensors = qwen3_tensors() | {"mtp.fc.weight": torch.ones(2, 2)}
    source = write_checkpoint(tmp_path / "my-model", tensors, qwen3_config())
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 0, err
    assert "mtp.fc.weight" in err


@pytest.mark.parametrize("more", [[], ["--no-model-check"]])
@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_a_config_that_names_no_model_is_code_4(tmp_path: Path, capsys: Capture, key: str, more: list[str]) -> None:
    config = {name: value for name, value in qwen3_config().items() if name != key}
    source = write_checkpoint(tmp_path / "my-model", qwen3_tensors(), config)
    code, _, err = _run(capsys, "apply", "qwen3", source, *more)
    assert code == 4
    assert f"{source}: config.json names no {key}" in _error_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["my-model"]


def test_model_code_of_the_directory_is_not_run_and_there_is_a_way_without(tmp_path: Path, capsys: Capture) -> None:
    config = qwen3_config(
        model_type="kconvert_test_type",
        architectures=["MyForCausalLM"],
        auto_map={"AutoConfig": "modeling_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
    )
    source = write_checkpoint(tmp_path / "my-model", qwen3_tensors(), config)
    (source / "modeling_my.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    recipe = write_recipe(
        tmp_path / "my.yaml",
        '  - kernel: cpu_fused_swiglu\n    replace: {class: MyMLP, path: "model.layers.*.mlp"}\n',
        model_type="kconvert_test_type",
    )
    code, _, err = _run(capsys, "apply", recipe, source, "--trust-remote-code")
    assert code == 8
    assert "MyForCausalLM is defined by code in this directory" in _error_line(err)
    assert "--no-model-check" in _error_line(err)
    assert not source.with_name("my-model-kconvert").exists()
    code, out, err = _run(capsys, "apply", recipe, source, "--no-model-check")
    assert code == 0, err
    manifest = load_manifest(Path(out.strip()))
    assert not manifest.model_checked
    assert "model.layers.1.mlp.gate_up_proj.weight" in manifest.tensors_by_target()
    assert not (tmp_path / "ran").exists()


def test_the_way_without_the_model_is_closed_where_names_are_mapped(tmp_path: Path, capsys: Capture) -> None:
    config = qwen3_config(model_type="qwen2_moe")
    source = write_checkpoint(tmp_path / "my-model", qwen3_tensors(), config)
    entry = '  - kernel: cpu_fused_swiglu\n    replace: {class: X, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "my.yaml", entry, model_type="qwen2_moe")
    code, _, err = _run(capsys, "apply", recipe, source, "--no-model-check")
    assert code == 4
    assert "leave out --no-model-check" in _error_line(err)


def test_an_output_where_nothing_can_be_made_is_code_6(source: Path, capsys: Capture) -> None:
    code, out, err = _run(capsys, "apply", "qwen3", source, "-o", "/proc/foo", "--no-model-check")
    assert (code, out) == (6, "")
    assert "/proc/foo" in _error_line(err) or "/proc:" in _error_line(err)


def test_a_path_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    """Where stdout is strict, as in most locales; in the C locale it is not."""
    folder = tmp_path / os.fsdecode(b"mod\xe9l")
    source = write_checkpoint(folder / "my-model", qwen3_tensors(), qwen3_config())
    for argv in (["apply"], ["apply", "--json", "--overwrite"], ["plan"], ["plan", "--json"]):
        written = io.BytesIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(written, "utf-8", errors="strict", write_through=True)):
            assert main([*argv, "qwen3", str(source), "--no-model-check"]) == 0
            shown = written.getvalue().decode()
        if "--json" in argv:
            json.loads(shown)
        elif argv == ["apply"]:
            assert shown == str(folder / "my-model-kconvert").replace("\udce9", "\\udce9") + "\n"


@pytest.mark.parametrize("place", ["kconvert.cli.app.run", "kconvert.cli.app._check_working_directory"])
def test_an_interrupt_that_comes_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: Capture, place: str) -> None:
    """As Python 3.11 gives one that falls into the making of a class."""

    def wrapped(*_: Any) -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(place, wrapped)
    code, out, err = _run(capsys, "list-kernels")
    assert (code, out) == (130, "")
    assert "interrupted" in _error_line(err)


@pytest.mark.parametrize("command", ["apply qwen3 x", "plan qwen3 x", "revert x -o y", "inspect x"])
def test_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: str
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = _run(capsys, *command.split())
    assert (code, out) == (2, "")
    assert "the working directory is gone" in _error_line(err)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_400_000_000, "16.4 GB"), (3 * 10**15, "3000.0 TB")],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text
