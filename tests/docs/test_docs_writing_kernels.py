"""The page on writing kernels: its commands run one after the other, and it shows what `new-kernel` writes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kconvert.manifest import load_manifest
from kconvert.parity.tolerances import MODULE_LIMITS
from tests.authoring.inner import run_tests
from tests.docs.blocks import ROOT, find_blocks, run_blocks

PAGE = ROOT / "docs" / "writing-kernels.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands and blocks of the page ran, from `my-model` alone."""
    made = tmp_path_factory.mktemp("guide")
    runpy.run_path(str(ROOT / "examples" / "demo.py"))["make_checkpoint"](made / "my-model")
    assert run_blocks(PAGE, made) == {"python", "console"}
    return made


def test_the_guide_ends_with_a_converted_model(folder: Path) -> None:
    (patch,) = load_manifest(folder / "my-model-kconvert").patches
    assert patch.layout.name == "FastMLPLayout"
    assert patch.kernels == ("./fast_mlp:FastMLP",)
    assert len(patch.modules) == 4


def test_every_command_is_run(folder: Path) -> None:
    lines = [
        line
        for block in find_blocks(PAGE.read_text(encoding="utf-8"))
        if block.language == "console"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    others = [line for line in lines if not line.startswith("kconvert ")]
    assert others == ["pytest fast_mlp"]
    assert run_tests(folder / "fast_mlp", config=folder / "pytest.ini") == ["passed", "passed"]


def test_what_is_shown_is_what_is_written(folder: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = {block.language: block.text for block in reversed(list(find_blocks(text))) if block.language != "console"}
    layers = (folder / "fast_mlp" / "fast_mlp" / "layers.py").read_text(encoding="utf-8")
    assert blocks["python"] + "\n" == layers
    assert blocks["yaml"] + "\n" == (folder / "fast_mlp" / "recipe.yaml").read_text(encoding="utf-8")
    shown = {line.split()[0].rstrip("/") for line in blocks["text"].splitlines() if line.strip()}
    written = {path.name for path in (folder / "fast_mlp").rglob("*") if "__pycache__" not in path.parts}
    assert shown == written | {"fast_mlp"}


def test_the_limits_are_the_real_ones() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    limits = {
        name: f"{MODULE_LIMITS[name]:.2g}".replace("1e-05", "1e-5") for name in ("float32", "bfloat16", "float16")
    }
    assert "those of `kconvert verify`: " + ", ".join(f"{limit} in {name}" for name, limit in limits.items()) in text
