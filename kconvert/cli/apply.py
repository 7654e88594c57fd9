"""`kconvert apply`: convert a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import (
    Json,
    ModelDir,
    NoModelCheck,
    RecipeName,
    TrustKernel,
    TrustRemoteCode,
    complete_path,
    trusted_kernels,
)
from kconvert.cli.output import foreign_output_apart, format_bytes, note, print_json, print_text, warn
from kconvert.cli.plan import checking, show_plan
from kconvert.cli.progress import Progress
from kconvert.cli.summary import print_summary
from kconvert.convert import ApplyResult, Prepared, apply_recipe, default_output, prepare
from kconvert.rewrite import Job, check_output

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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that kconvert wrote; nothing else is ever replaced.")
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

    Everything is checked before the first byte is written, and OUTPUT gets its name when it is whole: an interrupted
    run leaves nothing there.  stdout gets the path of the output (with --json, the figures); progress and the
    summary go to stderr.

    Example: kconvert apply qwen3 my-model -o my-model-packed
    """
    trust_kernels = trusted_kernels(trust_kernel)
    if not no_model_check:
        prepare_torch()
    if dry_run:
        target = output if output is not None else default_output(model_dir)
        check_output(target, source=model_dir, overwrite=overwrite)
        with Progress(checking(recipe, model_dir), quiet=quiet), foreign_output_apart(quiet=quiet):
            prepared = prepare(
                recipe,
                model_dir,
                model_check=not no_model_check,
                trust_remote_code=trust_remote_code,
                trust_kernels=trust_kernels,
            )
        show_plan(prepared, as_json=json)
        return
    with Progress(checking(recipe, model_dir), quiet=quiet) as progress, foreign_output_apart(quiet=quiet):

        def prepared_to_write(prepared: Prepared, job: Job) -> None:
            _announce(prepared, job, quiet=quiet)
            progress.writing(job.size_bytes, final_bytes=sum(len(data) for _, data in job.final))

        result = apply_recipe(
            recipe,
            model_dir,
            output,
            overwrite=overwrite,
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
        "copy_seconds": result.copy_seconds,
        "sync_seconds": result.sync_seconds,
        "check_seconds": result.check_seconds,
        "total_seconds": result.total_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "modules": len(result.prepared.plan.claims),
        "weight_files": list(manifest.weight_files),
        "sidecars": list(manifest.sidecars),
        "carried": list(manifest.carried),
        "omitted": [{"name": item.name, "reason": item.reason} for item in manifest.omitted],
        "warnings": list(result.prepared.warnings),
    }
