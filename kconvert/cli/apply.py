"""`kconvert apply`: convert a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, ModelDir, NoModelCheck, RecipeName, TrustRemoteCode
from kconvert.cli.output import foreign_output_apart, format_bytes, note, print_json, print_text, warn
from kconvert.cli.plan import show_plan
from kconvert.convert import ApplyResult, Prepared, apply_recipe, default_output, prepare
from kconvert.rewrite import Job, check_output

__all__ = ["apply_command"]


def apply_command(
    recipe: RecipeName,
    model_dir: ModelDir,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write.  [default: MODEL_DIR-kconvert; required in a Hub cache]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that kconvert wrote.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; write nothing.")
    ] = False,
    no_model_check: NoModelCheck = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint; the source is not changed."""
    if not no_model_check:
        prepare_torch()
    if dry_run:
        target = output if output is not None else default_output(model_dir)
        check_output(target, source=model_dir, overwrite=overwrite)
        with foreign_output_apart():
            prepared = prepare(recipe, model_dir, model_check=not no_model_check, trust_remote_code=trust_remote_code)
        show_plan(prepared, as_json=json)
        return
    with foreign_output_apart():
        result = apply_recipe(
            recipe,
            model_dir,
            output,
            overwrite=overwrite,
            model_check=not no_model_check,
            trust_remote_code=trust_remote_code,
            on_prepared=_announce,
        )
    if json:
        print_json(_result_value(result))
        return
    note(
        f"kconvert: {format_bytes(result.bytes_copied)} copied, {format_bytes(result.bytes_transformed)} packed, "
        f"in {result.total_seconds:.1f} s (check {result.check_seconds:.1f}, copy {result.copy_seconds:.1f}, "
        f"sync {result.sync_seconds:.1f}), peak memory {format_bytes(result.peak_rss_bytes)}"
    )
    note(f"kconvert: load it with kconvert.load_converted({str(result.output)!r})")
    print_text(str(result.output))


def _announce(prepared: Prepared, job: Job) -> None:
    for message in prepared.warnings:
        warn(message)
    if prepared.manifest.carried:
        warn(
            f"{len(prepared.manifest.carried)} tensors have no place in the model and are carried along, e.g. {prepared.manifest.carried[0]}"
        )
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
