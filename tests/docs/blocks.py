"""The fenced blocks of a page: what is shown has to run.

Commands are the `kconvert ...` lines of ```console and ```bash blocks.  They, and after them the ```python blocks,
run in the order of the text, in one new folder that holds `my-model` and, where a page begins after the conversion,
`my-model-kconvert`; each Python block stands alone.  A block with `<!-- test: skip -->` on the line before it is not
run.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kconvert.cli import main as run_kconvert

__all__ = ["ROOT", "Block", "find_blocks", "run_blocks"]

ROOT = Path(__file__).resolve().parents[2]
SKIP = "<!-- test: skip -->"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the line number of its fence, its language, its text, whether it is run."""

    line: int
    language: str
    text: str
    runs: bool


def find_blocks(text: str) -> Iterator[Block]:
    """All fenced blocks, in order."""
    lines = text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            runs = start == 0 or lines[start - 1].strip() != SKIP
            language = lines[start].removeprefix("```").strip()
            yield Block(start + 1, language, "\n".join(lines[start + 1 : number]), runs)
            start = None
    assert start is None, f"page:{(start or 0) + 1}: a fence that is never closed"


def find_commands(block: Block) -> list[list[str]]:
    """The arguments of each `kconvert` command in a block.  Where a block has `$ ` prompts, the rest is output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("kconvert ")]
    for command in commands:
        shell = {"|", ">", ">>", "<", "&&", "||", ";", "&"} & set(command)
        assert not shell, f"page:{block.line}: {shell} needs a shell; mark the block with {SKIP}"
    return [command[1:] for command in commands]


def run_blocks(page: Path, folder: Path) -> set[str]:
    """Run a page's commands in `folder`, then each Python block; gives the languages of what was run.

    Commands run in this process, and all Python in one of its own, each block with names of its own: what a block
    registers must not stay.
    """
    blocks = [block for block in find_blocks(page.read_text(encoding="utf-8")) if block.runs]
    for block in blocks:
        for command in find_commands(block) if block.language in ("console", "bash") else ():
            errors, output = io.StringIO(), io.StringIO()
            with contextlib.chdir(folder), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
                code = run_kconvert(command)
            shown = shlex.join(["kconvert", *command])
            assert code == 0, f"{page.name}:{block.line}: exit {code}\n{shown}\n{output.getvalue()}{errors.getvalue()}"
    python = [(f"{page.name}:{block.line}", block.text) for block in blocks if block.language == "python"]
    if python:
        _run_python(python, folder)
    return {block.language for block in blocks} & {"python", "console", "bash"}


def _run_python(blocks: list[tuple[str, str]], folder: Path) -> None:
    program = "\n".join(f"exec(compile({text!r}, {where!r}, 'exec'), {{}})" for where, text in blocks)
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
