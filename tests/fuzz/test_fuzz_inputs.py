"""A short run of every fuzz target, the same inputs each time; `tests/fuzz/run.py` is for long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kconvert.checkpoint import Header
from tests.fuzz import headers
from tests.fuzz.run import TARGETS, run

ROOT = Path(__file__).parents[2]
INPUTS = {"header": 5000, "index": 3000, "manifest": 300, "recipe": 500, "revert": 100}


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run(name: str) -> None:
    figures = run(TARGETS[name](), INPUTS[name], seed=1)
    assert figures.failed is None
    assert figures.num_inputs == INPUTS[name]
    # neither are all inputs nonsense, nor is nothing wrong with them
    assert 0.1 < figures.outcomes["accepted"] / INPUTS[name] < 0.6


def _as_json(raw: bytes, num_data: int) -> Header | None:
    """A reader that takes whatever is JSON."""
    try:
        return Header(raw, None, ()) if isinstance(json.loads(raw), dict) else None
    except ValueError:
        return None


def _by_recursion(raw: bytes, num_data: int) -> Header | None:
    raise RecursionError("maximum recursion depth exceeded")


@pytest.mark.parametrize(
    ("reader", "said"), [(_as_json, "accepted by parse_header, refused by safetensors"), (_by_recursion, "recursion")]
)
def test_a_reader_that_is_no_good_is_found(reader: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_kconvert_parses", reader)
    figures = run(TARGETS["header"](), INPUTS["header"], seed=1)
    assert figures.failed is not None
    data, error = figures.failed
    assert said in str(error)
    with pytest.raises(type(error), match=said):
        TARGETS["header"]().check(data)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "--target", "index", "--seed", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--inputs", "50"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("index: 50 inputs")
    assert done.stdout.endswith("faults: 0\n")
    (tmp_path / "input").write_bytes(b'{"weight_map": {"a": "x.safetensors"}}')
    done = subprocess.run(
        [*command, "--input", str(tmp_path / "input")], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "accepted\n")
