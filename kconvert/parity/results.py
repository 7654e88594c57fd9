"""What a comparison found, as plain data, and which of it is a failure.

A result is never more than it proves: what was not reached or not run is no pass, and neither is a comparison in
which every value is zero or NaN.  Such a one fails where the stock weights come from the converted file too,
because a file of zeros would look the same; where they come from the source, it is the source that is so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = [
    "Failure",
    "LogitsLevel",
    "LogitsResult",
    "ModuleResult",
    "ModulesLevel",
    "Result",
    "Verdict",
    "worst",
]


class Verdict(StrEnum):
    """The outcome of one comparison."""

    EQUAL = "equal"
    WITHIN = "within"
    FAILED = "failed"
    NO_PROOF = "no proof"
    NOT_REACHED = "not reached"
    NOT_RUN = "not run"

    @property
    def is_pass(self) -> bool:
        """Whether it shows that the two sides agree."""
        return self in (Verdict.EQUAL, Verdict.WITHIN)


@dataclass(frozen=True)
class Result:
    """One comparison with the stock output, in one dtype and with one choice of kernels.

    Attributes:
        dtype: of the run: the checkpoint's own, or what weights and inputs were cast to.
        kernels: `reference` or `auto`.
        kernel: the kernel that ran: its ID, or `reference`.
        verdict: see `Verdict`.
        difference: the largest absolute difference, divided by the largest absolute value of the stock output;
            None where the two cannot be subtracted, and `reason` says why.
        limit: the difference that is let pass; 0 asks for equal bits.
        reason: what is wrong, or why nothing was compared.
    """

    dtype: str
    kernels: str
    kernel: str
    verdict: Verdict
    difference: float | None
    limit: float
    reason: str | None = None

    @property
    def badness(self) -> tuple[int, float, float]:
        """Orders results from good to bad: failures last, then missing proof, then by the share of the limit used."""
        size = math.inf if self.difference is None else self.difference
        share = size / self.limit if self.limit else (math.inf if size else 0.0)
        rank = {Verdict.FAILED: 2, Verdict.NO_PROOF: 1}.get(self.verdict, 0)
        return (rank, share, size)

    @property
    def text(self) -> str:
        """What was found, for an error line."""
        if self.reason is not None:
            return self.reason
        return f"differs by {self.difference:.2g} of the largest value, allowed is {self.limit:.2g}"


@dataclass(frozen=True)
class LogitsResult(Result):
    """Whole-model logits.

    Attributes:
        max_abs: the largest absolute difference of two logits.
        mean_abs: the mean absolute difference.
        largest: the largest absolute logit of the stock model.
        kl: Kullback-Leibler divergence of the converted model from the stock one, mean over positions, in nats.
        top1: the share of positions where both find the same token most likely.
        positions: how many were compared; masked ones are left out.
    """

    max_abs: float | None = None
    mean_abs: float | None = None
    largest: float | None = None
    kl: float | None = None
    top1: float | None = None
    positions: int = 0


@dataclass(frozen=True)
class ModuleResult:
    """A patched module: the paths it stands for in pair order, and its comparisons; none where it was not reached."""

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    layout: str
    results: tuple[Result, ...]

    @property
    def path(self) -> str:
        """Where it sits in the converted model."""
        return self.paths[0]

    @property
    def unshown_dtypes(self) -> tuple[str, ...]:
        """The dtypes in which every value of a comparison is zero or NaN."""
        return tuple(dict.fromkeys(item.dtype for item in self.results if item.verdict is Verdict.NO_PROOF))


@dataclass(frozen=True)
class Failure:
    """Something that does not hold: where, what was found, whether only a kernel is to blame for it, and the way out."""

    where: str
    what: str
    is_kernel: bool = False
    fix: str | None = None


@dataclass(frozen=True)
class ModulesLevel:
    """Every patched module beside its stock ones.

    `own_dtype` is the checkpoint's.  `stopped` says why the stock model did not run, if it did not.
    """

    modules: tuple[ModuleResult, ...]
    own_dtype: str
    from_source: bool
    stopped: str | None
    settings: dict[str, Any]

    @property
    def num_proven(self) -> int:
        """Modules whose comparisons are passes in the checkpoint's own dtype, and no failure in another."""
        return sum(self._is_proven(module) for module in self.modules)

    def _is_proven(self, module: ModuleResult) -> bool:
        own = [result.verdict for result in module.results if result.dtype == self.own_dtype]
        failed = any(result.verdict is Verdict.FAILED for result in module.results)
        return bool(own) and all(verdict.is_pass for verdict in own) and not failed

    @property
    def unshown(self) -> tuple[ModuleResult, ...]:
        """Modules with a comparison, in any dtype, in which every value is zero or NaN."""
        return tuple(module for module in self.modules if module.unshown_dtypes)

    @property
    def unproved(self) -> str | None:
        """What was not shown, or None: a module that was not reached, did not run, or gave nothing but zero and NaN."""
        missing = [module for module in self.modules if not self._is_proven(module) or module.unshown_dtypes]
        if not missing:
            return None
        return f"{len(missing)} of {len(self.modules)} patched modules could not be shown, e.g. {missing[0].path}"

    @property
    def num_reached(self) -> int:
        """Modules that the forward reached."""
        return sum(bool(module.results) for module in self.modules)

    def failures(self) -> tuple[Failure, ...]:
        """What does not hold, one for each module, the worst first."""
        found = []
        for module in self.modules:
            wrong = [result for result in module.results if self._is_failure(result)]
            if wrong:
                bad = worst(wrong)
                found.append((bad.badness, _failure(module.path, bad)))
        if not found and self.num_proven == 0:
            reason = self.stopped or (
                "no value but zero and NaN was compared" if self.num_reached else "none is reached"
            )
            return (Failure("modules", f"nothing was proven of the {len(self.modules)} patched modules: {reason}"),)
        found.sort(key=lambda item: item[0], reverse=True)
        return tuple(failure for _, failure in found)

    def _is_failure(self, result: Result) -> bool:
        if result.verdict is Verdict.NO_PROOF:
            return result.dtype == self.own_dtype and not self.from_source
        return result.verdict is Verdict.FAILED

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            **self.settings,
            "own_dtype": self.own_dtype,
            "stopped": self.stopped,
            "num_modules": len(self.modules),
            "num_reached": self.num_reached,
            "num_proven": self.num_proven,
            "modules": [
                {
                    "path": module.path,
                    "members": list(module.paths),
                    "classes": list(module.classes),
                    "layout": module.layout,
                    "verdict": _whole_verdict(module).value,
                    "results": [asdict(result) for result in module.results],
                }
                for module in self.modules
            ],
        }


