"""`kconvert check-kernel`: whether a two-class package can stand in for the modules that it is meant for.

The folder on the command line is the consent to run its code.  All checks are shown, and one that failed makes exit
code 8; the error is the first of them.  Classes and paths that are not as many as each other are exit code 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kconvert.authoring import CheckReport, Outcome
from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import foreign_output_apart, print_folded, print_json, print_table, printable
from kconvert.cli.progress import Progress
from kconvert.errors import KernelRefusedError, UsageError

__all__ = ["check_kernel_command"]


def check_kernel_command(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="PATH:CLASS", help="The package's folder and its kernel class.", autocompletion=complete_path
        ),
    ],
    model_dir: Annotated[
        Path,
        typer.Option(
            "--model-dir",
            metavar="DIR",
            help="A checkpoint with modules of that kind; it is loaded whole, so a small one is best.",
            autocompletion=complete_path,
        ),
    ],
    class_name: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="CLASS", help="The class of the replaced module; for a fusion once for each."),
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="PATTERN", help="Its path pattern; as many, in the same order."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            help="In their place: a recipe that gives the kernel to modules.",
            autocompletion=complete_path,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where it runs: cpu, cuda, cuda:1, npu.")
    ] = "cpu",
    json: Json = False,
) -> None:
    """Check a kernel package of your own: its code runs, since you name its folder here.

    Looks at names, forward signature and state; whether the mapping takes every tensor and comes back bit for bit;
    and how far results and gradients are from the modules that it replaces, in float32, bfloat16 and float16.  Exit
    code 8 where a check fails.

    Example: kconvert check-kernel ./fast_mlp:FastMLP --model-dir my-model --class Qwen3MLP --path "model.layers.*.mlp"
    """
    names, paths = class_name or [], path or []
    if len(names) != len(paths):
        raise UsageError(
            f"{len(names)} times --class and {len(paths)} times --path", fix="give both, once for each module"
        )
    prepare_torch()
    from kconvert.authoring import check_kernel  # loads torch

    with Progress(f"checking {printable(kernel)}"), foreign_output_apart():
        report = check_kernel(
            kernel, model_dir=model_dir, targets=list(zip(names, paths, strict=True)), recipe=recipe, device=device
        )
    if not json:
        _show(report)
    if report.failures:
        raise _error(report)
    if json:
        print_json(report.to_json())
        return
    places = ", ".join(" and ".join(paths) for paths in report.modules)
    print_folded(f"OK: the kernel can stand in for modules such as {places}.")


def _show(report: CheckReport) -> None:
    rows = [
        (
            check.name,
            check.outcome.value.upper() if check.outcome is Outcome.FAILED else check.outcome.value,
            printable(check.line()),
        )
        for check in report.checks
    ]
    print_table("Checks", ("check", "result", "what was found, and the way out"), rows, whole=("check", "result"))


def _error(report: CheckReport) -> KernelRefusedError:
    first, count = report.failures[0], len(report.failures)
    more = f" (and {count - 1} more)" if count > 1 else ""
    return KernelRefusedError(
        f"{first.name}: {first.text}{more}", where=report.kernel, fix=first.fix, details=report.to_json()
    )
