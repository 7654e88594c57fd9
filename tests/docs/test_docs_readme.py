"""The README is a promise: its commands and Python blocks run, its make targets and exit codes are the real ones.

Recipes are its ```yaml blocks.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kconvert.cli import main as run_kconvert
from kconvert.errors import KconvertError
from kconvert.manifest import load_manifest
from tests.docs.blocks import ROOT, find_blocks, run_blocks

PACKAGE_LEFTOVERS = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_and_python_blocks_run(tmp_path: Path) -> None:
    make_checkpoint = runpy.run_path(str(ROOT / "examples" / "demo.py"))["make_checkpoint"]
    make_checkpoint(tmp_path / "my-model")
    assert run_blocks(ROOT / "README.md", tmp_path) == {"python", "console"}


def test_make_targets_are_real(readme: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    in_blocks = "\n".join(block.text for block in find_blocks(readme))
    named = set(re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", in_blocks, flags=re.MULTILINE))
    named |= set(re.findall(r"`make ([a-z][a-z-]*)`", readme))
    assert named >= {"demo", "test"}
    assert named <= targets, f"README.md names no real target: {sorted(named - targets)}"


@pytest.mark.parametrize(("target", "script"), [("demo", "examples/demo.py"), ("demo-real", "examples/demo_real.py")])
def test_demo_targets_run_the_demos(readme: str, target: str, script: str) -> None:
    assert f"`make {target}`" in readme
    # what a `make test` around this test passes on would change what is printed
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    last = shlex.split(done.stdout.splitlines()[-1])
    assert last == [".venv/bin/python", script]
    assert (ROOT / script).is_file()


def test_recipes_run(
    readme: str, qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built_in, package = [block for block in find_blocks(readme) if block.language == "yaml"]
    assert "kernel: ./norm_mlp:RMSNormMLP" in package.text
    shutil.copytree(ROOT / "tests" / "packages" / "norm_mlp", tmp_path / "norm_mlp", ignore=PACKAGE_LEFTOVERS)
    monkeypatch.chdir(tmp_path)
    for number, (block, more) in enumerate([(built_in, []), (package, ["--trust-remote-code"])]):
        (tmp_path / "recipe.yaml").write_text(block.text, encoding="utf-8")
        code = run_kconvert(["apply", "recipe.yaml", str(qwen3_dir), "-o", f"out{number}", *more])
        assert code == 0, f"README.md:{block.line}: {capsys.readouterr().err}"
    recorded = [load_manifest(tmp_path / f"out{number}").patches for number in range(2)]
    assert [[patch.layout.name for patch in patches] for patches in recorded] == [
        ["rms_norm", "qkv_proj", "gated_mlp"],
        ["RMSNormMLPLayout"],
    ]
    assert run_kconvert(["apply", "recipe.yaml", str(qwen3_dir), "-o", "out2"]) == 8, "not without the machine's trust"


def subclasses(cls: type[KconvertError]) -> Iterator[type[KconvertError]]:
    """The class and everything below it that kconvert.errors defines."""
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == cls.__module__:
            yield from subclasses(child)


def test_exit_codes_are_those_of_the_errors(readme: str) -> None:
    table = re.search(r"^\|\s*(?:exit )?code\s*\|.*\n\|[-:| ]+\|\s*\n((?:\|.*(?:\n|$))+)", readme, re.MULTILINE | re.I)
    assert table, "README.md has no table whose first column is `code` or `exit code`"
    rows = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table[1].splitlines()]
    meanings = {int(code.strip("`")): meaning for code, meaning, *_ in rows}
    assert len(meanings) == len(rows), "a code stands in the table twice"
    assert all(meanings.values()), "a code without a meaning"
    assert set(meanings) == {0} | {cls.exit_code for cls in subclasses(KconvertError)}
