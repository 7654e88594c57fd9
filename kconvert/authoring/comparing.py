"""What the checks that run something share: a forward that may fail, and a verdict on a difference.

Whatever a kernel raises is a failed check.  Stock modules that do not run, a place that the model does not call, and
results of zeros or NaN alone prove nothing, and make a check that was not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kconvert.authoring.report import Check, Outcome
from kconvert.authoring.subject import CALL_SIZES, Trial
from kconvert.errors import one_line
from kconvert.parity.compare import Difference, judge

__all__ = ["PLAIN", "STOCK", "device_of", "judged", "ran", "unreached"]

PLAIN = next(iter(CALL_SIZES))
STOCK = "the replaced module"


def ran(name: str, run: Callable[[], Any], who: str = "the kernel", fix: str = "mend its forward") -> Any | Check:
    """What `run` gives, or the check that failed: foreign code may raise anything, and that is a finding.

    Where the stock modules do not run there is nothing to compare with.
    """
    try:
        return run()
    except Exception as error:  # noqa: BLE001
        text = f"{who} does not run ({one_line(error)})"
        return Check(name, Outcome.NOT_RUN, text) if who == STOCK else Check(name, Outcome.FAILED, text, fix)


def unreached(name: str, trial: Trial) -> Check:
    """The check of a place that the model does not call."""
    return Check(name, Outcome.NOT_RUN, f"a forward on tokens does not reach {trial.paths[0]}")


def judged(name: str, difference: Difference, limit: float, trial: Trial, fix: str) -> Check:
    """The check that a difference makes: within the limit, beyond it, or no proof."""
    verdict, reason = judge(difference, limit=limit)
    share = "not comparable" if difference.relative is None else f"{difference.relative:.1e} of the largest value"
    text = "the same bits" if difference.is_equal else f"{share}, allowed {limit:.2g}"
    if verdict.is_pass:
        return Check(name, Outcome.OK, text)
    if difference.is_equal:  # nothing but zeros or NaN
        return Check(name, Outcome.NOT_RUN, reason or "proves nothing")
    said = ": ".join(part for part in (text, reason) if part)
    return Check(name, Outcome.FAILED, f"{trial.paths[0]}: {said}", fix)


def device_of(trial: Trial) -> str:
    """Where the modules of a trial are, as torch names it."""
    return str(next(iter(trial.tensors.values())).device)