@dataclass(frozen=True)
class LogitsLevel:
    """The whole model.  `stopped` says why it gave no logits, if it gave none."""

    results: tuple[LogitsResult, ...]
    stopped: str | None
    settings: dict[str, Any]

    @property
    def unproved(self) -> str | None:
        """What was not shown, or None: a run that was left out."""
        missing = next((each for each in self.results if each.verdict is Verdict.NOT_RUN), None)
        return None if missing is None else f"{missing.dtype}, {missing.kernels} was not run: {missing.reason}"

    def failures(self) -> tuple[Failure, ...]:
        """What does not hold, the worst first."""
        if self.stopped is not None:
            return (Failure("logits", f"nothing was compared: {self.stopped}"),)
        wrong = [each for each in self.results if each.verdict in (Verdict.FAILED, Verdict.NO_PROOF)]
        wrong.sort(key=lambda each: each.badness, reverse=True)
        return tuple(_failure("logits", result) for result in wrong)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**self.settings, "stopped": self.stopped, "results": [asdict(result) for result in self.results]}


def worst(results: Iterable[Result]) -> Result:
    """The result with the most badness; of equal ones the first."""
    return max(results, key=lambda result: result.badness)


def _failure(where: str, result: Result) -> Failure:
    is_kernel = result.kernels == "auto" and result.verdict is Verdict.FAILED
    return Failure(where, f"{result.kernel if is_kernel else 'reference'}, in {result.dtype}: {result.text}", is_kernel)


def _whole_verdict(module: ModuleResult) -> Verdict:
    """The verdict that describes a module best: a failure, then missing proof, then a pass."""
    verdicts = {result.verdict for result in module.results}
    order = (Verdict.FAILED, Verdict.NO_PROOF, Verdict.WITHIN, Verdict.EQUAL, Verdict.NOT_RUN)
    return next((verdict for verdict in order if verdict in verdicts), Verdict.NOT_REACHED)
