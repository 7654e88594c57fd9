"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Json", "ModelDir", "NoModelCheck", "RecipeName", "TrustRemoteCode"]

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe such as qwen3.")
]
ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="The checkpoint: a folder with config.json and safetensors.")
]
NoModelCheck = Annotated[
    bool,
    typer.Option(
        "--no-model-check",
        help="Do not build the model to compare names, classes and shapes; needs no torch.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the kernel packages that the recipe trusts on this machine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]
