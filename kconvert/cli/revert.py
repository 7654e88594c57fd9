"""`kconvert revert`: the source's files again, out of a converted directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kconvert.cli.export_kernel_config import Converted
from kconvert.cli.options import Json, NoResume, complete_path
from kconvert.cli.output import (
    command_lines,
    format_bytes,
    make_console,
    note,
    print_json,
    print_table,
    print_text,
    printable,
    shell_quote,
    what_is_kept,
)
from kconvert.cli.progress import Progress
from kconvert.cli.summary import figures_table, listed, seconds_text
from kconvert.convert import PreparedRevert, RevertResult, check_revert_output, prepare_revert, revert

__all__ = ["revert_command"]

_MOST_SHOWN = 12
"""More of what is not restored is only counted; `--json` has all."""


def revert_command(
    converted: Converted,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The folder to write; missing or empty.",
            autocompletion=complete_path,
        ),
    ],
    no_resume: NoResume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show what would come back; write nothing.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="No progress and no summary: only warnings and errors on stderr.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the source of a converted directory again; CONVERTED is not changed.

    Gives back the weight files, their index and the files that were copied beside them, byte for byte, and lists what
    cannot come back.  Needs nothing but CONVERTED.  Exit code 5, before anything is written, where a step cannot be
    undone exactly or a copied file was changed.  The weights are copied and not looked at: whether they are still what
    apply wrote, `kconvert verify CONVERTED --level bytes` says where apply had --digests.

    Of a model that was saved with save_pretrained(variant="kconvert"), the names, shapes, dtypes and files come back, with
    the values that it was saved with.

    Example: kconvert revert my-model-kconvert -o my-model-again
    """
    name = printable(converted.name or str(converted))
    with what_is_kept(), Progress(f"checking {name}", quiet=quiet) as progress:
        if dry_run:
            check_revert_output(output, converted)
            prepared = prepare_revert(converted)
        else:

            def to_write(prepared: PreparedRevert) -> None:
                if not quiet:
                    note(f"kconvert: {format_bytes(prepared.job.size_bytes)} to write")
                progress.writing(prepared.job.size_bytes, final_bytes=sum(len(data) for _, data in prepared.job.final))

            result = revert(converted, output, resume=not no_resume, on_prepared=to_write, on_progress=progress.advance)
    if dry_run:
        _show(prepared, as_json=json)
    elif json:
        print_json(_result_value(result))
    else:
        if not quiet:
            _print_summary(result)
        print_text(str(result.output))


def _value(prepared: PreparedRevert) -> dict[str, Any]:
    return {
        "files": list(prepared.files),
        "index": prepared.index,
        "sidecars": list(prepared.sidecars),
        "not_restored": [{"name": item.name, "reason": item.reason} for item in prepared.not_restored],
        "exact": prepared.is_exact,
        "weights_checked": False,  # what `verify --level bytes` is for
        "notes": list(prepared.notes),
    }


def _result_value(result: RevertResult) -> dict[str, Any]:
    return {
        "output": str(result.output),
        "bytes_written": result.bytes_written,
        "bytes_resumed": result.bytes_resumed,
        "copy_seconds": result.copy_seconds,
        "sync_seconds": result.sync_seconds,
        "total_seconds": result.total_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        **_value(result.prepared),
    }


def _show(prepared: PreparedRevert, *, as_json: bool) -> None:
    """Print what would come back."""
    if as_json:
        print_json({"bytes": prepared.job.size_bytes, **_value(prepared)})
        return
    rows = [(printable(file.name), format_bytes(file.size_bytes)) for file in prepared.job.files]
    rows += [(printable(name), format_bytes(len(data))) for name, data in prepared.job.final]
    rows += [(printable(copy.name), format_bytes(copy.size_bytes)) for copy in prepared.job.copies]
    print_table("Files", ("file", "size"), rows, right=("size",))
    for item in prepared.not_restored:
        print_text(f"not restored: {printable(item.name)} ({printable(item.reason)})")
    for text in prepared.notes:
        print_text(f"note: {printable(text)}")


def _print_summary(result: RevertResult) -> None:
    console, prepared = make_console(sys.stderr), result.prepared
    console.print(Text.assemble("\n", ("Restored", "green"), f" from {printable(str(prepared.converted.directory))}\n"))
    figures = list(_figures(result))
    console.print(figures_table(figures, max(len(label) for label, _ in figures)), "")
    if prepared.not_restored:
        shown, more = prepared.not_restored[:_MOST_SHOWN], len(prepared.not_restored) - _MOST_SHOWN
        console.print(Text("Not restored", style="bold"))
        rows = [(f"  {printable(item.name)}", printable(item.reason)) for item in shown]
        rows += [(f"  and {more} more", "--json lists all")] if more > 0 else []
        console.print(figures_table(rows, 0), "")
    if prepared.converted.manifest.digests is not None:
        console.print(Text("Check that the weights are still what was written", style="bold"))
        path = shell_quote(str(prepared.converted.directory))
        for line in command_lines([f"kconvert verify {path}", "--level bytes"], console.width):
            note(line)
        note("")


def _figures(result: RevertResult) -> Iterator[tuple[str, str]]:
    prepared = result.prepared
    size = format_bytes(sum(file.size_bytes for file in prepared.job.files))
    yield "weights", f"{size} in {listed(prepared.files, 'file')}" if prepared.files else "none"
    if prepared.index is not None:
        yield "index", printable(prepared.index)
    if prepared.sidecars:
        yield "beside them", listed(prepared.sidecars, "file")
    if prepared.is_exact:
        yield "exact", "all of it is as in the source; the weights were copied, and not looked at"
    for text in prepared.notes:
        yield "note", printable(text)
    total, copy, sync = map(seconds_text, (result.total_seconds, result.copy_seconds, result.sync_seconds))
    yield "time", f"{total}: copy {copy}, sync {sync}"
    yield "memory", f"{format_bytes(result.peak_rss_bytes)} at the peak"
    yield "output", printable(str(result.output))
