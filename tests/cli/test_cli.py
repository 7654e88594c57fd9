"""The command line as a person or a script meets it: exit codes, stdout, stderr, and nothing half written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.cli import main
from kconvert.cli.output import format_bytes
from kconvert.kernels.registry import Registry
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


def test_plan_fits_80_columns(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = _run(capsys, "plan", "qwen3", source)
    assert max(map(len, out.splitlines())) <= 80


def test_the_plan_is_the_same_without_the_model_check(source: Path, capsys: Capture) -> None:
    checked = json.loads(_run(capsys, "plan", "qwen3", source, "--json")[1])
    unchecked = json.loads(_run(capsys, "plan", "qwen3", source, "--json", "--no-model-check")[1])
    assert checked.pop("model_checked") is True
    assert unchecked.pop("model_checked") is False
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
    assert {row["id"] for row in rows} == {"npu_fused_rmsnorm", "npu_fused_rmsnorm_swiglu", "npu_fused_swiglu"}
    assert {row["available"] for row in rows} == {None}


def test_list_kernels_table_names_reasons(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = _run(capsys, "list-kernels")
    assert code == 0
    assert re.search(r"cpu_fused_swiglu\s+cpu\s+gated_mlp\s+yes", out)
    assert re.search(r"cuda_fused_swiglu\s+cuda\s+gated_mlp\s+no: its device code", out)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("argv", [["--help"], ["apply", "--help"], ["plan", "-h"], ["list-kernels", "--help"]])
def test_help_names_every_exit_code(capsys: Capture, argv: list[str]) -> None:
    code, out, _ = _run(capsys, *argv)
    text = " ".join(out.split())
    assert code == 0
    for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 130):
        assert re.search(rf"(: |; ){number} [a-z]", text), number


def test_usage_errors(capsys: Capture, source: Path) -> None:
    for argv in (["nonsense"], ["apply"], ["apply", "qwen3", source, "--jsn"], ["list-kernels", "--device", "tpu"], []):
        code, out, _ = _run(capsys, *argv)
        assert code == 2, argv
        assert not (out and argv)


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


def test_interrupt_is_code_130_and_leaves_nothing(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kconvert.rewrite.output import Partial

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Partial, "publish", interrupted)  # the last moment: everything is written, nothing renamed
    code, _, err = _run(capsys, "apply", "qwen3", source)
    assert code == 130
    assert "interrupted" in _error_line(err)
    assert sorted(path.name for path in source.parent.iterdir()) == ["my-model"]


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_400_000_000, "16.4 GB"), (3 * 10**15, "3000.0 TB")],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text
