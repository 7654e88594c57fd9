"""What `check_kernel` found: one line per check, with what is wrong and the way out.

A kernel is refused for failed checks alone, not for warnings or for what was not run.  Of one check on several modules
the worst result counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Check", "CheckReport", "Outcome", "worst_first"]


class Outcome(StrEnum):
    """How a check ended.  Only `failed` makes a kernel unusable; `warning` is of no harm here but elsewhere."""

    OK = "ok"
    FAILED = "failed"
    WARNING = "warning"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was looked at.
        outcome: how it ended.
        text: what was found, or what is wrong.
        fix: the way out, as an imperative; None where there is nothing to do.
    """

    name: str
    outcome: Outcome
    text: str
    fix: str | None = None

    def line(self) -> str:
        """`text; fix`."""
        return self.text if self.fix is None else f"{self.text}; {self.fix}"


@dataclass(frozen=True)
class CheckReport:
    """All checks of one kernel, in the order in which they ran.

    Attributes:
        kernel: `folder:ClassName`, the folder absolute.
        digest: of the package's files; None where they could not be read.
        device: where the forwards ran.
        modules: the module paths that stand for all that have their structure, in pair order.
        checks: the checks.
    """

    kernel: str
    digest: str | None
    device: str
    modules: tuple[tuple[str, ...], ...]
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome is Outcome.FAILED)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "kernel": self.kernel,
            "digest": self.digest,
            "device": self.device,
            "modules": [list(paths) for paths in self.modules],
            "checks": [
                {"check": check.name, "result": check.outcome.value, "found": check.text, "fix": check.fix}
                for check in self.checks
            ],
        }

    def to_text(self) -> str:
        """A line for each check, for the message of an assertion."""
        return "\n".join(f"{check.name}: {check.outcome.value}: {check.line()}" for check in self.checks)


def worst_first(checks: Sequence[Check]) -> Check:
    """Of the same check on several modules the one that says most: a failure, else a warning, else the first."""
    order = (Outcome.FAILED, Outcome.WARNING, Outcome.OK, Outcome.NOT_RUN)
    return min(checks, key=lambda check: order.index(check.outcome))
