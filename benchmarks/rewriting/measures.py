"""What the rewrite benchmark runs: each measure is one or more commands that run side by side.

A measure reads a source or a converted directory, and writes `output` or nothing.  kconvert's own measures are its
command line as a user types it.  `main` measures are those that a goal asks for, and run in every round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rewriting.checkpoint import Shape, weight_bytes
from benchmarks.rewriting.running import FailedRun, Finished, run_all, sync_files

__all__ = ["MEASURES", "PEERS", "RECIPE", "Measure", "Place", "kconvert_arguments", "run_measure"]

RECIPE = """\
recipe: 1
name: gate-up
model_type: [qwen3]
patches:
  - kernel: cpu_fused_swiglu
    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
_KCONVERT = [sys.executable, "-m", "kconvert"]
_OTHERS = Path(__file__).with_name("others.py")


@dataclass(frozen=True)
class Place:
    """Where the files of a run are, and with which interpreter the peers run."""

    source: Path
    converted: Path
    output: Path
    recipe: Path
    shape: Shape
    peer_python: str


Commands = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measure:
    """`title` is for people; `distribution` is what has to be installed beside `peer_python`, for a peer."""

    title: str
    commands: Callable[[Place], Commands]
    main: bool = False
    distribution: str | None = None
    from_converted: bool = False
    writes: bool = True
    synced: bool = False
    prepare: Callable[[Place], None] | None = None


def _kconvert(*arguments: str) -> Commands:
    return [[*_KCONVERT, *arguments]]


def kconvert_arguments(name: str, place: Place) -> Sequence[str]:
    """The arguments of a measure that is a kconvert command."""
    return MEASURES[name].commands(place)[0][len(_KCONVERT) :]


def _apply(place: Place, *options: str) -> Commands:
    return _kconvert("apply", str(place.recipe), str(place.source), "-o", str(place.output), "-q", "--json", *options)


def _copy(place: Place) -> Commands:
    return [["cp", "-r", str(place.source), str(place.output)]]


def _two_copies(place: Place) -> Commands:
    shards = sorted(str(path) for path in place.source.glob("*.safetensors"))
    return [["cp", *files, str(place.output)] for files in (shards[0::2], shards[1::2]) if files]


def _other(name: str, python: str, place: Place) -> Commands:
    return [[python, str(_OTHERS), name, str(place.source), str(place.output), str(place.shape.shard_bytes)]]


def _peer(name: str, title: str, *, main: bool = False) -> Measure:
    return Measure(title, lambda place: _other(name, place.peer_python, place), main=main, distribution=name)


PEERS: Mapping[str, Measure] = {
    "compressed-tensors": _peer("compressed-tensors", "compressed-tensors' converter", main=True),
    "fastsafetensors": _peer("fastsafetensors", "load, cat, fastsafetensors' saver"),
    "transformers": _peer("transformers", "transformers load, save; no packing"),
    "mergekit": _peer("mergekit", "mergekit passthrough; no packing"),
}

MEASURES: Mapping[str, Measure] = {
    "cp": Measure("cp -r", _copy, main=True),
    "apply": Measure("apply --no-model-check", lambda place: _apply(place, "--no-model-check"), main=True),
    "cp-fsync": Measure("cp -r, then fsync of each file", _copy, main=True, synced=True),
    "two-cp": Measure("two cp at a time", _two_copies, main=True, prepare=lambda place: place.output.mkdir()),
    "script": Measure("load, cat, save", lambda place: _other("script", sys.executable, place), main=True),
    "apply-checked": Measure("apply", _apply, main=True),
    "apply-digests": Measure(
        "apply --no-model-check --digests", lambda place: _apply(place, "--no-model-check", "--digests")
    ),
    "revert": Measure(
        "revert",
        lambda place: _kconvert("revert", str(place.converted), "-o", str(place.output)),
        from_converted=True,
    ),
    "verify-bytes": Measure(
        "verify --level bytes",
        lambda place: _kconvert("verify", str(place.converted), "--source", str(place.source), "--level", "bytes"),
        from_converted=True,
        writes=False,
    ),
    **PEERS,
}


def run_measure(name: str, place: Place) -> tuple[Finished, dict[str, float]]:
    """Run a measure once; gives how it went, and the seconds that `apply` itself reports.

    Raises:
        FailedRun: a process failed, or the weights that it wrote are not of the size of the checkpoint's.
    """
    measure = MEASURES[name]
    if measure.prepare is not None:
        measure.prepare(place)
    finished = run_all(measure.commands(place), after=_sync(place.output) if measure.synced else None)
    if measure.writes:
        found, wanted = weight_bytes(place.output), place.shape.size_bytes
        if found != wanted:
            raise FailedRun(0, f"wrote {found} bytes of weights, not {wanted}")
    return finished, _own_seconds(finished.output) if name.startswith("apply") else {}


def _sync(folder: Path) -> Callable[[], None]:
    return lambda: sync_files(folder)


def _own_seconds(text: str) -> dict[str, float]:
    values: dict[str, Any] = json.loads(text)
    return {name: float(values[name]) for name in ("copy_seconds", "sync_seconds", "check_seconds")}
