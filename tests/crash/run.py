"""The whole crash test, by hand: everything of which `make check` tries a sample.  Some hours on two cores.

    python -m tests.crash.run                                         # all sweeps, all variants
    python -m tests.crash.run --sweeps kills interrupts --variants fresh overwrite
    python -m tests.crash.run --every 10                              # each tenth trial of the sweeps
    python -m tests.crash.run --sweeps moments --moments 200 --seed 3 --megabytes 500 --folder /mnt/disk

Sweeps are `escapes` (strace sees no call that the layer does not), `order` (what is synced before what), `kills` (before,
in the middle of and after every I/O call), `afresh` (the same, going on with `--no-resume`), `repeated` (killed up to four times), `power` (what was
not synced is lost), `errors` (every call with every errno, short and empty ones), `interrupts` (Ctrl-C at every call),
`races` (two runs into one output at the same moment) and `moments` (a larger checkpoint, killed from outside at random
moments).  Prints a table, and with --json writes the figures; what does not hold is printed at once, and the exit code is 1
then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.crash.bench import VARIANTS, Bench, Broken, Variant, write_larger, write_small
from tests.crash.moments import moments
from tests.crash.races import races
from tests.crash.server import Server
from tests.crash.sweeps import Trial, errors, interrupts, kills, order_faults, power_cuts, repeated_kills
from tests.crash.traced import check_nothing_escapes

__all__ = ["Figures", "main"]


def _source_too(variant: Variant) -> bool:
    """Calls that only look at the source are the same in all variants."""
    return variant.name == "fresh"


Sweep = Callable[[Bench, Variant, argparse.Namespace], Iterator[Trial]]

_SWEEPS: Mapping[str, Sweep] = {
    "kills": lambda bench, variant, options: kills(bench, variant, source_too=_source_too(variant)),
    "afresh": lambda bench, variant, options: kills(bench, variant, source_too=False, afresh=True),
    "repeated": lambda bench, variant, options: repeated_kills(bench, variant, options.repeated, seed=options.seed),
    "power": lambda bench, variant, options: power_cuts(bench, variant),
    "errors": lambda bench, variant, options: errors(bench, variant, source_too=_source_too(variant)),
    "interrupts": lambda bench, variant, options: interrupts(bench, variant, source_too=_source_too(variant)),
}
_LARGER = (
    VARIANTS["fresh"],
    VARIANTS["digests"],
    VARIANTS["overwrite"],
    VARIANTS["fresh"],
    VARIANTS["kernel"],
    VARIANTS["overwrite-by-two-renames"],
    VARIANTS["fresh"],
    VARIANTS["hardlinks-and-digests"],
)
"""The variants of the larger checkpoint, in turn."""
_MEGABYTES_PER_LAYER = 44


@dataclass
class Figures:
    """What a sweep of a variant has seen."""

    trials: int = 0
    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self, name: str) -> str:
        """For the table."""
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        return (
            f"{name:42} {self.trials:6} trials {self.faults:6} faults {self.resumed:6} took over finished files "
            f"{self.seconds:7.0f} s {len(self.broken):4} broken; {outcomes}"
        )


def main(arguments: Sequence[str]) -> int:
    """Runs what the arguments ask for; gives the exit code."""
    options = _parsed(arguments)
    found: dict[str, Figures] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder, prefix="crash-")))
        benches = [_small_bench(folder / f"worker-{number}", stack) for number in range(options.processes)]
        variants = [VARIANTS[name] for name in options.variants]
        for variant in variants:
            if "escapes" in options.sweeps:
                _say(f"escapes {variant.name}: none of {check_nothing_escapes(benches[0], variant)}")
            if "order" in options.sweeps:
                faults = order_faults(benches[0].undisturbed(variant)[0].calls)
                _say(f"order {variant.name}: {faults or 'right'}")
                found[f"order {variant.name}"] = Figures(broken=faults)
        for name in (name for name in options.sweeps if name in _SWEEPS):
            for variant in variants:
                parts = [islice(_SWEEPS[name](bench, variant, options), 0, None, options.every) for bench in benches]
                found[f"{name} {variant.name}"] = _run(f"{name} {variant.name}", parts)
        if "races" in options.sweeps:
            servers = [stack.enter_context(Server(benches[0].source)) for _ in range(2)]
            for variant in variants:
                trials = races(benches[0], servers[0], servers[1], variant, options.races)
                found[f"races {variant.name}"] = _run(f"races {variant.name}", [trials])
        if "moments" in options.sweeps:
            found["moments"] = _run("moments", [_moments(folder, stack, options)])
    return _told(found, options)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sweeps = ("escapes", "order", *_SWEEPS, "races", "moments")
    parser.add_argument("--sweeps", nargs="+", choices=sweeps, default=sweeps)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--every", type=int, default=1, help="do each n-th trial of a sweep only")
    parser.add_argument("--repeated", type=int, default=100, help="chains of kills for each variant")
    parser.add_argument("--races", type=int, default=50, help="for each variant")
    parser.add_argument("--moments", type=int, default=200, help="random moments")
    parser.add_argument("--megabytes", type=int, default=400, help="about the size of the larger checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="trials at a time")
    parser.add_argument(
        "--folder", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, help="where to write"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args(arguments)


def _small_bench(folder: Path, stack: ExitStack) -> Bench:
    folder.mkdir()
    source = write_small(folder / "source")
    server = stack.enter_context(Server(source))
    return Bench(folder, source, write_small(folder / "older-source", 1), server)


def _moments(folder: Path, stack: ExitStack, options: argparse.Namespace) -> Iterator[Trial]:
    layers = max(2, options.megabytes // _MEGABYTES_PER_LAYER)
    source = write_larger(folder / "larger-source", layers=layers, seed=options.seed)
    server = stack.enter_context(Server(source))
    (folder / "larger").mkdir()
    bench = Bench(folder / "larger", source, write_small(folder / "larger-older", 1), server)
    size = sum(path.stat().st_size for path in source.iterdir())
    _say(f"moments: {size / 1e6:.0f} MB in {sum(path.suffix == '.safetensors' for path in source.iterdir())} shards")
    return moments(bench, _LARGER, options.moments, seed=options.seed)


def _run(name: str, parts: Sequence[Iterator[Trial]]) -> Figures:
    """Does the trials: each part gives all of them, and does those of its turn."""
    figures, lock, started = Figures(), threading.Lock(), time.monotonic()

    def work(number: int) -> None:
        for trial in islice(parts[number], number, None, len(parts)):
            try:
                met = trial()
            except Broken as error:
                with lock:
                    figures.broken.append(str(error))
                    _say(f"BROKEN {str(error).splitlines()[0]}")  # all of it with --json
                continue
            with lock:
                figures.trials += 1
                figures.faults += met.fired
                figures.outcomes[met.outcome] += 1
                figures.resumed += met.resumed > 0

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception:  # noqa: BLE001 - a fault of the test, and no less a failure
            with lock:
                figures.broken.append(traceback.format_exc())
                _say(figures.broken[-1])

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures.seconds = time.monotonic() - started
    _say(figures.line(name))
    return figures


def _told(found: Mapping[str, Figures], options: argparse.Namespace) -> int:
    total = Figures()
    for figures in found.values():
        total.trials += figures.trials
        total.faults += figures.faults
        total.resumed += figures.resumed
        total.outcomes += figures.outcomes
        total.broken += figures.broken
        total.seconds += figures.seconds
    _say(total.line("everything"))
    if options.json is not None:
        values = {name: vars(figures) for name, figures in found.items()}
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, **values}, indent=1))
    return 1 if total.broken else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
