"""Medians, ratios and goals of the rewrite benchmark, from its single measurements, and the table that shows them.

A ratio is the median of the ratios within a round, whose runs stood side by side.  A goal whose measures did not run
has no value.  The control says whether the machine can be measured on: two copies at a time have to be faster than one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from benchmarks.rewriting.measures import MEASURES

__all__ = ["CONTROL_LIMIT", "summarise", "table"]

CONTROL_LIMIT = 0.85
_MEMORY_LIMIT_MB = 64.0
_SPREAD_LIMIT_MB = 16.0
"""How far the peaks of the smallest and the largest checkpoint may be apart: the plan of more tensors is larger."""
Record: TypeAlias = Mapping[str, Any]
Rounds: TypeAlias = Mapping[int, Mapping[str, Record]]


@dataclass(frozen=True)
class _Ratio:
    """Seconds of `above` over seconds of `below`; `of` names what kconvert itself reports, else the whole command."""

    title: str
    above: str
    below: str
    limit: float
    of: tuple[str, ...] = ("seconds",)

    def in_rounds(self, rounds: Rounds) -> list[float]:
        return [
            sum(found[self.above][name] for name in self.of) / found[self.below]["seconds"]
            for found in rounds.values()
            if self.above in found and self.below in found
        ]


_CONTROL = _Ratio("two cp at a time / cp -r", "two-cp", "cp", CONTROL_LIMIT)
_GOALS = (
    _Ratio("apply: copying / cp -r", "apply", "cp", 0.9, ("copy_seconds",)),
    _Ratio("apply: copying, syncing / cp -r, fsync", "apply", "cp-fsync", 1.1, ("copy_seconds", "sync_seconds")),
    _Ratio("apply --no-model-check / load, cat, save", "apply", "script", 0.6),
    _Ratio("apply / compressed-tensors", "apply-checked", "compressed-tensors", 1.0),
)


def summarise(runs: Iterable[Record], memory: Sequence[Record]) -> dict[str, Any]:
    """What the measurements say.

    Args:
        runs: one record for each run in a round: `round`, `name`, `seconds`, `peak_bytes`, and what `apply` reports.
        memory: one record for each run of the memory phase: `name`, `size_bytes`, `peak_bytes`, `interpreter_bytes`.
    """
    rounds: dict[int, dict[str, Record]] = {}
    for run in runs:
        rounds.setdefault(run["round"], {})[run["name"]] = run
    control = _CONTROL.in_rounds(rounds)
    goals = [_goal(goal.title, goal.in_rounds(rounds), goal.limit) for goal in _GOALS]
    return {
        "measures": {
            name: _measure(name, rounds) for name in MEASURES if any(name in found for found in rounds.values())
        },
        "control": {
            "title": _CONTROL.title,
            "limit": CONTROL_LIMIT,
            "median": median(control) if control else None,
            "rounds_over_the_limit": [
                number
                for number, found in sorted(rounds.items())
                for ratio in _CONTROL.in_rounds({number: found})
                if ratio >= CONTROL_LIMIT
            ],
            "held": median(control) < CONTROL_LIMIT if control else None,
        },
        "goals": goals + _memory_goals(memory),
    }


def _goal(title: str, values: Sequence[float], limit: float) -> dict[str, Any]:
    value = median(values) if values else None
    return {"title": title, "value": value, "limit": limit, "met": None if value is None else value <= limit}


def _measure(name: str, rounds: Rounds) -> dict[str, Any]:
    found = [each[name] for each in rounds.values() if name in each]
    ratios = sorted(_Ratio("", name, "cp", 0).in_rounds(rounds))
    peaks = [run["peak_bytes"] for run in found if run["peak_bytes"] is not None]
    own = [key for key in ("copy_seconds", "sync_seconds", "check_seconds") if key in found[0]]
    return {
        "title": MEASURES[name].title,
        "rounds": len(found),
        "median_seconds": median(run["seconds"] for run in found),
        **{f"median_{key}": median(run[key] for run in found) for key in own},
        "median_ratio_to_cp": median(ratios) if ratios else None,
        "ratio_range": [ratios[0], ratios[-1]] if ratios else None,
        "peak_bytes": max(peaks, default=None),
    }


def _above(run: Record) -> float | None:
    """MB above the interpreter with the same imports."""
    peak, interpreter = run["peak_bytes"], run["interpreter_bytes"]
    return None if peak is None or interpreter is None else (peak - interpreter) / 1e6


def _memory_goals(memory: Sequence[Record]) -> list[dict[str, Any]]:
    above: dict[str, list[float]] = {}
    for run in memory:
        value = _above(run)
        if value is not None and run["name"] != "script":
            above.setdefault(run["name"], []).append(value)
    goals = []
    for name, values in above.items():
        goals.append(_goal(f"{name}: MB above its imports", [max(values)], _MEMORY_LIMIT_MB))
        if len(values) > 1:
            goals.append(_goal(f"{name}: MB between sizes", [max(values) - min(values)], _SPREAD_LIMIT_MB))
    return goals


def table(result: Record) -> str:
    """The result as lines of at most 80 characters."""
    lines = [*_facts(result), "", *_times(result["summary"]), ""]
    if result["memory"]:
        lines += [*_memory(result["memory"]), ""]
    lines += _goals(result["summary"])
    for name, reason in result["not_measured"].items():
        title = MEASURES[name].title if name in MEASURES else name
        lines += textwrap.wrap(f"not measured: {title}: {reason}", width=80, subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _facts(result: Record) -> list[str]:
    machine, checkpoint, versions = result["machine"], result["checkpoint"], result["versions"]
    size = f"{_size(checkpoint['size_bytes'])} in {checkpoint['shards']} shards, {checkpoint['tensors']} tensors"
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    system = f"{machine['file_system']}, {machine['system']} {machine['kernel']}"
    lines = [
        f"{size}; {result['rounds']} rounds",
        f"{machine['cores']} cores, {memory}, {system}"[:80],
        ", ".join(f"{name} {versions[name]}" for name in ("kconvert", "python", "torch") if name in versions),
    ]
    load = machine["load_at_start"]
    if load is not None and load > machine["cores"] / 4:
        lines.append(f"The machine was not quiet: load {load:.2f} at the start.")
    if checkpoint["size_bytes"] > machine["unwritten_bytes"]:
        room = _size(machine["unwritten_bytes"])
        lines.append(f"More than {room} are written at once, and the kernel slows the writers down.")
    return lines


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def _times(summary: Record) -> list[str]:
    lines = [f"{'medians':38}{'seconds':>8}{'x cp -r':>9}{'from - to':>16}{'peak MB':>9}"]
    for found in summary["measures"].values():
        ratio, span = found["median_ratio_to_cp"], found["ratio_range"]
        texts = ("", "") if ratio is None else (_short(ratio), f"{_short(span[0])} - {_short(span[1])}")
        peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e6:.0f}"
        lines.append(
            f"{found['title']:38}{found['median_seconds']:>8.3f}{texts[0]:>9} {texts[1]:>15}{peak:>9}".rstrip()
        )
        if "median_copy_seconds" in found:
            own = [f"{key} {found[f'median_{key}_seconds']:.3f}" for key in ("copy", "sync", "check")]
            lines.append("    as it reports: " + ", ".join(own))
    return lines


def _memory(memory: Sequence[Record]) -> list[str]:
    sizes = sorted({run["size_bytes"] for run in memory})
    lines = [f"{'peak memory, MB (above the imports)':38}" + "".join(f"{_size(size):>14}" for size in sizes)]
    for name in dict.fromkeys(run["name"] for run in memory):
        found = {run["size_bytes"]: run for run in memory if run["name"] == name}
        cells = [_memory_cell(found.get(size)) for size in sizes]
        lines.append(f"{MEASURES[name].title:38}" + "".join(f" {cell:>13}" for cell in cells))
    return lines


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.3g} MB"


def _memory_cell(run: Record | None) -> str:
    above = None if run is None else _above(run)
    return "-" if run is None or above is None else f"{run['peak_bytes'] / 1e6:.0f} ({above:+.0f})"


def _goals(summary: Record) -> list[str]:
    control = summary["control"]
    lines = [f"{'goal':48}{'found':>10}{'at most':>10}"]
    for goal in summary["goals"]:
        found = "-" if goal["value"] is None else f"{goal['value']:.3f}"
        verdict = {True: "met", False: "MISSED", None: ""}[goal["met"]]
        lines.append(f"{goal['title']:48}{found:>10}{goal['limit']:>10.2f}   {verdict}".rstrip())
    if control["held"] is None:
        return [*lines, "control: not measured, so nothing here counts"]
    verdict = "held" if control["held"] else "NOT HELD, so nothing here counts"
    text = f"control: {control['title']}: {control['median']:.3f}, to be under {CONTROL_LIMIT}: {verdict}"
    over = ", ".join(map(str, control["rounds_over_the_limit"]))
    wrapped = textwrap.wrap(text + (f"; over the limit in rounds {over}" if over else ""), 80, subsequent_indent="    ")
    return lines + wrapped
