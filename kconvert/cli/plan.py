"""`kconvert plan`: what `apply` would do, with what every pattern matched."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, ModelDir, NoModelCheck, RecipeName, TrustKernel, TrustRemoteCode, trusted_kernels
from kconvert.cli.output import (
    NO_PATCHES,
    command_lines,
    foreign_output_apart,
    format_bytes,
    make_console,
    print_json,
    print_table,
    print_text,
    printable,
    shell_quote,
    warn,
)
from kconvert.cli.progress import Progress
from kconvert.convert import Prepared, default_output, prepare
from kconvert.errors import UsageError
from kconvert.names import starred
from kconvert.patterns import braced
from kconvert.plan import explain_plan

__all__ = ["checking", "plan_command", "plan_value", "show_plan"]


def plan_command(
    recipe: RecipeName,
    model_dir: ModelDir,
    no_model_check: NoModelCheck = False,
    trust_remote_code: TrustRemoteCode = False,
    trust_kernel: TrustKernel = None,
    json: Json = False,
) -> None:
    """Show what `apply` would do; writes nothing."""
    trust_kernels = trusted_kernels(trust_kernel)
    if not no_model_check:
        prepare_torch()
    with Progress(checking(recipe, model_dir)), foreign_output_apart():
        prepared = prepare(
            recipe,
            model_dir,
            model_check=not no_model_check,
            trust_remote_code=trust_remote_code,
            trust_kernels=trust_kernels,
        )
    show_plan(prepared, as_json=json)
    if not json:
        _print_next(recipe, model_dir, prepared)


def checking(recipe: str, model_dir: Path) -> str:
    """What is shown while a conversion is prepared."""
    return f"checking {printable(model_dir.name or str(model_dir))} for recipe {printable(recipe)}"


def _print_next(recipe: str, model_dir: Path, prepared: Prepared) -> None:
    """The command that does what was shown; where `apply` has no output of its own to choose, one is to be named."""
    command = [f"kconvert apply {shell_quote(recipe)}", shell_quote(str(model_dir))]
    try:
        default_output(model_dir)
    except UsageError:
        command.append("-o OUTPUT")
    if not prepared.manifest.model_checked:
        command.append("--no-model-check")
    if any(package.needs_trust for package in prepared.resolved.packages.values()):
        command.append("--trust-remote-code")
    print_text("")
    print_text("Convert it")
    for line in command_lines(command, make_console(sys.stdout).width):
        print_text(line)


def show_plan(prepared: Prepared, *, as_json: bool) -> None:
    """Print a prepared conversion."""
    for message in prepared.warnings:
        warn(message)
    value = plan_value(prepared)
    if as_json:
        print_json(value)
        return
    if value["patches"]:
        rows = _patch_rows(value)
        print_table("Patches", ("path", "class", "layout", "modules"), rows, right=("modules",), names="path")
        print_text("Matched")
        for line in _trace_lines(value):
            print_text(f"  {line}")
    else:
        print_text(f"Patches: {NO_PATCHES}")
    print_text("")
    print_text("Tensors")
    for line in _tensor_lines(value):
        print_text(f"  {line}")
    print_text("")
    files = [(file["name"], str(file["tensors"]), format_bytes(file["bytes"])) for file in value["files"]]
    print_table("Output", ("file", "tensors", "size"), files, right=("tensors", "size"))
    copied, transformed = value["bytes_copied"], value["bytes_transformed"]
    print_text(f"{format_bytes(copied)} copied as they are, {format_bytes(transformed)} packed")
    if value["carried"]:
        print_text(f"carried along without a place in the model: {', '.join(value['carried'])}")
    for item in value["omitted"]:
        print_text(f"left out: {item['name']} ({item['reason']})")


def plan_value(prepared: Prepared) -> dict[str, Any]:
    """The plan as plain data, with what is carried, copied and left out."""
    manifest = prepared.manifest
    return {
        **explain_plan(prepared.plan),
        "model_checked": manifest.model_checked,
        "carried": list(manifest.carried),
        "sidecars": list(manifest.sidecars),
        "omitted": [{"name": item.name, "reason": item.reason} for item in manifest.omitted],
        "warnings": list(prepared.warnings),
    }


def _patch_rows(value: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (pattern["path"], pattern["class"], patch["layout"], str(len(pattern["matched"])))
        for patch in value["patches"]
        for pattern in patch["patterns"]
    ]


def _trace_lines(value: dict[str, Any]) -> list[str]:
    """For each patch its place in the recipe and its kernels, then every module that each pattern took."""
    lines = []
    for patch in value["patches"]:
        lines.append(f"{Path(patch['where']).name}  {patch['layout']}")
        for pattern in patch["patterns"]:
            lines += [f"    {pattern['class']} at {path}" for path in braced(pattern["matched"])]
        lines += wrap(f"kernels: {', '.join(patch['kernels'])}", 76, initial_indent="    ", subsequent_indent="      ")
    return lines


def _tensor_lines(value: dict[str, Any]) -> list[str]:
    """Each kind of changed tensor, its shape and what it is made of; then what is copied as it is."""
    groups: dict[tuple[str, str, tuple[str, ...]], int] = {}
    same = 0
    for tensor in value["tensors"]:
        sources = [part["source"] for part in tensor["parts"]]
        if tensor["op"] == "copy" or (tensor["op"] == "rename" and sources == [tensor["target"]]):
            same += 1
            continue
        made_of = tuple(dict.fromkeys(_origin_text(origin, tensor["dtype"]) for origin in tensor["origins"]))
        form = f"{tensor['dtype']} {tensor['shape']}"
        if tensor["op"] not in ("rename", "concatenate(0)"):  # the two that the lines below show
            form += f"  {tensor['op']}"
        key = (starred(tensor["target"]), form, made_of)
        groups[key] = groups.get(key, 0) + 1
    lines = []
    for (target, shape, made_of), count in groups.items():
        lines += [f"{count} x {target}", f"      {shape}"]
        lines += [f"      {'+' if number else '='} {name}" for number, name in enumerate(made_of)]
    return [*lines, f"{same} others, as they are"]


def _origin_text(origin: dict[str, Any], dtype: str) -> str:
    name = starred(origin["name"])
    return name if origin["dtype"] == dtype else f"{name}, {origin['dtype']} as {dtype}"
