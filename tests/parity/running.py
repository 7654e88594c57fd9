"""`kconvert verify` as a person runs it: exit code, stdout and the one error line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconvert.cli import main

__all__ = ["Capture", "error_line", "failing", "run"]

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    code = main(["verify", *(str(item) for item in argv)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def error_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("kconvert: error: ")]
    assert len(lines) == 1, err
    return lines[0].removeprefix("kconvert: error: ")


def failing(capsys: Capture, *argv: str | Path, code: int = 5) -> str:
    found, out, err = run(capsys, *argv)
    assert found == code, out + err
    return error_line(err)
