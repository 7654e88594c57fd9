"""A plan as the manifest that will stand beside its output, and the source's headers for `revert`."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kconvert import __version__
from kconvert.checkpoint import Checkpoint, FileStamp, Sidecars, SourceTensor, open_sidecar
from kconvert.errors import CheckpointError
from kconvert.garbage import collector_stopped
from kconvert.kernels.specs import layout_specs
from kconvert.manifest import (
    Manifest,
    OmittedRecord,
    OriginRecord,
    PartRecord,
    PatchRecord,
    SourceFileRecord,
    TensorRecord,
    sha256_digest,
)
from kconvert.names import CONFIG_NAME, DEVICES, SOURCE_HEADERS_NAME
from kconvert.plan import Part, Plan, Step
from kconvert.recipe import Profile
from kconvert.transforms import Arrangement

__all__ = [
    "SOURCE_HEADERS_BYTES",
    "build_manifest",
    "computed_warnings",
    "digest_of_sidecar",
    "rounding_warnings",
    "sidecar_digests",
    "source_headers",
]


SOURCE_HEADERS_BYTES = 512 << 20
"""The most that the source's headers and index may have, as `source_headers` keeps them, before they are compressed."""


def source_headers(checkpoint: Checkpoint) -> bytes:
    """The headers and index of the source's weight files, verbatim, as deterministic gzip.

    `{"files": {name: header}, "index": {"name": ..., "text": ...} or null}`; header text includes its padding.

    Raises:
        CheckpointError: more than `revert` reads.
    """
    index = None
    if checkpoint.index is not None:
        index = {"name": checkpoint.index_name, "text": checkpoint.index.raw}
    value = {"files": {file.name: file.header.raw.decode() for file in checkpoint.files}, "index": index}
    text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    if len(text) > SOURCE_HEADERS_BYTES:
        raise CheckpointError(
            f"headers and index have {len(text)} bytes, and {SOURCE_HEADERS_BYTES} are allowed",
            where=str(checkpoint.model_dir),
            fix="give its tensors shorter names",
        )
    return gzip.compress(text, compresslevel=6, mtime=0)


def transformers_version() -> str:
    """The version of the installed transformers."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"


def sidecar_digests(checkpoint: Checkpoint, sidecars: Sidecars) -> tuple[dict[str, str], dict[Path, FileStamp]]:
    """The digest of every file that is copied, by name, and by path the stamp of the file that has it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digests, stamps = {}, {}
    for item in sidecars.copied:
        if item.name == CONFIG_NAME:  # written as it was read
            digests[item.name] = sha256_digest(checkpoint.config_bytes)
            continue
        digests[item.name], stamps[item.path] = digest_of_sidecar(item.path, sidecars.roots)
    return digests, stamps


def digest_of_sidecar(path: Path, roots: tuple[str, ...]) -> tuple[str, FileStamp]:
    """The digest of a file that lies below one of `roots`, and the stamp of the file that has it.

    Raises:
        CheckpointError: it cannot be read, or lies elsewhere.
    """
    try:
        with open_sidecar(path, roots) as file:
            stamp = FileStamp.of(file.fileno())
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}", stamp
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


@collector_stopped()
def build_manifest(
    checkpoint: Checkpoint,
    profile: Profile,
    plan: Plan,
    sidecars: Sidecars,
    digests: Mapping[str, str],
    headers: bytes,
) -> Manifest:
    """The manifest of a plan, before the structural check has added what it learns; `digests` are the sidecars'."""
    return Manifest(
        kconvert_version=__version__,
        transformers_version=transformers_version(),
        model_type=plan.model_type,
        architecture=plan.architecture,
        config_digest=sha256_digest(checkpoint.config_bytes),
        recipe_name=profile.recipe.name,
        recipe_text=profile.recipe.text,
        device=profile.device,
        devices=profile.devices,
        view_devices=_view_devices(plan),
        model_checked=False,
        patches=_patches(plan),
        tensors=tuple(
            TensorRecord(
                target=step.target,
                dtype=step.dtype,
                shape=step.shape,
                op=step.op,
                patch=step.entry,
                parts=_parts(step, checkpoint.tensors),
                exact=step.computed is None,
            )
            for step in plan.steps
        ),
        carried=(),
        omitted=tuple(OmittedRecord(item.name, item.reason) for item in sidecars.omitted),
        sidecars=tuple(item.name for item in sidecars.copied),
        sidecar_digests=dict(digests),
        weight_files=tuple(shard.name for shard in plan.shards),
        source_files=tuple(
            SourceFileRecord(file.name, file.size_bytes, sha256_digest(file.header.raw)) for file in checkpoint.files
        ),
        source_headers=SOURCE_HEADERS_NAME,
        source_headers_digest=sha256_digest(headers),
        written_by="apply",
        digests=None,
    )


