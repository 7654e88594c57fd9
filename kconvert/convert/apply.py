"""`apply`: write what was prepared."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kconvert.checkpoint import DTYPE_BITS, build_header, build_index, is_inside_hub_cache
from kconvert.convert.prepare import Prepared, prepare
from kconvert.errors import UsageError
from kconvert.names import CONFIG_NAME, INDEX_NAME, KERNELS_DIR, MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from kconvert.plan import OutputShard, Step
from kconvert.rewrite import Cast, Computed, Copy, Extent, Gather, GatherPiece, Job, OutputFile, check_output, rewrite
from kconvert.transforms import Piece, runs_of

__all__ = ["ApplyResult", "apply_recipe", "default_output"]

_SHORT_RUN_BYTES = 64 << 10
"""Runs shorter than this are gathered in memory: a system call for each would cost more."""


@dataclass(frozen=True)
class ApplyResult:
    """What an `apply` did.  Sizes in bytes, times in seconds."""

    output: Path
    bytes_copied: int
    bytes_transformed: int
    copy_seconds: float
    sync_seconds: float
    check_seconds: float
    total_seconds: float
    peak_rss_bytes: int
    prepared: Prepared


def default_output(model_dir: Path) -> Path:
    """`<model_dir>-kconvert`, beside the source.

    Raises:
        UsageError: the source lies in a Hub cache, where nothing else may be put.
    """
    if is_inside_hub_cache(model_dir):
        raise UsageError(f"{model_dir} lies in a Hub cache", fix="say where to write with -o OUTPUT")
    absolute = Path(os.path.abspath(model_dir))  # noqa: PTH100 - `..` goes, links stay
    return absolute.with_name(f"{absolute.name}-kconvert")


def apply_recipe(
    recipe_name: str,
    model_dir: Path,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    model_check: bool = True,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    on_prepared: Callable[[Prepared, Job], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ApplyResult:
    """Convert a checkpoint.

    Args:
        recipe_name: a recipe file, or the name of a shipped recipe.
        model_dir: the source checkpoint; it is not changed.
        output: where to write; `<model_dir>-kconvert` if left out.
        overwrite: replace an output that kconvert wrote.
        model_check: see `prepare`.
        trust_remote_code, trust_kernels: see `prepare`.
        on_prepared: called once everything is checked, with what will be written.
        on_progress: called with the number of bytes just written.

    Raises:
        KconvertError: of the kind that says what was wrong; nothing is left under the output name.
    """
    started = time.perf_counter()
    target = output if output is not None else default_output(model_dir)
    check_output(target, source=model_dir, overwrite=overwrite)
    prepared = prepare(
        recipe_name,
        model_dir,
        model_check=model_check,
        trust_remote_code=trust_remote_code,
        trust_kernels=trust_kernels,
    )
    job = build_job(prepared)
    if on_prepared is not None:
        on_prepared(prepared, job)
    result = rewrite(job, target, overwrite=overwrite, on_progress=on_progress)
    return ApplyResult(
        output=result.output,
        bytes_copied=prepared.plan.bytes_copied,
        bytes_transformed=prepared.plan.bytes_transformed,
        copy_seconds=result.copy_seconds,
        sync_seconds=result.sync_seconds,
        check_seconds=prepared.check_seconds,
        total_seconds=time.perf_counter() - started,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        prepared=prepared,
    )


def build_job(prepared: Prepared) -> Job:
    """Output files as extents, sidecars and packages as copies; index, source headers and manifest last."""
    paths = {file.name: file.path for file in prepared.checkpoint.files}
    files = tuple(_output_file(shard, paths) for shard in prepared.plan.shards)
    copies = [
        Copy(item.name, item.path, item.size_bytes) for item in prepared.sidecars.copied if item.name != CONFIG_NAME
    ]
    packages = {package.copy.digest: package.copy for package in prepared.resolved.packages.values()}
    for package in packages.values():
        for name in package.files:
            path = package.path / name
            copies.append(Copy(f"{KERNELS_DIR}/{package.folder}/{name}", path, path.stat().st_size))
    final = [(CONFIG_NAME, prepared.checkpoint.config_bytes)]  # what was checked, whatever the file holds by now
    final += [(SOURCE_HEADERS_NAME, prepared.headers), (MANIFEST_NAME, prepared.manifest.to_bytes())]
    if [file.name for file in files] != [SINGLE_NAME]:
        weight_map = {step.target: shard.name for shard in prepared.plan.shards for step in shard.steps}
        total = sum(step.size_bytes for step in prepared.plan.steps)
        final.insert(1, (INDEX_NAME, build_index(weight_map, total).encode()))
    stamps = {file.path: file.stamp for file in prepared.checkpoint.files}
    return Job(files, tuple(copies), tuple(final), stamps)


def _output_file(shard: OutputShard, paths: dict[str, Path]) -> OutputFile:
    header = build_header(
        [(step.target, step.dtype, step.shape, step.size_bytes) for step in shard.steps], {"format": "pt"}
    )
    return OutputFile(shard.name, header, tuple(extent for step in shard.steps for extent in _extents(step, paths)))


def _is_scattered(piece: Piece, item_bytes: int) -> bool:
    """Whether a piece is many short runs."""
    return piece.run_size < piece.size and piece.run_size * item_bytes < _SHORT_RUN_BYTES


def _extents(step: Step, paths: Mapping[str, Path]) -> Iterator[Extent | Gather | Computed]:
    """The bytes of a step: runs one after another, or gathered where these are short."""
    if step.computed is not None:
        yield Computed(step.target, step.size_bytes, step.computed.make)
        return
    origins = {origin.name: origin for origin in step.origins}
    casts = {
        name: Cast(origin.dtype, step.dtype) if origin.dtype != step.dtype else None for name, origin in origins.items()
    }
    bits = DTYPE_BITS[step.dtype]
    if bits >= 8 and any(_is_scattered(piece, bits // 8) for piece in step.stored.pieces):
        yield Gather(
            step.stored.size,
            bits // 8,
            tuple(
                GatherPiece(paths[origins[piece.source].file], origins[piece.source].offset, piece, casts[piece.source])
                for piece in step.stored.pieces
            ),
        )
        return
    for run in runs_of(step.stored.pieces):
        origin = origins[run.source]
        start, size = (count * DTYPE_BITS[origin.dtype] // 8 for count in (run.source_start, run.size))
        yield Extent(paths[origin.file], origin.offset + start, size, casts[run.source])
