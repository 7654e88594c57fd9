"""SIGKILL from outside, at random moments of a conversion that takes a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from tests.crash.bench import Bench, Variant, require, told
from tests.crash.sweeps import Met, Trial, go_on, require_clean

__all__ = ["moments", "moving_seconds"]


def moving_seconds(bench: Bench, variant: Variant) -> float:
    """How long an undisturbed run copies: the shortest of three."""
    found = []
    for _ in range(3):
        place = bench.place(variant)
        outcome = bench.run(place, counts_only=True)
        require(outcome.ended == "well", variant.name, told(outcome))
        bench.remove(place)
        found.append(outcome.moving_seconds)
    return min(found)


def moments(bench: Bench, variants: Sequence[Variant], number: int, *, seed: int) -> Iterator[Trial]:
    """Kills at `number` moments between the first byte that is copied and a little after the last, of the variants in turn.

    Every fourth run is killed a second time while it goes on.  A run that ends before its moment is done again, with half
    of the time.
    """
    rng = Random(seed)
    names = dict.fromkeys(variant.name for variant in variants)
    seconds = {name: moving_seconds(bench, next(each for each in variants if each.name == name)) for name in names}
    for count in range(number):
        variant = variants[count % len(variants)]
        delays = [rng.uniform(0, 1.05 * seconds[variant.name]) for _ in range(2 if count % 4 == 3 else 1)]
        yield _moment_trial(bench, variant, delays)


def _moment_trial(bench: Bench, variant: Variant, delays: Sequence[float]) -> Trial:
    def trial() -> Met:
        what = f"{variant.name}, killed after {', '.join(f'{delay:.3f} s' for delay in delays)} of copying"
        size = sum(call.result for call in bench.undisturbed(variant)[0].calls if call.moves_weights)
        place, killed, moving = bench.place(variant), 0, 0
        for number, delay in enumerate(delays):
            outcome = bench.run(place, kill_after=delay, counts_only=True)
            if outcome.ended != "killed" and not number:
                require(outcome.ended == "well", what, told(outcome))
                bench.remove(place)
                return _moment_trial(bench, variant, [delay / 2, *delays[1:]])()
            if outcome.ended != "killed":  # what was left took less time, or nothing was left
                require_clean(outcome, what)
                break
            killed += 1
            moving += outcome.in_flight > 0 or 0 < outcome.moved_bytes < size
            bench.check_stopped(place, what)
        resumed = go_on(bench, place, what)
        bench.remove(place)
        return Met(what, killed, "killed while bytes moved" if moving else "killed", resumed)

    return trial
