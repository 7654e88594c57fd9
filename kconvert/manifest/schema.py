"""`kconvert_manifest.json`: what was changed, and what to patch at load.

Schema 1.  The manifest is data only: no import path in it is ever imported, kernels are named by IDs and
packages by digest.  It holds enough to invert every target tensor and to shard it.  Reading checks the
schema version, the digest of the manifest itself, every type, and every file name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kconvert.errors import ManifestError
from kconvert.manifest.canonical import canonical_json, sha256_digest, unique_pairs
from kconvert.names import MANIFEST_NAME, unsafe_name_reason

__all__ = [
    "SCHEMA_VERSION",
    "LayoutRecord",
    "Manifest",
    "OmittedRecord",
    "PackageRecord",
    "PartRecord",
    "PatchRecord",
    "SourceFileRecord",
    "TensorRecord",
    "load_manifest",
]

SCHEMA_VERSION = 1
_LIMIT_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class PackageRecord:
    """A two-class package: its ID as in the recipe, the resolved commit (Hub only), digest and class name."""

    package_id: str
    commit: str | None
    digest: str
    class_name: str


@dataclass(frozen=True)
class LayoutRecord:
    """The layout of a patch: a built-in name with its version, or a package."""

    name: str
    version: int
    package: PackageRecord | None = None


@dataclass(frozen=True)
class PatchRecord:
    """One patch entry, with concrete paths.

    Attributes:
        kind: `replace` or `fuse`.
        classes: the expected class name per pair.
        patterns: the path pattern per pair, for people.
        modules: per claim, the module path of each pair in pair order; the layout sits at the first.
        kernels: candidate kernel IDs, best first.
        facts: what was proven of each class at conversion (RMSNorm offset and cast order, ...), by class name;
            None where the model was not checked.
    """

    kind: str
    classes: tuple[str, ...]
    patterns: tuple[str, ...]
    modules: tuple[tuple[str, ...], ...]
    layout: LayoutRecord
    kernels: tuple[str, ...]
    facts: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class PartRecord:
    """A run of rows of a target tensor: the source's module name, its name, shard and dtype in the source, its rows.

    A dtype that is not the target's was converted.
    """

    source: str
    file_name: str
    file: str
    dtype: str
    rows: int


@dataclass(frozen=True)
class TensorRecord:
    """A target tensor; `parts` in order along `axis`; `patch` is the number of the patch, None if passed through."""

    target: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    axis: int
    patch: int | None
    parts: tuple[PartRecord, ...]


@dataclass(frozen=True)
class OmittedRecord:
    """A file or folder of the source that was not brought over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class SourceFileRecord:
    """A weight file of the source: name, size and the digest of its header."""

    name: str
    size_bytes: int
    header_digest: str


