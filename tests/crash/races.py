"""Two runs into one output that start at the same moment, in two processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.crash.bench import Bench, Variant, check_nothing_over, require, snapshot, told
from tests.crash.server import Outcome, Server
from tests.crash.sweeps import Met, Trial

__all__ = ["races"]


def races(bench: Bench, first: Server, second: Server, variant: Variant, number: int) -> Iterator[Trial]:
    """One of the two writes the output; the other does too, later, where that is allowed, or is refused in one line."""
    for count in range(number):
        yield _race_trial(bench, first, second, variant, count)


def _race_trial(bench: Bench, first: Server, second: Server, variant: Variant, count: int) -> Trial:
    def trial() -> Met:
        what = f"{variant.name}, race {count}"
        place = bench.place(variant)
        run = bench.command(place)
        for server in (first, second):
            server.start(run)
        ends = [server.finish() for server in (first, second)]
        for outcome in ends:
            require(outcome.ended == "well" or _is_refused(outcome), what, told(outcome))
            check_nothing_over(outcome, what)
        num_well = sum(outcome.ended == "well" for outcome in ends)
        require(num_well > 0, what, f"none went well: {[told(outcome) for outcome in ends]}")
        require(os.path.lexists(place.output), what, "no output")
        require(snapshot(place.output) == bench.undisturbed(variant)[1], what, "another output")
        require(place.names() == {place.output.name}, what, f"left: {sorted(place.names())}")
        bench.remove(place)
        return Met(what, 2, f"{num_well} well", 0)

    return trial


def _is_refused(outcome: Outcome) -> bool:
    said = ("another live run is writing this output", "output exists")
    return outcome.code == 7 and any(text in outcome.text for text in said)
