"""What a plan writes, as runs of bytes: the data files at once, what describes them when everything is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kconvert import __version__
from kconvert.checkpoint import Checkpoint, SourceFile, build_header, build_index
from kconvert.convert.prepare import Opened, Prepared
from kconvert.garbage import collector_stopped
from kconvert.manifest import canonical_json, sha256_digest
from kconvert.names import CONFIG_NAME, INDEX_NAME, KERNELS_DIR, MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from kconvert.plan import OutputShard, Plan, Step
from kconvert.rewrite import Computed, Copy, Digested, Extent, Gather, Job, OutputFile, Part, Place, extents_of

if TYPE_CHECKING:
    from kconvert.kernels.packages import PackageCopy

__all__ = ["build_job", "copies_of", "final_items", "header_of", "identity_of"]


@collector_stopped()
def build_job(opened: Opened, plan: Plan, *, digests: bool = False, options: Mapping[str, str] | None = None) -> Job:
    """Output files as extents, sidecars and packages as copies; `final_items` gives the rest.

    Args:
        opened: the source.
        plan: how it is converted.
        digests: take the sha256 of every tensor while it is written.
        options: by name, what else the result depends on: a run that was stopped is gone on with only under the same.
    """
    checkpoint = opened.checkpoint
    paths = {file.name: file.path for file in checkpoint.files}
    files = tuple(_output_file(shard, checkpoint, paths, digests=digests) for shard in plan.shards)
    stamps = {file.path: file.stamp for file in checkpoint.files} | dict(opened.sidecar_stamps)
    identity = {
        **identity_of(files, checkpoint.files),
        "the recipe": sha256_digest(opened.recipe.text.encode()),
        "config.json": sha256_digest(checkpoint.config_bytes),
        "the other files": sha256_digest(canonical_json(dict(opened.sidecar_digests))),
        "the kernel packages": " ".join(sorted(_packages(opened))),
        **(options or {}),
    }
    return Job(files, copies_of(opened), stamps=stamps, identity=identity)


def copies_of(opened: Opened) -> tuple[Copy, ...]:
    """The sidecars, and the files of the recipe's packages."""
    copies = [
        Copy(item.name, item.path, item.size_bytes) for item in opened.sidecars.copied if item.name != CONFIG_NAME
    ]
    for package in _packages(opened).values():
        for name in package.files:
            path = package.path / name
            copies.append(Copy(f"{KERNELS_DIR}/{package.folder}/{name}", path, path.stat().st_size))
    return tuple(copies)


def _packages(opened: Opened) -> dict[str, PackageCopy]:
    """The recipe's packages by their digests."""
    return {package.copy.digest: package.copy for package in opened.resolved.packages.values()}


@collector_stopped()
def final_items(prepared: Prepared, digests: Mapping[str, str]) -> tuple[tuple[str, bytes], ...]:
    """Config, index, source headers, and the manifest last; `digests` of its tensors, or none."""
    plan, checkpoint = prepared.plan, prepared.checkpoint
    manifest = replace(prepared.manifest, digests=dict(digests)) if digests else prepared.manifest
    items = [(CONFIG_NAME, checkpoint.config_bytes)]  # what was checked, whatever the file holds by now
    if [shard.name for shard in plan.shards] != [SINGLE_NAME]:
        weight_map = {step.target: shard.name for shard in plan.shards for step in shard.steps}
        items.append((INDEX_NAME, build_index(weight_map, sum(step.size_bytes for step in plan.steps)).encode()))
    return (*items, (SOURCE_HEADERS_NAME, prepared.headers), (MANIFEST_NAME, manifest.to_bytes()))


def identity_of(files: Iterable[OutputFile], sources: Sequence[SourceFile]) -> dict[str, str]:
    """What tells a rewrite from others: this version, what is written, and the state of every file that is read.

    Args:
        files: what is written.
        sources: the files that they read.
    """
    states = {
        file.name: f"{file.stamp.size_bytes} bytes, {file.stamp.modified_ns}, inode {file.stamp.inode}, "
        f"{sha256_digest(file.header.raw)}"
        for file in sources
    }
    names = {file.path: file.name for file in sources}
    hasher = hashlib.sha256()
    for file in files:
        told = (file.name, hashlib.sha256(file.prefix).hexdigest(), tuple(_told(part, names) for part in file.extents))
        hasher.update(repr(told).encode())
    return {"the kconvert version": __version__, "the plan": hasher.hexdigest(), **states}


def _told(part: Part, names: Mapping[Path, str]) -> tuple[object, ...]:
    if isinstance(part, Extent):
        return names[part.path], part.offset, part.size_bytes, part.cast
    if isinstance(part, Gather):
        return part.size, part.item_bytes, tuple((names[e.path], e.offset, e.piece, e.cast) for e in part.pieces)
    if isinstance(part, Digested):
        return "digested", part.name, tuple(_told(each, names) for each in part.parts)
    return part.name, part.target_bytes


def _output_file(shard: OutputShard, checkpoint: Checkpoint, paths: Mapping[str, Path], *, digests: bool) -> OutputFile:
    made = ((step.target, _extents(step, paths)) for step in shard.steps)
    if digests:
        extents: tuple[Part, ...] = tuple(Digested(target, parts) for target, parts in made)
    else:
        extents = tuple(part for _, parts in made for part in parts)
    same_as = paths[shard.same_as] if shard.same_as is not None else None
    return OutputFile(shard.name, header_of(shard, checkpoint), extents, same_as)


def header_of(shard: OutputShard, checkpoint: Checkpoint) -> bytes:
    """The first bytes of an output file; of one that does not change, the source's.

    Raises:
        CheckpointError: a header beyond the format's limit.
    """
    if shard.same_as is not None:
        return next(file.header.prefix for file in checkpoint.files if file.name == shard.same_as)
    described = [(step.target, step.dtype, step.shape, step.size_bytes) for step in shard.steps]
    return build_header(described, {"format": "pt"})


def _extents(step: Step, paths: Mapping[str, Path]) -> tuple[Extent | Gather | Computed, ...]:
    if step.computed is not None:
        return (Computed(step.target, step.size_bytes, step.computed.make),)
    places = {origin.name: Place(paths[origin.file], origin.offset, origin.dtype) for origin in step.origins}
    return extents_of(step.stored, step.dtype, places)
