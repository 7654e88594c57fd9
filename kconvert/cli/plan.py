"""`kconvert plan`: what `apply` would do, with what every pattern matched."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from kconvert.checkpoint import SourceTensor
from kconvert.cli.backends import prepare_torch
from kconvert.cli.devices import devices_text, devices_value, left_out_texts
from kconvert.cli.options import (
    Json,
    MaxShardSize,
    ModelDir,
    NoModelCheck,
    RecipeName,
    TargetDevice,
    TrustKernel,
    TrustRemoteCode,
    max_shard_bytes,
    trusted_kernels,
)
from kconvert.cli.output import (
    NO_PATCHES,
    command_lines,
    foreign_output_apart,
    format_bytes,
    make_console,
    print_folded,
    print_json,
    print_table,
    print_text,
    printable,
    shell_quote,
    warn,
)
from kconvert.cli.progress import Progress
from kconvert.convert import Expected, Prepared, default_output, expect, prepare
from kconvert.errors import UsageError
from kconvert.garbage import collector_stopped
from kconvert.names import starred
from kconvert.patterns import braced
from kconvert.plan import COPY, Plan, Step, explain_files, explain_patches, explain_plan

__all__ = ["checking", "plan_command", "plan_value", "show_plan"]

_MAX_FILES = 24
"""The most files that are listed for people."""


def plan_command(
    recipe: RecipeName,
    model_dir: ModelDir,
    device: TargetDevice = None,
    max_shard_size: MaxShardSize = None,
    no_model_check: NoModelCheck = False,
    trust_remote_code: TrustRemoteCode = False,
    trust_kernel: TrustKernel = None,
    json: Json = False,
) -> None:
    """Show what `apply` would do; writes nothing."""
    trust_kernels = trusted_kernels(trust_kernel)
    shard_bytes = max_shard_bytes(max_shard_size)
    if not no_model_check:
        prepare_torch()
    with collector_stopped():
        with Progress(checking(recipe, model_dir)), foreign_output_apart():
            prepared = prepare(
                recipe,
                model_dir,
                device=device,
                model_check=not no_model_check,
                max_shard_bytes=shard_bytes,
                trust_remote_code=trust_remote_code,
                trust_kernels=trust_kernels,
            )
        show_plan(prepared, as_json=json)
        if not json:
            _print_next(recipe, model_dir, prepared, max_shard_size)


def checking(recipe: str, model_dir: Path) -> str:
    """What is shown while a conversion is prepared."""
    return f"checking {printable(model_dir.name or str(model_dir))} for recipe {printable(recipe)}"


def _print_next(recipe: str, model_dir: Path, prepared: Prepared, max_shard_size: str | None) -> None:
    """The command that does what was shown; where `apply` has no output of its own to choose, one is to be named."""
    command = [f"kconvert apply {shell_quote(recipe)}", shell_quote(str(model_dir))]
    try:
        default_output(model_dir)
    except UsageError:
        command.append("-o OUTPUT")
    if prepared.opened.profile.device is not None:
        command.append(f"--device {prepared.opened.profile.device}")
    if max_shard_size is not None:
        command.append(f"--max-shard-size {shell_quote(max_shard_size)}")
    if not prepared.manifest_of(()).model_checked:
        command.append("--no-model-check")
    if any(package.needs_trust for package in prepared.resolved.packages.values()):
        command.append("--trust-remote-code")
    print_text("")
    print_text("Convert it")
    for line in command_lines(command, make_console(sys.stdout).width):
        print_text(line)


def show_plan(prepared: Prepared, *, digests: bool = False, as_json: bool) -> None:
    """Print a prepared conversion, with `digests` in its manifest or none."""
    for message in prepared.warnings:
        warn(message)
    expected = expect(prepared, digests=digests)
    if as_json:
        print_json(plan_value(prepared, expected))
        return
    plan, manifest = prepared.plan, prepared.manifest_of(())
    patches = explain_patches(plan)
    if patches:
        rows = _patch_rows(patches)
        print_table("Patches", ("path", "class", "layout", "modules"), rows, right=("modules",), names="path")
        print_text("Matched")
        for line in _trace_lines(patches):
            print_text(f"  {line}")
    else:
        print_text(f"Patches: {NO_PATCHES}")
    for text in left_out_texts(prepared.opened.profile):
        print_folded(f"left out: {text}", hang=2)
    print_text("")
    print_text("Tensors")
    for line in _tensor_lines(plan.steps):
        print_text(f"  {line}")
    print_text("")
    print_table("Output", ("file", "tensors", "size"), _file_rows(plan), right=("tensors", "size"))
    print_text(f"{format_bytes(plan.bytes_copied)} copied as they are, {format_bytes(plan.bytes_transformed)} packed")
    unchanged = sum(shard.same_as is not None for shard in plan.shards)
    if unchanged:
        print_text(f"{unchanged} of {len(plan.shards)} weight files are as in the source")
    print_text(f"{format_bytes(expected.size_bytes)} on the disk, in {expected.num_files} files with all others")
    memory = format_bytes(expected.memory_bytes)
    print_text(f"at most {memory} of memory for the rewrite, beside Python and its libraries")
    print_folded(f"for {devices_text(manifest.devices, manifest.view_devices)}", hang=2)
    if manifest.carried:
        print_folded(f"carried along without a place in the model: {', '.join(manifest.carried)}", hang=2)
    for item in manifest.omitted:
        print_folded(f"left out: {item.name} ({item.reason})", hang=2)


def plan_value(prepared: Prepared, expected: Expected) -> dict[str, Any]:
    """The plan as plain data, with what is carried, copied and left out, and what it will take."""
    manifest = prepared.manifest_of(())
    return {
        **explain_plan(prepared.plan),
        "expected": {
            "bytes": expected.size_bytes,
            "files": expected.num_files,
            "memory_bytes": expected.memory_bytes,
        },
        **devices_value(manifest, prepared.opened.profile),
        "model_checked": manifest.model_checked,
        "carried": list(manifest.carried),
        "sidecars": list(manifest.sidecars),
        "omitted": [{"name": item.name, "reason": item.reason} for item in manifest.omitted],
        "warnings": list(prepared.warnings),
    }


def _patch_rows(patches: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (pattern["path"], pattern["class"], patch["layout"], str(len(pattern["matched"])))
        for patch in patches
        for pattern in patch["patterns"]
    ]


def _file_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """The output files; of very many the first and the last ones."""
    rows = [(file["name"], str(file["tensors"]), format_bytes(file["bytes"])) for file in explain_files(plan)]
    if len(rows) <= _MAX_FILES:
        return rows
    left_out = rows[_MAX_FILES // 2 : -_MAX_FILES // 2]
    tensors = sum(len(shard.steps) for shard in plan.shards[_MAX_FILES // 2 : -_MAX_FILES // 2])
    return [
        *rows[: _MAX_FILES // 2],
        (f"... and {len(left_out)} more ...", str(tensors), ""),
        *rows[-_MAX_FILES // 2 :],
    ]


def _trace_lines(patches: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each patch its place in the recipe and its kernels, then every module that each pattern took."""
    lines = []
    for patch in patches:
        lines.append(f"{Path(patch['where']).name}  {patch['layout']}")
        for pattern in patch["patterns"]:
            lines += [f"    {pattern['class']} at {path}" for path in braced(pattern["matched"])]
        lines += wrap(f"kernels: {', '.join(patch['kernels'])}", 76, initial_indent="    ", subsequent_indent="      ")
    return lines


def _tensor_lines(steps: Sequence[Step]) -> list[str]:
    """Each kind of changed tensor, its shape and what it is made of; then what is copied as it is."""
    groups: dict[tuple[str, str, tuple[str, ...]], int] = {}
    same = 0
    for step in steps:
        if step.op == COPY or (step.op == "rename" and step.parts[0].source == step.target):
            same += 1
            continue
        made_of = tuple(dict.fromkeys(_origin_text(origin, step.dtype) for origin in step.origins))
        form = f"{step.dtype} {list(step.shape)}"
        if step.op not in ("rename", "concatenate(0)"):  # the two that the lines below show
            form += f"  {step.op}"
        key = (starred(step.target), form, made_of)
        groups[key] = groups.get(key, 0) + 1
    lines = []
    for (target, shape, made_of), count in groups.items():
        lines += [f"{count} x {target}", f"      {shape}"]
        lines += [f"      {'+' if number else '='} {name}" for number, name in enumerate(made_of)]
    return [*lines, f"{same} others, as they are"]


def _origin_text(origin: SourceTensor, dtype: str) -> str:
    name = starred(origin.name)
    return name if origin.dtype == dtype else f"{name}, {origin.dtype} as {dtype}"
