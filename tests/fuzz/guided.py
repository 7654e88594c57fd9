"""The targets under libFuzzer, which mutates the inputs that reached new code; needs `pip install atheris`.

    python -m tests.fuzz.guided header -atheris_runs=1000000 -seed=1

The first word is a target of `run`, what follows are options of libFuzzer.  A fault ends the process with a traceback,
and `python -m tests.fuzz.run --target header --input FILE` reads the file that it leaves.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

with atheris.instrument_imports(include=["kconvert"]):
    from tests.fuzz.run import TARGETS


def main() -> None:
    """Run until the options say so; libFuzzer ends the process."""
    target = TARGETS[sys.argv[1]]()
    outcomes: Counter[str] = Counter()

    def one_input(data: bytes) -> None:
        outcomes[target.check(data)] += 1
        if outcomes.total() % 50_000 == 0:
            sys.stdout.write(f"{dict(outcomes)}\n")
            sys.stdout.flush()

    def mutator(data: bytes, max_size: int, number: int) -> bytes:
        rng = Random(number)
        way = rng.random()
        if way < 0.05:
            made = target.make(rng)
        elif way < 0.15:
            made = atheris.Mutate(data, max_size)
        else:
            made = target.mutate(bytes(data), rng)
        return made if len(made) <= max_size else bytes(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number in range(200):
            (Path(corpus) / str(number)).write_bytes(target.make(Random(number)))
        limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=4096", f"-artifact_prefix={tempfile.gettempdir()}/"]
        atheris.Setup([sys.argv[0], *limits, *sys.argv[2:], corpus], one_input, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
