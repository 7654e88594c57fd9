"""The rewrite benchmark: what it measures is what it says, and its result has one form.  No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.rewrite import SCHEMA, main
from benchmarks.rewriting.checkpoint import GB, Shape, make_checkpoint, weight_bytes
from benchmarks.rewriting.measures import MEASURES, RECIPE, Place, run_measure
from benchmarks.rewriting.others import load_cat_save
from benchmarks.rewriting.phases import Journal, measure_rounds
from benchmarks.rewriting.report import summarise, table
from benchmarks.rewriting.running import ROOT, FailedRun, clear, run_all
from tests.support import convert

RUNS = ("cp", "apply", "cp-fsync", "two-cp")
SMALL = Shape(3, scale=32)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def run_python(*arguments: str) -> str:
    """Run the interpreter in a process without torch: its own memory is the least that can be measured."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_whole_run(tmp_path: Path) -> None:
    options = ["--pairs", "1", "--scale", "32", "--work", str(tmp_path), "--memory", "1", "--peers", "none"]
    shown = run_python("benchmarks/rewrite.py", *options, "--runs", *RUNS)
    text = (tmp_path / "rewrite.json").read_text(encoding="utf-8")
    result = json.loads(text)
    assert result["schema"] == SCHEMA
    assert result["checkpoint"] == {"size_bytes": 2_888_256, "shards": 3, "tensors": 310, "scale": 32}
    assert [(run["round"], run["name"]) for run in result["runs"]] == [(1, name) for name in RUNS]
    assert all(run["seconds"] > 0 for run in result["runs"])
    assert [run["peak_bytes"] is None for run in result["runs"]] == [True, False, True, True], (
        "cp is smaller than Python"
    )
    assert {"copy_seconds", "sync_seconds"} < set(result["runs"][1])
    assert list(result["summary"]["measures"]) == list(RUNS)
    assert [run["name"] for run in result["memory"]] == ["apply"]
    assert result["memory"][0]["peak_bytes"] > result["memory"][0]["interpreter_bytes"] > 30e6
    assert result["machine"]["cores"] >= 1
    assert 0 < result["machine"]["unwritten_bytes"] < result["machine"]["memory_bytes"]
    assert result["not_measured"] == {}
    assert "/" not in "".join(value for value in result["machine"].values() if isinstance(value, str)).replace(
        "/Linux", ""
    )
    assert str(tmp_path) not in text
    assert max(map(len, shown.splitlines())) <= 80
    assert "apply: copying / cp -r" in shown
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rewrite.json", "runs.jsonl", "gate-up.yaml", "qwen3-28x64"}


