"""`kconvert export-kernel-config`: how transformers itself loads a converted directory.

Prints a program, or with `--json` data.  What KernelConfig cannot express is refused with exit code 8, each reason on a
line of its own; a version or revision of no package is exit code 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import foreign_output_apart, note, print_json, print_text, printable
from kconvert.cli.progress import Progress
from kconvert.errors import KconvertError, UsageError
from kconvert.names import VARIANT

__all__ = ["Converted", "export_kernel_config_command", "refusals_apart"]

Converted = Annotated[
    Path, typer.Argument(metavar="CONVERTED", help="The folder that apply wrote.", autocompletion=complete_path)
]


@contextmanager
def refusals_apart() -> Iterator[None]:
    """Where several patches are refused, each reason on a line of its own before the error."""
    try:
        yield
    except KconvertError as error:
        reasons = error.details.get("refused", ())
        for reason in reasons if len(reasons) > 1 else ():
            note(printable(f"kconvert: refused: {reason}"))
        raise


def export_kernel_config_command(
    converted: Converted,
    package: Annotated[
        str | None,
        typer.Option(
            "--package",
            metavar="PACKAGE",
            help="Where the package is that export-package wrote: a folder, or owner/repo on the Hub.",
            autocompletion=complete_path,
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="Of owner/repo, this version.  [default: 1]")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REVISION", help="Of owner/repo, this tag, branch or commit.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Write that transformers is to trust the packages' owners."),
    ] = False,
    json: Json = False,
) -> None:
    """Print the KernelConfig with which transformers loads a converted directory.

    It is printed only where it does what the manifest says; what KernelConfig cannot express is refused with the reason.

    Example: kconvert export-kernel-config my-model-kconvert --package my-kernels
    """
    prepare_torch()
    from kconvert.export import PackagePlace, kernel_config

    if package is None and (version is not None or revision is not None):
        raise UsageError("a version or revision of no package", fix="give --package owner/repo")
    place = PackagePlace(package, version, revision) if package is not None else None
    with Progress("reading the conversion"), foreign_output_apart(), refusals_apart():
        made = kernel_config(converted, place, trust_remote_code=trust_remote_code)
    if not made.items:
        note(
            f"kconvert: no module is patched, so no KernelConfig is needed: {made.model_class}.from_pretrained("
            f'{str(made.directory)!r}, variant="{VARIANT}") loads it\n'
        )
    if json:
        print_json(made.to_json())
    else:
        print_text(made.to_python())
