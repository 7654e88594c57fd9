"""How fast `apply` writes, beside `cp -r`, a script that loads, concatenates and saves, and other libraries.

    python benchmarks/rewrite.py [--pairs 10] [--size 3] [--work DIR] [--json FILE] [--peer-python PATH]

Makes a random bf16 checkpoint of the form of Qwen3 (once; it stays in the work folder) and writes it again in every way
of benchmarks/rewriting/measures.py: in rounds, one way after the other, every second round backwards.  Each run is a
new process, starts with its source in the page cache and nothing left to write, and its output is removed.  Peak memory
is looked at for checkpoints of several sizes.  Goals stand beside the figures.

The work folder has to be on the disk that is to be measured, with room for three times the checkpoint.  Peers run in
the interpreter `--peer-python`; those that are not installed there are named.  `--resume` goes on with the rounds of an
interrupted run.  `--scale 32` makes everything small, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rewriting.checkpoint import GB, Shape
from benchmarks.rewriting.machine import installed_versions, machine_facts, peer_versions
from benchmarks.rewriting.measures import MEASURES, PEERS
from benchmarks.rewriting.phases import (
    MEMORY_MEASURES,
    NEEDED,
    Journal,
    convert,
    make_place,
    measure_interpreters,
    measure_memory,
    measure_rounds,
    note,
    rehearse,
)
from benchmarks.rewriting.report import summarise, table
from benchmarks.rewriting.running import ROOT, FailedRun, clear

__all__ = ["SCHEMA", "main", "run"]

SCHEMA = 1


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """The measures to run; `cp` and `apply` are always among them."""
    peers = list(PEERS) if arguments.peers is None else [name for name in arguments.peers if name != "none"]
    wanted = arguments.runs or [name for name in MEASURES if name not in PEERS]
    unknown = {*peers, *wanted} - set(MEASURES)
    if unknown:
        raise SystemExit(f"rewrite.py: unknown: {', '.join(sorted(unknown))}; known: {', '.join(MEASURES)}")
    return [name for name in MEASURES if name in (*NEEDED, *wanted, *peers)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="rounds (10)")
    parser.add_argument("--side-pairs", type=int, default=5, help="rounds in which what has no goal runs too (5)")
    parser.add_argument("--size", type=float, default=3.0, help="size of the checkpoint in GB (3)")
    parser.add_argument("--memory", type=float, nargs="*", default=[1.0, 3.0, 12.0], help="sizes for memory (1 3 12)")
    parser.add_argument("--scale", type=int, default=1, choices=(1, 2, 4, 8, 16, 32), help="divides every size (1)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="work folder (build/bench)")
    parser.add_argument("--json", type=Path, help="where the result goes (WORK/rewrite.json)")
    parser.add_argument(
        "--runs", nargs="*", help=f"only these: {', '.join(name for name in MEASURES if name not in PEERS)}"
    )
    parser.add_argument("--peers", nargs="*", help=f"only these, or none: {', '.join(PEERS)}")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has the peers")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; gives the result, which is also written to the JSON file after each phase."""
    load = os.getloadavg()[0]
    work: Path = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    names, shape = _chosen(arguments), Shape.of_size(arguments.size * GB, scale=arguments.scale)
    peers = peer_versions(arguments.peer_python, list(PEERS))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": installed_versions(["kconvert", "torch", "transformers", "safetensors", "numpy"]),
        "peer_versions": peers,
        "machine": machine_facts(work, load),
        "checkpoint": {
            "size_bytes": shape.size_bytes,
            "shards": len(shape.shards()),
            "tensors": len(shape.tensors()),
            "scale": shape.scale,
        },
        "rounds": arguments.pairs,
        "side_rounds": min(arguments.pairs, arguments.side_pairs),
    }
    identity = {key: result[key] for key in ("schema", "versions", "peer_versions", "checkpoint")}
    journal = Journal(work / "runs.jsonl", identity, resume=arguments.resume)

    small = make_place(work, Shape(2, scale=32), arguments.peer_python)
    if any(MEASURES[name].from_converted for name in names):
        convert(small)
    not_measured = rehearse(names, small, peers)
    names = [name for name in names if name not in not_measured]
    in_memory = [name for name in MEMORY_MEASURES if name in names and arguments.memory]
    measure_interpreters(in_memory, small, journal)
    clear(small.converted, small.source)

    def keep() -> dict[str, Any]:
        runs, memory = journal.of("rounds"), journal.of("memory")
        found = {
            **result,
            "not_measured": not_measured,
            "summary": summarise(runs, memory),
            "runs": runs,
            "memory": memory,
        }
        target: Path = arguments.json or work / "rewrite.json"
        unfinished = target.with_name(f"{target.name}.unfinished")
        unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(target)
        return found

    place = make_place(work, shape, arguments.peer_python)
    failed = measure_rounds(names, place, journal, pairs=arguments.pairs, side_pairs=arguments.side_pairs)
    not_measured.update(failed)
    in_memory = [name for name in in_memory if name not in failed]
    keep()
    for size in arguments.memory:
        at = Shape.of_size(size * GB, scale=arguments.scale)
        reason = measure_memory(in_memory, work, at, journal, keep=at == shape)
        if reason is not None:
            not_measured[f"memory, {size:g} GB"] = reason
    return keep()


def main(argv: Sequence[str] | None = None) -> int:
    """Run it from the command line."""
    arguments = _arguments(argv)
    try:
        result = run(arguments)
    except FailedRun as error:
        raise SystemExit(f"rewrite.py: a run failed with exit code {error.code}: {error}") from error
    except KeyboardInterrupt:
        note("interrupted; --resume goes on")
        return 130
    print(table(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
