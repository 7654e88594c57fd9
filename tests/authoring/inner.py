"""A pytest run inside a test: the tests that a written package brings."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["run_tests"]


class _Outcomes:
    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "failed":
            self.outcomes.append(report.outcome)


def run_tests(*folders: Path, config: Path) -> list[str]:
    """How each test below `folders` ended; `config` is a file that is written, so that no options of ours count."""
    config.write_text("[pytest]\n", encoding="utf-8")
    seen = _Outcomes()
    options = ["-q", "-s", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", str(config)]
    pytest.main([*options, *map(str, folders)], plugins=[seen])
    return seen.outcomes
