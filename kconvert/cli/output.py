"""How things are printed: data to stdout, messages to stderr, tables that fit the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["foreign_output_apart", "format_bytes", "note", "print_json", "print_table", "print_text", "warn"]


def foreign_output_apart() -> contextlib.AbstractContextManager[object]:
    """While code that is not ours runs (kernel packages, model classes), what it prints goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr)


def note(message: str) -> None:
    """A message for people."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """A warning, on one line."""
    note(f"kconvert: warning: {' '.join(message.split())}")


def print_json(value: Any) -> None:
    """The one JSON value of a command, in ASCII: whatever a path holds, and whatever stdout takes."""
    print(json.dumps(value, indent=2), flush=True)


def print_text(text: str) -> None:
    """A line of data; what stdout does not take, as a path that is not valid UTF-8, is escaped."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """A table on stdout.  Cells are folded, never cut; those of columns named in `right` and `whole` stay on one line."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in (*right, *whole))  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, markup=False, highlight=False, emoji=False).print(table)


def format_bytes(size: int) -> str:
    """`12 B`, `3.4 MB`: decimal units, as disks are sold."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
