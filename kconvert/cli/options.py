"""Arguments and options that several commands share, and how a shell completes their values.

Completing imports no torch and reads no file: names of shipped recipes, names in a folder, device types.  Where
nothing is offered the shell completes file names itself, and does that better than a list can, so nothing is
offered for paths.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kconvert.errors import UsageError
from kconvert.kernels.specs import kernel_specs
from kconvert.recipe import shipped_recipes

__all__ = [
    "Json",
    "KernelDevice",
    "ModelDir",
    "NoModelCheck",
    "RecipeName",
    "TrustKernel",
    "TrustRemoteCode",
    "complete_path",
    "complete_recipe",
    "trusted_kernels",
]

_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{64}")
_RECIPE_SUFFIXES = (".yaml", ".yml")


def complete_path(incomplete: str) -> list[str]:
    """Nothing, so that the shell completes file names; older releases of typer answer with what was typed."""
    return []


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes that start so and, beside them, recipe files and folders; nothing where no shipped one does.

    A shell takes names that need quoting as they are; these are left to its own completion.
    """
    names = [name for name in shipped_recipes() if name.startswith(incomplete)]
    return [*names, *_recipe_files(incomplete)] if names else []


def _recipe_files(incomplete: str) -> Sequence[str]:
    """Folders, with `/`, and YAML files of this folder that start so."""
    try:
        found = sorted(Path().iterdir())
        shown = [
            f"{path.name}/" if path.is_dir() else path.name
            for path in found
            if path.is_dir() or path.suffix in _RECIPE_SUFFIXES
        ]
    except OSError:  # a folder that cannot be read completes to nothing
        return ()
    hidden = () if incomplete.startswith(".") else (".",)
    return [
        name
        for name in shown
        if name.startswith(incomplete) and not name.startswith(hidden) and shlex.quote(name) == name
    ]


def _complete_device(incomplete: str) -> list[str]:
    devices = {entry.device for _, entry in kernel_specs().values()}
    return sorted(device for device in devices if device.startswith(incomplete))


def trusted_kernels(options: Sequence[str] | None) -> dict[str, str]:
    """The values of `--trust-kernel` as package ID to digest.

    Raises:
        UsageError: one is not of the form `ID=DIGEST`.
    """
    trusted = {}
    for option in options or ():
        kernel_id, _, digest = option.rpartition("=")
        if not kernel_id or _DIGEST.fullmatch(digest) is None:
            raise UsageError(
                f"--trust-kernel {option!r} is not ID=DIGEST",
                fix="write owner/repo:ClassName=sha256:..., 64 hex digits",
            )
        trusted[kernel_id] = digest
    return trusted


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a shipped recipe such as qwen3.",
        autocompletion=complete_recipe,
    ),
]
ModelDir = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR",
        help="The checkpoint: a folder with config.json and safetensors.",
        autocompletion=complete_path,
    ),
]
KernelDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Only kernels of this device: cpu, cuda, npu.",
        autocompletion=_complete_device,
    ),
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
TrustKernel = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-kernel",
        metavar="ID=DIGEST",
        help="Run just this kernel package, with just this digest; may be given several times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]
