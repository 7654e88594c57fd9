"""Arguments and options that several commands share, and how a shell completes their values.

Completing imports no torch and reads no file: names of shipped recipes, names in a folder, device types.  Where
nothing is offered the shell completes file names itself, and does that better than a list can, so nothing is
offered for paths.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from kconvert.errors import UsageError
from kconvert.kernels.specs import kernel_specs
from kconvert.recipe import shipped_recipes

__all__ = [
    "Json",
    "KernelDevice",
    "MaxShardSize",
    "ModelDir",
    "NoModelCheck",
    "NoResume",
    "RecipeName",
    "TargetDevice",
    "TrustKernel",
    "TrustRemoteCode",
    "complete_path",
    "complete_recipe",
    "max_shard_bytes",
    "trusted_kernels",
]

_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{64}")
_RECIPE_SUFFIXES = (".yaml", ".yml")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?i?b)?", re.ASCII | re.IGNORECASE)
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


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


def max_shard_bytes(option: str | None) -> int | None:
    """The value of `--max-shard-size` in bytes: `5GB` is 5 * 10**9, `2GiB` is 2 * 2**30, as transformers reads them.

    Raises:
        UsageError: no size, a size below one byte, or one in bits (`5Gb`).
    """
    if option is None:
        return None
    found = _SIZE.fullmatch(option.strip())
    unit = (found[2] or "") if found is not None else ""
    is_bits = unit.endswith("b") and not unit.islower()
    if found is None or unit.lower() not in _UNIT_BYTES or is_bits:
        raise UsageError(
            f"--max-shard-size {option!r} is no size{' in bytes' if is_bits else ''}",
            fix="write 5GB (10**9 bytes), 2GiB (2**30), 500MB or a number of bytes",
        )
    size = int(Decimal(found[1]) * _UNIT_BYTES[unit.lower()])
    if size < 1:
        raise UsageError(f"--max-shard-size {option!r} is less than one byte", fix="write a size such as 5GB")
    return size


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
TargetDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Use the recipe's entries for this device too: cpu, cuda, npu.  [default: only those for all devices]",
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
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="The most tensor data in one output file, such as 5GB or 2GiB.  [default: as the source is sharded]",
    ),
]
NoResume = Annotated[
    bool,
    typer.Option("--no-resume", help="Start afresh where an earlier run was stopped, instead of going on from there."),
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
