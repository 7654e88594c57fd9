"""`kconvert export-package`: the layouts and kernels of a converted directory as a package for transformers.

The folder goes to standard output, how to load with it to standard error.  A conversion that has no exported form is
refused with exit code 8, each reason on a line of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.export_kernel_config import Converted, refusals_apart
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import foreign_output_apart, note, print_json, print_text, shell_quote
from kconvert.cli.progress import Progress

__all__ = ["export_package_command"]


def export_package_command(
    converted: Converted,
    output: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder to write; must not hold anything.", autocompletion=complete_path
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The package's name.  [default: made of the model type]"),
    ] = None,
    version: Annotated[int, typer.Option("--version", metavar="N", help="The version in its metadata.")] = 1,
    json: Json = False,
) -> None:
    """Write the kernels of a converted directory as a package for transformers.

    DIR can be uploaded to a kernel repository as it is, or be used from where it lies; `export-kernel-config` says how
    transformers loads CONVERTED with it.  Nothing in it needs kconvert.

    Example: kconvert export-package my-model-kconvert my-kernels
    """
    prepare_torch()
    from kconvert.export import export_package

    with Progress("exporting the kernels"), foreign_output_apart(), refusals_apart():
        made = export_package(converted, output, name=name, version=version)
    if json:
        value = {"output": str(made.directory), "name": made.name, "version": made.version}
        print_json({**value, "kernels": list(made.kernels)})
        return
    command = (
        f"kconvert export-kernel-config {shell_quote(str(converted))} --package {shell_quote(str(made.directory))}"
    )
    note(f"kconvert: {', '.join(made.kernels)}; `{command}` shows how to load with it")
    print_text(str(made.directory))
