"""Many inputs for the readers of what comes from elsewhere, by hand and for as long as one likes.

    python -m tests.fuzz.run --inputs 1000000 --seed 1                    # headers
    python -m tests.fuzz.run --target index --inputs 100000 --seed 1
    python -m tests.fuzz.run --target manifest --seconds 60               # whatever gets done in a minute

Targets are `header`, `index`, `manifest`, `recipe` and `revert`.  One seed gives the same inputs everywhere.  Prints how many
inputs were accepted and refused, the slowest one, and the memory; the first fault ends the run with exit code 1, and
its input is written to the file that the last line names.  `--input FILE` reads such a file again.  `guided.py` beside
this chooses inputs by the code that they reach.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kconvert.convert.memory import peak_rss_bytes
from tests.fuzz.headers import HeaderTarget
from tests.fuzz.indexes import IndexTarget
from tests.fuzz.manifests import ManifestTarget
from tests.fuzz.recipes import RecipeTarget
from tests.fuzz.reverts import RevertTarget
from tests.fuzz.target import Target, make_input

__all__ = ["TARGETS", "Figures", "run"]

TARGETS: dict[str, Callable[[], Target]] = {
    "header": HeaderTarget,
    "index": IndexTarget,
    "manifest": ManifestTarget,
    "recipe": RecipeTarget,
    "revert": RevertTarget,
}
_MEMORY_BYTES = 4 << 30


@dataclass
class Figures:
    """What a run has seen; times in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    slowest_input: bytes = b""
    failed: tuple[bytes, BaseException] | None = None

    @property
    def num_inputs(self) -> int:
        """Inputs that were read without a fault."""
        return self.outcomes.total()


def run(target: Target, inputs: int, *, seed: int, seconds: float = float("inf")) -> Figures:
    """Read `inputs` inputs, or as many as there is time for; ends at the first fault."""
    figures = Figures()
    end = time.monotonic() + seconds
    for number in range(inputs):
        if time.monotonic() > end:
            break
        data = make_input(target, Random(f"{target.name} {seed} {number}"))
        begin = time.perf_counter()
        try:
            figures.outcomes[target.check(data)] += 1
        except (Exception, RecursionError, MemoryError) as error:  # noqa: BLE001 - any error is what is looked for
            figures.failed = data, error
            break
        took = time.perf_counter() - begin
        if took > figures.slowest:
            figures.slowest, figures.slowest_input = took, data
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), default="header")
    parser.add_argument("--inputs", type=int, default=10**9, metavar="N", help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--input", type=Path, metavar="FILE", help="read this file only")
    given = parser.parse_args(arguments)
    if given.inputs == 10**9 and given.seconds == float("inf") and given.input is None:
        parser.error("give --inputs or --seconds")
    target = TARGETS[given.target]()
    if given.input is not None:
        sys.stdout.write(f"{target.check(given.input.read_bytes())}\n")
        return 0
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    began = time.monotonic()
    figures = run(target, given.inputs, seed=given.seed, seconds=given.seconds)
    return _report(given.target, figures, time.monotonic() - began)


def _report(name: str, figures: Figures, seconds: float) -> int:
    peak = peak_rss_bytes() >> 20
    lines = [
        f"{name}: {figures.num_inputs} inputs in {seconds:.0f} s, {peak} MB at most",
        *(f"  {outcome}: {count}" for outcome, count in sorted(figures.outcomes.items())),
        f"  slowest: {figures.slowest * 1000:.1f} ms for {len(figures.slowest_input)} bytes",
        f"  faults: {0 if figures.failed is None else 1}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if figures.failed is None:
        return 0
    data, error = figures.failed
    traceback.print_exception(error)
    with tempfile.NamedTemporaryFile(prefix=f"fuzz-{name}-", delete=False) as file:
        file.write(data)
    sys.stdout.write(f"input: {file.name}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
