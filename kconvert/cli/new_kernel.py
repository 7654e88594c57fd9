"""`kconvert new-kernel`: a working kernel package to start from.

The folder goes to standard output, what to do next to standard error.  A name that is no class name (exit code 2) and a
folder that is not empty (exit code 7) are refused by `kconvert.authoring`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kconvert.authoring import new_kernel
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import note, print_json, print_text, shell_quote

__all__ = ["new_kernel_command"]


def new_kernel_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The class name of the kernel, e.g. FastMLP.", autocompletion=complete_path
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The folder to write, absent or empty.  [default: NAME in snake case]",
            autocompletion=complete_path,
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Join two modules in one, a norm and the MLP after it, not replace one.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a kernel package that works, to change into your own.

    DIR gets the package (two classes in layers.py), a test that makes its own tiny model, a recipe for Qwen3 and a
    README.  The template packs gate and up of the MLP.

    Example: kconvert new-kernel FastMLP
    """
    made = new_kernel(name, output, kind="fuse" if fuse else "replace")
    if json:
        print_json({"directory": str(made.directory), "files": list(made.files), "kernel": made.kernel})
        return
    recipe = shell_quote(str(made.directory / "recipe.yaml"))
    note(f"kconvert: wrote {len(made.files)} files; next:")
    note(f"  kconvert check-kernel {shell_quote(made.kernel)} --model-dir MODEL_DIR --recipe {recipe}")
    print_text(str(made.directory))
