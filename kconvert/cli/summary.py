"""What `apply` did, for people, on stderr: the patches, the figures, and what to do next.

Nothing is wider than the terminal, but for a path that is wider by itself in a command: broken, it could not be pasted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kconvert.cli.devices import devices_text, left_out_texts
from kconvert.cli.output import (
    NO_PATCHES,
    command_lines,
    format_bytes,
    format_duration,
    make_console,
    note,
    printable,
    shell_quote,
)
from kconvert.convert import ApplyResult
from kconvert.plan import Plan

__all__ = ["figures_table", "listed", "print_summary", "seconds_text"]

_INDENT = "  "
_MAX_LABEL = 20


def print_summary(result: ApplyResult, model_dir: Path) -> None:
    """Print what became of `model_dir`."""
    console = make_console(sys.stderr)
    patches, figures = list(_patch_rows(result.prepared.plan)), list(_figures(result))
    label_width = max(len(label) for label, *_ in [*patches, *figures])
    console.print(Text.assemble("\n", ("Converted", "green"), f" with recipe {result.prepared.recipe.name}\n"))
    if patches:
        console.print(figures_table(patches, label_width, heads=("layout", "path", "modules")), "")
    console.print(figures_table(figures, label_width), "")
    _print_next(result, model_dir, console)


def figures_table(rows: Sequence[Sequence[str]], label_width: int, *, heads: Sequence[str] = ()) -> Table:
    """Cells are folded, never cut; two tables with one `label_width` stand under each other, where there is room."""
    table = Table(box=None, show_header=bool(heads), pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column(*heads[:1], min_width=min(label_width, _MAX_LABEL), overflow="fold")
    table.add_column(*heads[1:2], overflow="fold")
    for head in heads[2:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _print_next(result: ApplyResult, model_dir: Path, console: Console) -> None:
    source, output = (shell_quote(str(path)) for path in (model_dir, result.output))
    command, argument = [f"kconvert verify {output}", f"--source {source}"], ""
    if result.prepared.resolved.packages:
        command, argument = [*command, "--trust-remote-code"], ", trust_remote_code=True"
    console.print(Text("Check it", style="bold"))
    for line in command_lines(command, console.width):
        note(line)
    console.print(Text("Load it, in Python", style="bold"))
    note(f"{_INDENT}model = kconvert.load_converted({str(result.output)!r}{argument})\n")


def _patch_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Layout, path and number of modules; entries of one layout follow each other, and it is named once."""
    layouts = dict.fromkeys(entry.layout.name for entry in plan.entries)
    for layout in layouts:
        shown = layout
        for entry in plan.entries:
            if entry.layout.name != layout:
                continue
            modules = sum(claim.entry == entry.number for claim in plan.claims)
            paths = [pair.pattern.text for pair in entry.pairs]
            yield shown, "\n+ ".join(paths), str(modules)
            shown = ""


def _figures(result: ApplyResult) -> Iterator[tuple[str, str]]:
    manifest = result.prepared.manifest
    copied, packed = format_bytes(result.bytes_copied), format_bytes(result.bytes_transformed)
    if not result.prepared.plan.entries:
        yield "patches", NO_PATCHES
    yield "weights", f"{copied} as they are, {packed} packed"
    yield "devices", devices_text(manifest.devices, manifest.view_devices)
    for text in left_out_texts(result.prepared.opened.profile):
        yield "not used", text
    if not manifest.model_checked:
        yield "carried", "not known without the model check"
    elif manifest.carried:
        yield "carried", listed(manifest.carried, "tensor")
    if manifest.omitted:
        yield "left out", listed([item.name for item in manifest.omitted], "file")
    stages = ("check", result.check_seconds), ("copy", result.copy_seconds), ("sync", result.sync_seconds)
    split = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in stages)
    yield "time", f"{seconds_text(result.total_seconds)}: {split}"
    yield "memory", f"{format_bytes(result.peak_rss_bytes)} at the peak"
    yield "output", printable(str(result.output))


def listed(names: Sequence[str], noun: str) -> str:
    """`1 file: a`, `7 files, e.g. a`."""
    first = printable(names[0])
    return f"1 {noun}: {first}" if len(names) == 1 else f"{len(names)} {noun}s, e.g. {first}"


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `2 min 05 s`."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
