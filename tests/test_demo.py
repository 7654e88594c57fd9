"""`make demo` does what it says, and says when it does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import demo
from kconvert.cli import main as run_kconvert


@pytest.fixture(autouse=True)
def _80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest imports readline, which tells the children of a terminal, xdist's workers, the width of that."""
    monkeypatch.setenv("COLUMNS", "80")


def test_demo_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = demo.main(tmp_path)
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.splitlines()[-1].startswith("OK: ")
    assert "equal bit for bit: yes" in text
    assert "47 of 47 tensors are those of the source" in text
    assert "OK: 25 of 25 patched modules agree.\nOK: the logits agree in bfloat16 and float32.\n" in text
    assert "no file named model.safetensors" in " ".join(text.split())
    for shown in ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight", "cpu_fused_swiglu", "cpu_fused_rmsnorm"):
        assert shown in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert (tmp_path / "my-model-demo" / "kconvert_manifest.json").is_file()


def test_demo_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert demo.main() == 0, capsys.readouterr().out
    assert not list(tmp_path.glob("kconvert-demo-*"))


def test_demo_fails_where_the_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = demo.compute_logits
    monkeypatch.setattr(
        demo, "compute_logits", lambda model: real(model) + (1.0 if hasattr(model, "kconvert_report") else 0.0)
    )
    assert demo.main(tmp_path) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: ")
    assert "not equal" in last
    assert "too far" in last


def test_demo_fails_where_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_kconvert", lambda argv: 7)
    assert demo.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: kconvert stopped with exit code 7"


def test_demo_fails_where_verify_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_kconvert", lambda argv: 5 if argv[0] == "verify" else run_kconvert(argv))
    assert demo.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: kconvert verify stopped with exit code 5"


def test_demo_does_not_write_into_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-model").mkdir()
    assert demo.main(tmp_path) == 1
    assert "exists already" in capsys.readouterr().out
    assert not list((tmp_path / "my-model").iterdir())


def test_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name in ("one", "two"):
        demo.make_checkpoint(tmp_path / name)
    assert torch.equal(state, torch.get_rng_state())
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [name for name in names if name.endswith(".safetensors")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
