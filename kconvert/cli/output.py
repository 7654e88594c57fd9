"""How things are printed: data to stdout, messages to stderr, tables that fit the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = [
    "NO_PATCHES",
    "can_redraw",
    "command_lines",
    "foreign_output_apart",
    "format_bytes",
    "format_duration",
    "format_share",
    "make_console",
    "note",
    "note_added",
    "print_folded",
    "print_json",
    "print_table",
    "print_text",
    "printable",
    "shell_quote",
    "warn",
    "what_is_kept",
]

NO_PATCHES = "none; the tensors are stored as the model holds them"
"""Said of a conversion that only bakes."""

_GAP = 3
"""Blanks between two columns of a table."""
_HANG = "  "
"""Before what goes on with the line above it."""


@contextlib.contextmanager
def foreign_output_apart(*, quiet: bool = False) -> Iterator[None]:
    """While code that is not ours runs (kernel packages, model classes), what it prints goes to stderr, or nowhere."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(open(os.devnull, "w")) if quiet else sys.stderr  # noqa: PTH123 - no path of ours
        stack.enter_context(contextlib.redirect_stdout(target))
        yield


@contextlib.contextmanager
def what_is_kept() -> Iterator[None]:
    """Says, when Ctrl-C ends what is inside, what of it is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        note_added(error)
        raise


def note_added(error: BaseException) -> None:
    """Prints the notes that were added to an error."""
    for text in getattr(error, "__notes__", ()):
        note(printable(f"kconvert: {text}"))


def note(message: str) -> None:
    """A message for people; in one write, so that lines of two threads do not mix."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def warn(message: str) -> None:
    """A warning, on one line."""
    note(printable(f"kconvert: warning: {' '.join(message.split())}"))


def print_json(value: Any) -> None:
    """The one JSON value of a command, in ASCII: whatever a path holds, and whatever stdout takes."""
    print(json.dumps(value, indent=2), flush=True)


def print_text(text: str) -> None:
    """A line of data; what stdout does not take, as a path that is not valid UTF-8, is escaped."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def print_folded(text: str, *, first: str | None = None, indent: int = 0, hang: int | None = None) -> None:
    """Print text folded at the width of the terminal.

    Args:
        text: what a terminal should not get is escaped.
        first: stands before the text in place of `indent` blanks.
        indent: blanks before each line.
        hang: blanks before each line but the first; as many as `indent` if left out.
    """
    lines = wrap(
        printable(text),
        make_console(sys.stdout).width,
        initial_indent=" " * indent if first is None else first,
        subsequent_indent=" " * (indent if hang is None else hang),
        break_on_hyphens=False,
    )
    for line in lines:
        print_text(line)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    names: str | None = None,
) -> None:
    """A table on stdout.  Cells are folded, never cut.

    Args:
        title: stands above it.
        columns: the heads.
        rows: a cell for each column.
        right: columns that stand at the right edge and are not folded.
        whole: columns that are not folded.
        names: a column of dotted names, folded at dots alone where there is room for that.
    """
    console, unfolded = make_console(sys.stdout), {*right, *whole}
    if names is not None:
        place = columns.index(names)
        width, fits = _names_width([columns, *rows], place, console.width, {columns.index(head) for head in unfolded})
        rows = [[*row[:place], _folded_names(row[place], width), *row[place + 1 :]] for row in rows]
        unfolded |= {names} if fits else set()
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in unfolded)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _names_width(cells: Sequence[Sequence[str]], place: int, width: int, unfolded: set[int]) -> tuple[int, bool]:
    """Columns for dotted names in a table of `width`, and whether no segment is wider than these.

    Where the other columns leave too little, those of them that may be folded are.
    """
    room = width - _GAP * len(cells[0]) + 1
    others = [number for number in range(len(cells[0])) if number != place]
    wide = {number: max(len(line) for row in cells for line in row[number].split("\n")) for number in others}
    least = {number: max((len(word) for row in cells for word in row[number].split()), default=0) for number in others}
    needed = max(len(piece) for row in cells for piece in _folded_names(row[place], 0).split("\n"))
    most = room - sum(wide[number] if number in unfolded else least[number] for number in others)
    return max(room - sum(wide.values()), min(most, needed), 1), needed <= most


def _folded_names(text: str, width: int) -> str:
    """Lines of dotted names in lines of `width`, broken before dots; a segment that is wider is left to the table."""
    lines = []
    for name in text.split("\n"):
        line, *pieces = name.replace(".", "\n.").split("\n")
        for piece in pieces:
            if len(line) + len(piece) > width:
                lines.append(line)
                line = _HANG
            line += piece
        lines.append(line)
    return "\n".join(lines)


def make_console(file: TextIO) -> Console:
    """A console that prints text as it is, as wide as the terminal.

    To rich, a dumb terminal has 80 columns, and one without a name has colours.
    """
    is_plain = file.isatty() and not can_redraw(file)
    columns = _columns(file) if is_plain else None
    return Console(
        file=file,
        width=columns,
        height=25 if columns else None,  # rich takes the two together or not at all
        color_system=None if is_plain else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


def _columns(file: TextIO) -> int:
    """What rich does for other terminals; one that was never told its size has none."""
    forced = os.environ.get("COLUMNS", "")
    return (int(forced) if forced.isdecimal() else os.get_terminal_size(file.fileno()).columns) or 80


def can_redraw(file: TextIO) -> bool:
    """Whether `file` is a terminal that can erase a line."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def printable(text: str) -> str:
    """`text` on one line, with what no terminal should get, or can show, escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shell_quote(path: str) -> str:
    """A path as one word for a shell; bash's `$'...'` for what cannot be shown."""
    word = f"./{path}" if path.startswith("-") else path
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in _escaped(os.fsencode(word)))
    return f"$'{shown}'"


def command_lines(parts: Sequence[str], width: int) -> list[str]:
    """A command, indented, on one line where it fits, else with a line for each part."""
    whole = _HANG + " ".join(parts)
    if len(whole) <= width:
        return [whole]
    first, *rest = parts
    lines = [_HANG + first, *(2 * _HANG + part for part in rest)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _escaped(data: bytes) -> bytes:
    return data.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


_UNITS = ("B", "kB", "MB", "GB", "TB")


def _unit_of(size_bytes: float) -> int:
    """The number of the decimal unit in which a size reads best, as disks are sold."""
    return next((number for number in range(len(_UNITS)) if size_bytes < 1000 ** (number + 1)), len(_UNITS) - 1)


def _in_unit(size_bytes: int, number: int) -> str:
    return f"{size_bytes / 1000**number:.1f}" if number else str(size_bytes)


def format_bytes(size_bytes: int) -> str:
    """`12 B`, `3.4 MB`."""
    number = _unit_of(size_bytes)
    return f"{_in_unit(size_bytes, number)} {_UNITS[number]}"


def format_share(done_bytes: int, total_bytes: int) -> str:
    """`1.2 of 3.0 GB`, always of the same width for one total."""
    number = _unit_of(total_bytes)
    total = _in_unit(total_bytes, number)
    return f"{_in_unit(done_bytes, number):>{len(total)}} of {total} {_UNITS[number]}"


def format_duration(seconds: float) -> str:
    """`4 s`, `2 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