@dataclass(frozen=True)
class Manifest:
    """The whole manifest.

    `model_checked` says whether the structural check ran; only then is `carried` known.  `written_by` is `apply`,
    or `save_pretrained` where the values are no longer those of the source.
    """

    kconvert_version: str
    transformers_version: str
    model_type: str
    architecture: str
    config_digest: str
    recipe_name: str
    recipe_text: str
    model_checked: bool
    patches: tuple[PatchRecord, ...]
    tensors: tuple[TensorRecord, ...]
    carried: tuple[str, ...]
    omitted: tuple[OmittedRecord, ...]
    sidecars: tuple[str, ...]
    weight_files: tuple[str, ...]
    source_files: tuple[SourceFileRecord, ...]
    source_headers: str | None
    source_headers_digest: str | None
    written_by: str
    schema: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON with `digest` over everything else."""
        body = asdict(self)
        return canonical_json({**body, "digest": _digest_of(body)})

    def digest(self) -> str:
        """`sha256:<hex>` over everything else in it, as the file has it."""
        return _digest_of(asdict(self))

    def tensors_by_target(self) -> dict[str, TensorRecord]:
        """Target name to record."""
        return {record.target: record for record in self.tensors}


def _digest_of(body: Mapping[str, Any]) -> str:
    return sha256_digest(canonical_json(body))


def load_manifest(directory: Path) -> Manifest:
    """Read and check `directory`'s manifest.

    Raises:
        ManifestError: no manifest, damaged, another schema, a digest that does not fit, or an unsafe file name.
    """
    path = directory / MANIFEST_NAME
    fix = "convert the checkpoint again"
    try:
        too_large = path.stat().st_size > _LIMIT_BYTES
        value = None if too_large else json.loads(path.read_bytes(), object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        if not directory.exists():
            raise ManifestError(
                "no such directory", where=str(directory), fix="give the folder that `kconvert apply` wrote"
            ) from None
        raise ManifestError(
            f"no {MANIFEST_NAME} here", where=str(directory), fix="convert the checkpoint with `kconvert apply` first"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"cannot be read ({error})", where=str(path), fix=fix) from None
    if too_large:
        raise ManifestError("too large for a manifest", where=str(path), fix=fix)
    if not isinstance(value, dict):
        raise ManifestError("is no JSON object", where=str(path), fix=fix)
    if value.get("schema") != SCHEMA_VERSION:
        raise ManifestError(
            f"has schema {value.get('schema')!r}, this version reads {SCHEMA_VERSION}",
            where=str(path),
            fix="use the kconvert version that wrote it, or convert again",
        )
    digest = value.pop("digest", None)
    try:
        found = _digest_of(value)
    except (ValueError, RecursionError) as error:  # NaN, half a surrogate pair, endless nesting
        raise ManifestError(f"cannot be read ({error})", where=str(path), fix=fix) from None
    if digest != found:
        raise ManifestError("its digest does not fit its content: it was edited or damaged", where=str(path), fix=fix)
    try:
        manifest: Manifest = _read(Manifest, value, "manifest")
    except (TypeError, KeyError, ValueError) as error:
        raise ManifestError(f"malformed ({error})", where=str(path), fix=fix) from None
    _check(manifest, str(path))
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    headers = (manifest.source_headers,) if manifest.source_headers is not None else ()
    names: Iterable[str] = (
        *manifest.weight_files,
        *manifest.sidecars,
        *headers,
        *(file.name for file in manifest.source_files),
        *(part.file for record in manifest.tensors for part in record.parts),
    )
    for name in names:
        reason = unsafe_name_reason(name)
        if reason:
            raise ManifestError(f"file name {name!r} is {reason}", where=where, fix="do not use this checkpoint")
    _check_tensors(manifest, where)
    paths = [path for patch in manifest.patches for claim in patch.modules for path in claim]
    if len(set(paths)) != len(paths):
        raise ManifestError("a module is patched twice", where=where)
    for patch in manifest.patches:
        wanted = patch.kind in ("replace", "fuse") and bool(patch.classes) and bool(patch.kernels)
        if not wanted or any(len(claim) != len(patch.classes) for claim in patch.modules):
            raise ManifestError(f"patch of {patch.patterns} is malformed", where=where)


def _check_tensors(manifest: Manifest, where: str) -> None:
    """Parts add up, and every target and every source stands once: else a tensor could not be inverted."""
    targets, sources = set[str](), set[str]()
    for record in manifest.tensors:
        if record.patch is not None and not 0 <= record.patch < len(manifest.patches):
            raise ManifestError(f"tensor {record.target!r} names patch {record.patch}", where=where)
        if not 0 <= record.axis < max(len(record.shape), 1):
            raise ManifestError(f"{record.target!r} has no axis {record.axis}", where=where)
        rows = [part.rows for part in record.parts]
        if min(rows, default=-1) < 0 or sum(rows) != (record.shape[record.axis] if record.shape else 1):
            raise ManifestError(f"the parts of {record.target!r} do not add up to its shape", where=where)
        for name, seen in ((record.target, targets), *((part.source, sources) for part in record.parts)):
            if name in seen:
                raise ManifestError(f"tensor {name!r} stands twice", where=where)
            seen.add(name)


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: dataclasses, tuples, optional values and scalars, checked strictly."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{where} is no list")
        return tuple(_read(args[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{where} is no object")
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, Mapping):
            raise TypeError(f"{where} is no object")
        hints = _type_hints(kind)
        known = [field.name for field in fields(kind)]
        stray = sorted(set(value) - set(known))
        lacking = [name for name in known if name not in value]
        if stray or lacking:
            raise ValueError(f"{where} has unknown keys {stray}, lacks {lacking}")
        return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in known})
    if kind is Any:
        return value
    if type(value) is not kind:
        raise TypeError(f"{where} is {value!r}, not {kind.__name__}")
    return value
