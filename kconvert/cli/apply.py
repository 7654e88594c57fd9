"""`kconvert apply`: convert a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.devices import devices_value
from kconvert.cli.options import (
    Json,
    MaxShardSize,
    ModelDir,
    NoModelCheck,
    NoResume,
    RecipeName,
    TargetDevice,
    TrustKernel,
    TrustRemoteCode,
    complete_path,
    max_shard_bytes,
    trusted_kernels,
)
from kconvert.cli.output import (
    foreign_output_apart,
    format_bytes,
    note,
    print_json,
    print_text,
    warn,
    what_is_kept,
)
from kconvert.cli.plan import checking, show_plan
from kconvert.cli.progress import Progress
from kconvert.cli.summary import print_summary
from kconvert.convert import ApplyResult, Options, Prepared, apply_recipe, default_output, prepare
from kconvert.errors import UsageError
from kconvert.rewrite import REUSES, Job, Reuse, check_output

__all__ = ["apply_command"]


def apply_command(
    recipe: RecipeName,
    model_dir: ModelDir,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUTPUT",
            help="The folder to write.  [default: MODEL_DIR-kconvert; required in a Hub cache]",
            autocompletion=complete_path,
        ),
    ] = None,
    device: TargetDevice = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that kconvert wrote; nothing else is ever replaced.")
    ] = False,
    no_resume: NoResume = False,
    reuse: Annotated[
        str,
        typer.Option(
            "--reuse",
            metavar="|".join(REUSES),
            help="How weight files that do not change come about: copied, or linked to the source's file.  A hard link is "
            "that very file: writing into one changes both.",
            autocompletion=_complete_reuse,
        ),
    ] = "copy",
    max_shard_size: MaxShardSize = None,
    digests: Annotated[
        bool,
        typer.Option(
            "--digests",
            help="Keep the sha256 of every tensor in the manifest, so that `verify --level bytes` needs no source.  Slower: "
            "the weights go through memory.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; write nothing.")
    ] = False,
    no_model_check: NoModelCheck = False,
    trust_remote_code: TrustRemoteCode = False,
    trust_kernel: TrustKernel = None,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="No progress and no summary: only warnings and errors on stderr.")
    ] = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint; the source is not changed.

    OUTPUT gets its name when everything is checked and on the disk: an interrupted run leaves nothing there.  What it had
    finished is kept in OUTPUT.partial, and the same command goes on from it.  stdout gets the path of the output (with
    --json, the figures); progress and the summary go to stderr.

    Example: kconvert apply qwen3 my-model -o my-model-packed
    """
    trust_kernels = trusted_kernels(trust_kernel)
    options = Options(
        overwrite=overwrite,
        resume=not no_resume,
        reuse=_reuse(reuse),
        digests=digests,
        max_shard_bytes=max_shard_bytes(max_shard_size),
    )
    if not no_model_check:
        prepare_torch()
    if dry_run:
        target = output if output is not None else default_output(model_dir)
        check_output(target, source=model_dir, overwrite=overwrite)
        with Progress(checking(recipe, model_dir), quiet=quiet), foreign_output_apart(quiet=quiet):
            prepared = prepare(
                recipe,
                model_dir,
                device=device,
                model_check=not no_model_check,
                max_shard_bytes=options.max_shard_bytes,
                trust_remote_code=trust_remote_code,
                trust_kernels=trust_kernels,
            )
        show_plan(prepared, digests=digests, as_json=json)
        return
    with (
        what_is_kept(),
        Progress(checking(recipe, model_dir), quiet=quiet) as progress,
        foreign_output_apart(quiet=quiet),
    ):

        def prepared_to_write(prepared: Prepared, job: Job) -> None:
            _announce(prepared, job, quiet=quiet)
            progress.writing(job.size_bytes)

        result = apply_recipe(
            recipe,
            model_dir,
            output,
            device=device,
            options=options,
            model_check=not no_model_check,
            trust_remote_code=trust_remote_code,
            trust_kernels=trust_kernels,
            on_prepared=prepared_to_write,
            on_progress=progress.advance,
        )
    if json:
        print_json(_result_value(result))
        return
    if not quiet:
        print_summary(result, model_dir)
    print_text(str(result.output))


def _complete_reuse(incomplete: str) -> list[str]:
    return [name for name in REUSES if name.startswith(incomplete)]


def _reuse(option: str) -> Reuse:
    for name in REUSES:
        if name == option:
            return name
    raise UsageError(f"--reuse {option!r} is unknown", fix=f"one of {', '.join(REUSES)}")


def _announce(prepared: Prepared, job: Job, *, quiet: bool) -> None:
    for message in prepared.warnings:
        warn(message)
    carried = prepared.manifest.carried
    if carried:
        warn(f"{len(carried)} tensors have no place in the model and are carried along, e.g. {carried[0]}")
    if not quiet:
        modules, size = len(prepared.plan.claims), format_bytes(job.size_bytes)
        note(f"kconvert: recipe {prepared.recipe.name} patches {modules} modules; {size} to write")


def _result_value(result: ApplyResult) -> dict[str, Any]:
    manifest = result.prepared.manifest
    return {
        "output": str(result.output),
        "bytes_copied": result.bytes_copied,
        "bytes_transformed": result.bytes_transformed,
        "bytes_resumed": result.bytes_resumed,
        "bytes_linked": result.bytes_linked,
        "copy_seconds": result.copy_seconds,
        "sync_seconds": result.sync_seconds,
        "check_seconds": result.check_seconds,
        "total_seconds": result.total_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "modules": len(result.prepared.plan.claims),
        **devices_value(manifest, result.prepared.opened.profile),
        "weight_files": list(manifest.weight_files),
        "sidecars": list(manifest.sidecars),
        "digests": result.digested,
        "carried": list(manifest.carried),
        "omitted": [{"name": item.name, "reason": item.reason} for item in manifest.omitted],
        "warnings": list(result.prepared.warnings),
    }
