"""`new-kernel`: what it writes passes its own test and `check-kernel`, converts, and loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kconvert import load_converted
from kconvert.authoring import new_kernel
from kconvert.authoring.scaffold import snake_name
from kconvert.cli import main
from kconvert.errors import OutputError, UsageError
from kconvert.kernels.packages import copy_package, import_package
from tests.authoring.inner import run_tests
from tests.packages.helpers import failure, logits, stock

Capture = pytest.CaptureFixture[str]
KINDS = {"replace": ([], "FastMLP"), "fuse": (["--fuse"], "RMSNormMLP")}
LAYERS = {"replace": "model.layers.*.mlp", "fuse": "model.layers.*.post_attention_layernorm"}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> dict[str, Path]:
    """The folder of each kind, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for options, name in KINDS.values():
        assert main(["new-kernel", name, *options]) == 0
    assert capsys.readouterr().out.split() == ["fast_mlp", "rms_norm_mlp"]
    return {"replace": tmp_path / "fast_mlp", "fuse": tmp_path / "rms_norm_mlp"}


def _files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_its_own_test_passes_and_leaves_the_package_as_it_was(written: dict[str, Path]) -> None:
    """Byte code in the package's folder would be another digest, and is refused."""
    for kind, folder in written.items():
        module = folder.name
        expected = {"README.md", "recipe.yaml", f"test_{module}.py", f"{module}/__init__.py", f"{module}/layers.py"}
        assert _files(folder) == expected, kind
    assert run_tests(*written.values(), config=written["fuse"].parent / "pytest.ini") == ["passed"] * 4
    for kind, folder in written.items():
        assert _files(folder / folder.name) == {"__init__.py", "layers.py"}, kind


@pytest.mark.parametrize("kind", list(KINDS))
def test_checked_planned_converted_and_loaded(
    kind: str, written: dict[str, Path], qwen3_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder, name = written[kind], KINDS[kind][1]
    recipe, output = str(folder / "recipe.yaml"), tmp_path / "out"
    kernel = f"{folder.name}/{folder.name}:{name}"
    assert main(["check-kernel", kernel, "--model-dir", str(qwen3_dir), "--recipe", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {check["result"] for check in found["checks"]} == {"ok"}, found
    assert main(["plan", recipe, str(qwen3_dir), "--trust-remote-code"]) == 0
    assert f"{name}Layout" in capsys.readouterr().out
    assert main(["apply", recipe, str(qwen3_dir), "-o", str(output), "--trust-remote-code"]) == 0
    model = load_converted(output, trust_remote_code=True)
    report = model.kconvert_report.to_dict()
    assert report["kernels"] == {f"./{folder.name}:{name}": 2}
    assert {module["path"].replace("0", "*").replace("1", "*") for module in report["modules"]} == {LAYERS[kind]}
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)
    assert torch.equal(
        logits(load_converted(output, trust_remote_code=True, kernels="reference")), logits(stock(qwen3_dir))
    )


def test_what_is_written_is_in_style(written: dict[str, Path]) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", *map(str, written.values())],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("FastMLP", "fast_mlp"),
        ("RMSNorm", "rms_norm"),
        ("A", "a"),
        ("GeGLU2Norm", "ge_glu2_norm"),
        ("My_Norm", "my_norm"),
    ],
)
def test_the_folder_is_the_name_in_snake_case(name: str, snake: str) -> None:
    assert snake_name(name) == snake


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fast-mlp", "is no class name"),
        ("class", "is no class name"),
        ("2Fast", "is no class name"),
        ("", "is no class name"),
        ("a.B", "is no class name"),
        ("../B", "is no class name"),
        ("fastMLP", "begins with no capital"),
        ("_Fast", "begins with no capital"),
        ("FastLayout", "give the kernel's own name, e.g. Fast"),
        ("Layout", "e.g. FastMLP"),
        ("WeightConverter", "is taken"),
        ("ValueError", "is taken"),
        ("Torch", "would hide module 'torch'"),
        ("Json", "would hide module 'json'"),
    ],
)
def test_a_name_that_cannot_be_a_kernels(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        new_kernel(name, tmp_path / "new")
    assert failure(caught.value)[0] == 2
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for target, said in ((tmp_path / "new", "is not empty"), (tmp_path / "file", "cannot be written")):
        with pytest.raises(OutputError, match=said) as caught:
            new_kernel("FastMLP", target)
        assert failure(caught.value)[0] == 7
    assert _files(tmp_path) == {"new/mine.txt", "file"}


def test_an_empty_folder_is_used_and_any_name_fits_the_classes(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    made = new_kernel("Concat3", tmp_path / "new", kind="fuse")
    assert made.kernel == f"{tmp_path / 'new' / 'concat3'}:Concat3"
    classes = import_package(copy_package(tmp_path / "new" / "concat3", "new"), "Concat3")
    assert (classes.kernel.__name__, getattr(classes.layout, "__name__", None)) == ("Concat3", "Concat3Layout")
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert not [text for text in texts if "kernel_name" in text or "KernelName" in text]


def test_json_says_what_was_written(tmp_path: Path, capsys: Capture) -> None:
    assert main(["new-kernel", "FastMLP", "-o", str(tmp_path / "new"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value["files"]) == _files(tmp_path / "new")
    assert value["directory"] == str(tmp_path / "new")
    assert value["kernel"] == f"{tmp_path / 'new' / 'fast_mlp'}:FastMLP"