def test_the_script_does_what_apply_does(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, SMALL)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    convert(recipe, source, tmp_path / "ours", model_check=False)
    load_cat_save(source, tmp_path / "script", 0)
    ours, script = all_tensors(tmp_path / "ours"), all_tensors(tmp_path / "script")
    assert len(ours) == 3 * 10 + 2
    assert ours.keys() == script.keys()
    assert all(torch.equal(tensor, script[name]) for name, tensor in ours.items())
    files = json.loads((tmp_path / "script" / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert all(name in load_file(tmp_path / "script" / file) for name, file in files.items())
    assert weight_bytes(tmp_path / "ours") == weight_bytes(tmp_path / "script") == SMALL.size_bytes


def test_an_output_of_another_size_is_no_measurement(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, SMALL)
    place = Place(source, tmp_path / "converted", tmp_path / "output", tmp_path / "recipe.yaml", SMALL, sys.executable)
    assert run_measure("cp", place)[1] == {}
    assert (place.output / "config.json").read_bytes() == (source / "config.json").read_bytes()
    clear(place.output)
    with pytest.raises(
        FailedRun, match=f"wrote {SMALL.size_bytes} bytes of weights, not {Shape(4, scale=32).size_bytes}"
    ):
        run_measure("cp", replace(place, shape=Shape(4, scale=32)))


@pytest.mark.parametrize(("size", "layers", "shards"), [(1, 9, 2), (3, 28, 3), (12, 118, 13)])
def test_shapes_have_the_size_that_was_asked_for(size: int, layers: int, shards: int) -> None:
    shape = Shape.of_size(size * GB)
    assert (shape.num_layers, len(shape.shards())) == (layers, shards)
    assert abs(shape.size_bytes - size * GB) < 0.06 * GB
    assert (shape.hidden, shape.intermediate) == (2048, 6144)
    small = Shape.of_size(size * GB, scale=32)
    assert list(small.tensors()) == list(shape.tensors())


def test_checkpoints_hold_different_finite_values(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, SMALL)
    tensors = all_tensors(source)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SMALL.tensors()
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
    assert not torch.equal(tensors["model.layers.0.mlp.gate_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"])
    stamp = (source / "config.json").stat().st_mtime_ns
    assert (make_checkpoint(tmp_path, SMALL) / "config.json").stat().st_mtime_ns == stamp, "made only once"


def a_run(number: int, name: str, seconds: float, **more: float) -> dict[str, Any]:
    return {"round": number, "name": name, "seconds": seconds, "peak_bytes": 50_000_000, **more}


def a_round(number: int, *, cp: float, copy: float, two: float) -> list[dict[str, Any]]:
    own = {"copy_seconds": copy, "sync_seconds": 0.5, "check_seconds": 0.0}
    return [
        a_run(number, "cp", cp),
        a_run(number, "cp-fsync", 2 * cp),
        a_run(number, "two-cp", two),
        a_run(number, "apply", copy + 1, **own),
        a_run(number, "script", 4.0),
    ]


def test_ratios_are_taken_within_a_round() -> None:
    runs = (
        a_round(1, cp=1.0, copy=0.8, two=0.7) + a_round(2, cp=2.0, copy=1.5, two=1.5) + a_round(3, cp=9, copy=9, two=9)
    )
    summary = summarise(runs, [])
    assert summary["measures"]["cp"]["median_seconds"] == 2.0
    assert summary["measures"]["apply"]["median_ratio_to_cp"] == 1.25
    assert summary["measures"]["apply"]["ratio_range"] == [10 / 9, 1.8]
    copying, syncing, command, checked = summary["goals"]
    assert (copying["value"], copying["limit"], copying["met"]) == (0.8, 0.9, True)
    assert syncing["value"] == pytest.approx(9.5 / 18)
    assert (command["value"], command["met"]) == (2.5 / 4, False)
    assert (checked["value"], checked["met"]) == (None, None)
    assert summary["control"]["median"] == 0.75
    assert summary["control"]["held"] is True
    assert summary["control"]["rounds_over_the_limit"] == [3]


def test_a_control_that_did_not_hold_is_shown() -> None:
    summary = summarise(a_round(1, cp=1.0, copy=0.5, two=0.86), [])
    assert summary["control"]["held"] is False
    machine = {
        "cores": 2,
        "memory_bytes": 1,
        "file_system": "ext4",
        "system": "Linux",
        "kernel": "6",
        "load_at_start": 3.0,
        "unwritten_bytes": 3_300_000_000,
    }
    checkpoint = {"size_bytes": 3_400_000_000, "shards": 1, "tensors": 1}
    result = {
        "machine": machine,
        "checkpoint": checkpoint,
        "versions": {},
        "rounds": 1,
        "memory": [],
        "summary": summary,
    }
    shown = table({**result, "not_measured": {"mergekit": "not installed", "memory, 12 GB": "no room"}})
    assert "NOT HELD" in shown
    assert "The machine was not quiet: load 3.00" in shown
    assert "More than 3.3 GB are written at once" in shown
    assert "not measured: mergekit passthrough; no packing: not installed" in shown
    assert "not measured: memory, 12 GB: no room" in shown


def test_memory_is_compared_between_sizes() -> None:
    memory = [
        {"name": "apply", "size_bytes": size * GB, "peak_bytes": peak, "interpreter_bytes": 50_000_000}
        for size, peak in ((1, 52_000_000), (12, 120_000_000))
    ]
    above, between = summarise(a_round(1, cp=1.0, copy=0.5, two=0.5), memory)["goals"][4:]
    assert (above["value"], above["limit"], above["met"]) == (70.0, 64.0, False)
    assert (between["value"], between["met"]) == (68.0, False)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path, identity = tmp_path / "runs.jsonl", {"schema": 1}
    Journal(path, identity, resume=False).add({"phase": "rounds", "round": 1, "name": "cp"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"phase": "rounds", "rou')
    journal = Journal(path, identity, resume=True)
    assert journal.has(phase="rounds", round=1, name="cp")
    assert not journal.has(phase="rounds", round=1, name="apply")
    assert journal.of("rounds") == [{"round": 1, "name": "cp"}]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2, "the torn line is gone"
    with pytest.raises(SystemExit, match="leave out --resume"):
        Journal(path, {"schema": 2}, resume=True)
    assert Journal(path, identity, resume=False).records == []


def test_what_fails_in_a_round_is_left_out_and_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, SMALL)
    place = Place(source, tmp_path / "converted", tmp_path / "output", tmp_path / "recipe.yaml", SMALL, "false")
    journal = Journal(tmp_path / "runs.jsonl", {}, resume=False)
    failed = measure_rounds(["cp", "mergekit"], place, journal, pairs=2, side_pairs=2)
    assert failed == {"mergekit": "failed in round 1: no message"}
    assert [(run["round"], run["name"]) for run in journal.of("rounds")] == [(1, "cp"), (2, "cp")]
    assert not place.output.exists()
    with pytest.raises(FailedRun):
        measure_rounds(["apply"], place, journal, pairs=1, side_pairs=1)


def test_a_process_is_measured_or_its_failure_told() -> None:
    show = "from benchmarks.rewriting.running import run_all; import sys; print(run_all([[sys.executable, '-c', '%s']]).peak_bytes)"
    assert 150e6 < int(run_python("-c", show % "bytearray(150_000_000)")) < 200e6
    assert run_python("-c", "x = bytearray(50_000_000); " + show % "0") == "None\n"
    program = "import sys; sys.stderr.write('no\\nbad file /some/where/x.bin: gone\\n'); sys.exit(7)"
    with pytest.raises(FailedRun, match="bad file PATH: gone") as caught:
        run_all([[sys.executable, "-c", "0"], [sys.executable, "-c", program]])
    assert caught.value.code == 7


def test_what_can_be_chosen_is_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown: copy"):
        main(["--runs", "copy", "--work", str(tmp_path)])
    assert set(RUNS) < set(MEASURES)
