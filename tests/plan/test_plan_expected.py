"""What a plan says that it will take: bytes, files and memory, against what `apply` then takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.checkpoint import header
from kconvert.cli import main
from kconvert.convert import expect, expected, prepare
from kconvert.errors import CheckpointError
from kconvert.plan import Made
from kconvert.rewrite.gather import BLOCK_BYTES
from kconvert.transforms import Arrangement, Dim, Piece
from tests.plan.generated import MLP, NORMS
from tests.support import qwen3_config, qwen3_tensors, write_checkpoint, write_recipe

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def written(output: Path) -> tuple[int, int]:
    """Bytes and number of the files of a directory."""
    files = [path for path in output.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


def planned(capsys: Capture, *argv: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, argv), "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def checkpoint_of(folder: Path, shards: int = 1) -> Path:
    """A checkpoint with files beside its weights."""
    tensors = qwen3_tensors()
    names = list(tensors)
    parts = [names[number::shards] for number in range(shards)]
    source = write_checkpoint(folder, tensors, qwen3_config(), parts if shards > 1 else None)
    (source / "tokenizer.json").write_text('{"größe": 1}', encoding="utf-8")
    (source / "more").mkdir()
    (source / "more" / "empty.txt").write_bytes(b"")
    (source / "pytorch_model.bin").write_bytes(b"never brought over")
    return source


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "1kB"), ("--max-shard-size=1GB",)])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("patches", [MLP, NORMS], ids=["packed", "unchanged"])
def test_size_and_files_are_those_of_the_output(
    tmp_path: Path, capsys: Capture, patches: str, shards: int, options: Sequence[str]
) -> None:
    source = checkpoint_of(tmp_path / "source", shards)
    recipe = write_recipe(tmp_path / "r.yaml", patches)
    argv = [str(recipe), str(source), "--no-model-check", *options]
    told = planned(capsys, *argv)["expected"]
    assert main(["apply", *argv, "-o", str(tmp_path / "out"), "-q"]) == 0
    assert (told["bytes"], told["files"]) == written(tmp_path / "out")


@pytest.mark.parametrize("shards", [1, 3])
def test_digests_are_counted(tmp_path: Path, capsys: Capture, shards: int) -> None:
    source = checkpoint_of(tmp_path / "source", shards)
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    argv = ["apply", str(recipe), str(source), "--no-model-check", "--digests", "-o", str(tmp_path / "out")]
    assert main([*argv, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["expected"]
    assert main([*argv, "-q"]) == 0
    assert (told["bytes"], told["files"]) == written(tmp_path / "out")


def test_with_the_model_check_too(qwen3_sharded_dir: Path, converted_sharded_dir: Path, capsys: Capture) -> None:
    told = planned(capsys, "qwen3", qwen3_sharded_dir)["expected"]
    assert (told["bytes"], told["files"]) == written(converted_sharded_dir)


def test_of_very_many_tensors_only_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", qwen3_tensors(30), qwen3_config(30))
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    prepared = prepare(str(recipe), source, model_check=False)
    exact = expect(prepared)
    monkeypatch.setattr(expected, "_SAMPLE", 80)
    about = expect(prepared)
    assert about.num_files == exact.num_files
    assert about.size_bytes != exact.size_bytes
    assert abs(about.size_bytes - exact.size_bytes) < 0.05 * exact.size_bytes


MEASURE = """
import resource, sys
from kconvert.cli import main
import numpy  # the interpreter with its imports
import kconvert.cli.app
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
code = main(sys.argv[1:])
print(code, peak() - before)
"""


@pytest.mark.parametrize(("layers", "rows"), [(2, 200_000), (300, 12)], ids=["large tensors", "many tensors"])
def test_memory_stays_below_what_is_said(tmp_path: Path, capsys: Capture, layers: int, rows: int) -> None:
    tensors = qwen3_tensors(layers)
    for layer in range(layers):
        for name in ("gate", "up"):
            tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = torch.zeros(rows, 8)
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(layers))
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    argv = [str(recipe), str(source), "--no-model-check"]
    told = planned(capsys, *argv)["expected"]["memory_bytes"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "apply", *argv, "-o", str(tmp_path / "out"), "-q"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    code, used = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0
    assert used < told < 64 << 20


def test_memory_grows_with_the_number_of_tensors_and_where_elements_are_moved(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path / "r.yaml", MLP))
    few, many = (
        expect(
            prepare(
                recipe,
                write_checkpoint(tmp_path / str(layers), qwen3_tensors(layers), qwen3_config(layers)),
                model_check=False,
            )
        ).memory_bytes
        for layers in (1, 101)
    )
    assert 3000 < (many - few) / 1100 < 6000, "bytes for each tensor"
    prepared = prepare(recipe, tmp_path / "1", model_check=False)
    columns = Arrangement((8, 1), (Piece("x", 0, 0, (Dim(8, 2, 1),)),))
    steps = (prepared.plan.steps[0]._replace(stored=columns), *prepared.plan.steps[1:])
    moved = replace(prepared, plan=replace(prepared.plan, steps=steps))
    assert expect(moved).memory_bytes > few + 2 * BLOCK_BYTES


def test_computed_tensors_are_in_memory_with_all_that_they_are_made_of(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", qwen3_tensors(), qwen3_config())
    prepared = prepare(str(write_recipe(tmp_path / "r.yaml", MLP)), source, model_check=False)
    large = 10**9
    step = prepared.plan.steps[0]
    made = Made("U8", (large,), lambda: memoryview(b""))
    changed = step._replace(dtype="U8", computed=made, stored=replace(step.stored, shape=(large,)))
    plan = replace(prepared.plan, steps=(changed, *prepared.plan.steps[1:]))
    assert expect(replace(prepared, plan=plan)).memory_bytes > expect(prepared).memory_bytes + 2 * large - (64 << 20)


def test_a_header_beyond_the_limit_is_refused_with_the_way_out(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint_of(tmp_path / "source", 3)
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1600)
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    argv = [str(recipe), str(source), "--no-model-check"]
    assert main(["plan", *argv, "--max-shard-size=1GB"]) == CheckpointError.exit_code
    assert "use smaller shards: --max-shard-size" in capsys.readouterr().err
    assert main(["plan", *argv, "--max-shard-size=2kB"]) == 0


def test_people_are_told(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    source = checkpoint_of(tmp_path / "source", 3)
    recipe = write_recipe(tmp_path / "r.yaml", NORMS)
    assert main(["plan", "r.yaml", "source", "--no-model-check"]) == 0
    out = capsys.readouterr().out
    told = planned(capsys, recipe, source, "--no-model-check")
    assert [file["same_as"] for file in told["files"]] == sorted(
        path.name for path in source.glob("model-*.safetensors")
    )
    assert "3 of 3 weight files are as in the source" in out
    assert f" kB on the disk, in {told['expected']['files']} files with all others" in out
    assert "at most " in out
    assert max(map(len, out.splitlines())) <= 80


def test_of_very_many_files_the_first_and_the_last_are_listed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tensors = qwen3_tensors(4)
    source = write_checkpoint(tmp_path / "my-model", tensors, qwen3_config(4))
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "r.yaml", NORMS)
    assert main(["plan", "r.yaml", "my-model", "--no-model-check", "--max-shard-size", "1"]) == 0
    out = capsys.readouterr().out
    count = len(tensors)
    assert f"\n ... and {count - 24} more ..." in out
    assert [number for number in range(1, count + 1) if f"-{number:05d}-of-" in out] == [
        *range(1, 13),
        *range(count - 11, count + 1),
    ]
    assert "kconvert apply r.yaml my-model --max-shard-size 1 --no-model-check" in out.replace("\\\n", "").replace(
        "    ", ""
    )
    assert len(planned(capsys, recipe, source, "--no-model-check", "--max-shard-size", "1")["files"]) == count
