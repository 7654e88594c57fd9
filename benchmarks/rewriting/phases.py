"""The phases of the rewrite benchmark, and the journal that keeps what they measured.

A rehearsal on a small checkpoint runs everything once: it finds what is missing before the long part begins, and warms
the imports.  Then the rounds, and last the memory of a few measures for checkpoints of several sizes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rewriting.checkpoint import GB, Shape, make_checkpoint
from benchmarks.rewriting.measures import MEASURES, RECIPE, Place, kconvert_arguments, run_measure
from benchmarks.rewriting.running import FailedRun, clear, run_all, settled

__all__ = [
    "MEMORY_MEASURES",
    "NEEDED",
    "Journal",
    "convert",
    "make_place",
    "measure_interpreters",
    "measure_memory",
    "measure_rounds",
    "note",
    "rehearse",
]

NEEDED = ("cp", "apply")
_MAY_BE_MISSING = ("apply-digests", "verify-bytes", "revert")
MEMORY_MEASURES = ("script", "apply-digests", "apply", "verify-bytes", "revert")
"""In this order: `apply` leaves what the next two read."""
_USAGE_ERROR = 2
_SPARE_BYTES = GB
_MODULES = """\
import json, sys
from pathlib import Path
from kconvert.cli import main
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(json.dumps(sorted(sys.modules)))
sys.exit(code)
"""
_IMPORTS = """\
import contextlib, importlib, json, sys
from pathlib import Path
for name in json.loads(Path(sys.argv[1]).read_text()):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
"""


def note(text: str) -> None:
    """Say on stderr what has just been done."""
    print(text, file=sys.stderr, flush=True)


class Journal:
    """The measurements of a run, one a line, so that an interrupted one can go on."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self.records: list[dict[str, Any]] = []
        lines = path.read_text(encoding="utf-8").splitlines() if resume and path.is_file() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        if found and found[0] == identity:
            self.records = found[1:]
        elif found:
            raise SystemExit("rewrite.py: other versions or options than in the interrupted run: leave out --resume")
        path.write_text("".join(json.dumps(each) + "\n" for each in (identity, *self.records)), encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        """Keep one measurement."""
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, phase: str) -> list[dict[str, Any]]:
        """The measurements of a phase, without its name."""
        return [
            {key: value for key, value in record.items() if key != "phase"}
            for record in self.records
            if record["phase"] == phase
        ]

    def has(self, **wanted: object) -> bool:
        """Whether there is a measurement with these values."""
        return any(all(record.get(key) == value for key, value in wanted.items()) for record in self.records)


def make_place(work: Path, shape: Shape, peer_python: str) -> Place:
    """The places in `work` for a checkpoint of `shape`, which is made where it is not there yet."""
    recipe = work / "gate-up.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    return Place(make_checkpoint(work, shape), work / "converted", work / "output", recipe, shape, peer_python)


def _sources(name: str, place: Place) -> list[Path]:
    """The folders that a measure reads."""
    if not MEASURES[name].from_converted:
        return [place.source]
    return [place.converted] if MEASURES[name].writes else [place.source, place.converted]


def convert(place: Place) -> None:
    """What the measures that begin after the conversion read."""
    clear(place.converted, place.output)
    run_measure("apply", place)
    place.output.rename(place.converted)


def rehearse(names: Sequence[str], place: Place, peers: Mapping[str, str]) -> dict[str, str]:
    """Run everything once on a small checkpoint, which also warms the imports; gives why a measure cannot be taken.

    Raises:
        FailedRun: `cp` or `apply` does not run.
    """
    reasons: dict[str, str] = {}
    for name in names:
        distribution = MEASURES[name].distribution
        if distribution is not None and distribution not in peers:
            reasons[name] = "not installed"
            continue
        note(f"rehearsal: {name}")
        try:
            with settled([], place.output):
                run_measure(name, place)
        except FailedRun as error:
            if name in NEEDED:
                raise
            missing = name in _MAY_BE_MISSING and error.code == _USAGE_ERROR
            reasons[name] = "not in this version of kconvert" if missing else f"fails: {error}"
    return reasons


def measure_interpreters(names: Sequence[str], place: Place, journal: Journal) -> None:
    """Peak memory of an interpreter that imports what each measure has loaded at its end, and does nothing else."""
    modules = place.output.with_name("modules.json")
    for name in names:
        if journal.has(phase="interpreter", name=name):
            continue
        if name == "script":
            command = [sys.executable, "-c", "import torch, safetensors.torch"]
        else:
            arguments = kconvert_arguments(name, place)
            with settled([], place.output):
                run_all([[sys.executable, "-c", _MODULES, str(modules), *arguments]])
            command = [sys.executable, "-c", _IMPORTS, str(modules)]
        journal.add({"phase": "interpreter", "name": name, "peak_bytes": run_all([command]).peak_bytes})
    modules.unlink(missing_ok=True)


def measure_rounds(
    names: Sequence[str], place: Place, journal: Journal, *, pairs: int, side_pairs: int
) -> dict[str, str]:
    """The rounds: every measure once, one after the other; every second round backwards.

    Returns:
        What has failed, and why; it is left out from there on.

    Raises:
        FailedRun: `cp` or `apply` has failed.
    """
    failed: dict[str, str] = {}
    if any(MEASURES[name].from_converted for name in names):
        convert(place)
    for number in range(1, pairs + 1):
        in_round = [name for name in names if MEASURES[name].main or number <= side_pairs]
        for name in in_round if number % 2 else reversed(in_round):
            if name in failed or journal.has(phase="rounds", round=number, name=name):
                continue
            try:
                with settled(_sources(name, place), place.output):
                    finished, own = run_measure(name, place)
            except FailedRun as error:
                if name in NEEDED:
                    raise
                failed[name] = f"failed in round {number}: {error}"
                continue
            record = {"name": name, "seconds": finished.seconds, "peak_bytes": finished.peak_bytes, **own}
            journal.add({"phase": "rounds", "round": number, **record})
            note(f"round {number} of {pairs}: {name} {finished.seconds:.2f} s")
    clear(place.converted)
    return failed


def measure_memory(names: Sequence[str], work: Path, shape: Shape, journal: Journal, *, keep: bool) -> str | None:
    """Peak memory of each measure for a checkpoint of `shape`, made for this; gives why it cannot be done, or None.

    At most two copies are on the disk at once: the source, if it is not kept, goes before the last measure, `revert`.
    """
    if all(journal.has(phase="memory", name=name, size_bytes=shape.size_bytes) for name in names):
        return None
    needed, free = 2 * shape.size_bytes + _SPARE_BYTES // shape.scale**2, shutil.disk_usage(work).free
    if free < needed:
        return f"needs {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free"
    place = make_place(work, shape, sys.executable)
    interpreters = {each["name"]: each["peak_bytes"] for each in journal.of("interpreter")}
    try:
        for name in names:
            if name == "revert" and not keep:
                clear(place.source)
            clear(place.output)
            finished, _ = run_measure(name, place)
            if name == "apply":
                clear(place.converted)
                place.output.rename(place.converted)
            record = {"name": name, "size_bytes": shape.size_bytes, "peak_bytes": finished.peak_bytes}
            if not journal.has(phase="memory", **{key: record[key] for key in ("name", "size_bytes")}):
                journal.add({"phase": "memory", **record, "interpreter_bytes": interpreters[name]})
            note(f"memory, {shape.size_bytes / 1e9:.3g} GB: {name} {(finished.peak_bytes or 0) / 1e6:.0f} MB")
    finally:
        clear(place.output, place.converted, *([] if keep else [place.source]))
    return None
