"""`kconvert doctor`: what this machine has for kconvert, whether it is usable, and the way out where it is not.

It only reports: the exit code is 0 whatever it finds.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kconvert.cli.options import Json
from kconvert.cli.output import print_json, print_table, print_text, printable
from kconvert.cli.progress import Progress
from kconvert.runtime.environment import Environment, Part, diagnose
from kconvert.runtime.environment_probe import probe_environment

__all__ = ["doctor_command"]


def doctor_command(json: Json = False) -> None:
    """Show what works on this machine, and the way out."""
    with Progress("looking at this machine"):
        facts = probe_environment()
    parts = diagnose(facts)
    if json:
        print_json(_value(facts, parts))
        return
    rows = [(part.name, part.version, part.usable.value, printable(_note(part))) for part in parts]
    print_table("Environment", ("part", "version", "usable", "note"), rows, whole=("part", "usable"))
    print_text(_closing_line(facts))


def _note(part: Part) -> str:
    return "; ".join(filter(None, (part.note, part.fix)))


def _closing_line(facts: Environment) -> str:
    kernels = facts.kernels
    if kernels is None:
        return "No kernel runs here: torch could not be asked."
    line = f"{kernels.num_usable} of {kernels.num_known} kernels run here"
    broken = kernels.num_broken_modules
    if broken:
        line += f", and {broken} kernel {'module does' if broken == 1 else 'modules do'} not import"
    is_whole = kernels.num_usable == kernels.num_known and not kernels.num_broken_modules
    return f"{line}." if is_whole else f"{line}; `kconvert list-kernels` shows why."


def _value(facts: Environment, parts: tuple[Part, ...]) -> dict[str, Any]:
    return {
        "parts": [{**asdict(part), "usable": part.usable.value} for part in parts],
        "device": asdict(facts.device) if facts.device is not None else None,
        "kernels": asdict(facts.kernels) if facts.kernels is not None else None,
    }