def _view_devices(plan: Plan) -> tuple[str, ...]:
    """Those whose kernels may read some of it through a view, by the layouts alone."""
    specs, used = layout_specs(), {claim.entry for claim in plan.claims}
    layouts = {entry.layout.name for entry in plan.entries if entry.number in used and entry.layout.package is None}
    found = {device for name in layouts & specs.keys() for device in specs[name].view_devices}
    return tuple(device for device in DEVICES if device in found)


def _parts(step: Step, tensors: Mapping[str, SourceTensor]) -> tuple[PartRecord, ...]:
    if step.computed is not None and not any(part.stored.pieces for part in step.parts):
        # computed while baking: of the files' tensors only the names are known
        (part,) = step.parts
        origins = (OriginRecord(each.name, each.file, each.dtype, each.shape, ()) for each in step.origins)
        return (PartRecord(part.source, part.shape, (), tuple(origins)),)
    pieces = _pieces_by_source(step.made)
    return tuple(
        PartRecord(part.source, part.shape, pieces.get(part.source, ()), _origins(part, tensors)) for part in step.parts
    )


def _origins(part: Part, tensors: Mapping[str, SourceTensor]) -> tuple[OriginRecord, ...]:
    found = []
    for name, pieces in _pieces_by_source(part.stored).items():
        tensor = tensors[name]
        found.append(OriginRecord(name, tensor.file, tensor.dtype, tensor.shape, pieces))
    return tuple(found)


def _pieces_by_source(made: Arrangement) -> dict[str, tuple[tuple[int, ...], ...]]:
    if len(made.pieces) == 1:
        return {made.pieces[0].source: (made.pieces[0].numbers(),)}
    found: dict[str, list[tuple[int, ...]]] = {source: [] for source in made.sources}
    for piece in made.pieces:
        found[piece.source].append(piece.numbers())
    return {source: tuple(pieces) for source, pieces in found.items()}


def _patches(plan: Plan) -> tuple[PatchRecord, ...]:
    def modules(number: int) -> Sequence[tuple[str, ...]]:
        return [claim.paths for claim in plan.claims if claim.entry == number]

    return tuple(
        PatchRecord(
            kind=entry.kind,
            classes=tuple(pair.class_name for pair in entry.pairs),
            patterns=tuple(pair.pattern.text for pair in entry.pairs),
            modules=tuple(modules(entry.number)),
            layout=entry.layout,
            kernels=entry.kernels,
        )
        for entry in plan.entries
    )


def computed_warnings(plan: Plan) -> tuple[str, ...]:
    """One line per entry and op whose tensors are computed, because nothing can give their sources back."""
    found = Counter((step.entry, step.op) for step in plan.steps if step.computed is not None)
    return tuple(
        f"{count} {'tensor is' if count == 1 else 'tensors are'} made by {op}, which has no exact inverse: the sources"
        f"{'' if entry is None else f' of the entry at {plan.entries[entry].where}'} cannot be given back"
        for (entry, op), count in found.items()
    )


def rounding_warnings(plan: Plan) -> tuple[str, ...]:
    """One line per entry and pair of dtypes whose values are rounded because the recipe names a dtype."""
    rounded = Counter(
        (step.entry, origin.dtype, step.dtype)
        for step in plan.steps
        for origin in step.origins
        if origin.is_rounded_to(step.dtype)
    )
    return tuple(
        f"{count} {'tensor is' if count == 1 else 'tensors are'} rounded from {source} to {target}, "
        f"the dtype of the entry at {plan.entries[entry].where}"
        for (entry, source, target), count in rounded.items()
        if entry is not None
    )
