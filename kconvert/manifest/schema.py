"""`kconvert_manifest.json`: what was changed, and what to patch at load.

Schema 4.  The manifest is data only: no import path in it is ever imported, kernels are named by IDs and
packages by digest.  It holds enough to invert every target tensor and to shard it.  Reading checks the
schema version, the digest of the manifest itself, every type, and every file name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from kconvert.errors import ManifestError
from kconvert.files import read_regular
from kconvert.manifest.canonical import (
    canonical_items,
    canonical_parts,
    sha256_of,
    unique_pairs,
)
from kconvert.names import DEVICES, MANIFEST_NAME, unsafe_name_reason
from kconvert.transforms import Arrangement, Piece, has_overlap, invert

__all__ = [
    "SCHEMA_VERSION",
    "LayoutRecord",
    "Manifest",
    "OmittedRecord",
    "OriginRecord",
    "PackageRecord",
    "PartRecord",
    "PatchRecord",
    "SourceFileRecord",
    "TensorRecord",
    "load_manifest",
]

SCHEMA_VERSION = 4
_LIMIT_BYTES = 512 * 1024 * 1024
_MOST_ELEMENTS = 2**60
_MOST_NUMBERS = 2 + 3 * 60
"""Of a piece: each of its dims has two steps or more."""


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
class OriginRecord:
    """A tensor of the source's files that a part was made of: its name, shard, dtype and shape there, and its elements.

    A piece is numbers: the first element in the source, the first in what is made of it, then size, source stride and
    target stride of each dim; all in elements, in row-major order (`transforms.Piece`).  A dtype that is not that of the
    target was converted.
    """

    file_name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PartRecord:
    """A tensor of the stock model that a target holds: its name and shape in the model, and where its elements are.

    `origins` are the tensors of the source's files that it was made of.
    """

    source: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    origins: tuple[OriginRecord, ...]

    def stored(self) -> Arrangement:
        """Of which elements of the tensors in the source's files it consists."""
        return Arrangement(self.shape, _pieces((origin.file_name, origin.pieces) for origin in self.origins))


@dataclass(frozen=True)
class TensorRecord:
    """A target tensor.

    Attributes:
        target: its name; `dtype` and `shape` are as it is stored.
        op: what was done, for people; `copy` where it is a tensor of the source's files, unchanged.
        patch: the number of the patch; None if passed through.
        parts: the tensors of the stock model that it holds; itself where it is passed through.
        exact: whether the parts can be given back; else it was computed from them, and they have no pieces.
    """

    target: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    patch: int | None
    parts: tuple[PartRecord, ...]
    exact: bool = True

    def arrangement(self) -> Arrangement:
        """Of which elements of the stock model's tensors it consists."""
        return Arrangement(self.shape, _pieces((part.source, part.pieces) for part in self.parts))

    @property
    def origins(self) -> tuple[OriginRecord, ...]:
        """Those of all parts."""
        return tuple(origin for part in self.parts for origin in part.origins)


def _pieces(numbers: Iterable[tuple[str, tuple[tuple[int, ...], ...]]]) -> tuple[Piece, ...]:
    return tuple(Piece.from_numbers(source, piece) for source, pieces in numbers for piece in pieces)


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
    or `save_pretrained` where the values are no longer those of the source.  `sidecar_digests` are those of all `sidecars`;
    `digests` those of all tensors as they are stored, by target, where they were asked for: the sha256 as hex.

    `device` is the device that the recipe's entries were chosen for, or None; `devices` are all that get these entries, and
    that the directory is meant for.  Others are served too.  The kernels of those in `view_devices` read some weights through a
    view, because they would have them stored another way.
    """

    kconvert_version: str
    transformers_version: str
    model_type: str
    architecture: str
    config_digest: str
    recipe_name: str
    recipe_text: str
    device: str | None
    devices: tuple[str, ...]
    view_devices: tuple[str, ...]
    model_checked: bool
    patches: tuple[PatchRecord, ...]
    tensors: tuple[TensorRecord, ...]
    carried: tuple[str, ...]
    omitted: tuple[OmittedRecord, ...]
    sidecars: tuple[str, ...]
    sidecar_digests: dict[str, str]
    weight_files: tuple[str, ...]
    source_files: tuple[SourceFileRecord, ...]
    source_headers: str | None
    source_headers_digest: str | None
    written_by: str
    digests: dict[str, str] | None
    schema: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON with `digest` over everything else.

        Raises:
            ManifestError: it would be larger than what `load_manifest` reads.
        """
        items = canonical_items(vars(self))
        items |= canonical_items({"digest": sha256_of(canonical_parts(items))})
        size = sum(map(len, canonical_parts(items)))
        if size > _LIMIT_BYTES:
            raise ManifestError(f"the manifest would have {size} bytes, {_LIMIT_BYTES} are allowed")
        return b"".join(canonical_parts(items))

    def digest(self) -> str:
        """`sha256:<hex>` over everything else in it, as the file has it."""
        return _digest_of(vars(self))

    def tensors_by_target(self) -> dict[str, TensorRecord]:
        """Target name to record."""
        return {record.target: record for record in self.tensors}


def _digest_of(body: Mapping[str, Any]) -> str:
    return sha256_of(canonical_parts(canonical_items(body)))


def load_manifest(directory: Path) -> Manifest:
    """Read and check `directory`'s manifest.

    Raises:
        ManifestError: no manifest, damaged, another schema, a digest that does not fit, or an unsafe file name.
    """
    path = directory / MANIFEST_NAME
    fix = "convert the checkpoint again"
    try:
        value = json.loads(read_regular(path, _LIMIT_BYTES), object_pairs_hook=unique_pairs)
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
        *(origin.file for record in manifest.tensors for origin in record.origins),
    )
    for name in dict.fromkeys(names):
        reason = unsafe_name_reason(name)
        if reason:
            raise ManifestError(f"file name {name!r} is {reason}", where=where, fix="do not use this checkpoint")
    chosen = () if manifest.device is None else (manifest.device,)
    named = (*chosen, *manifest.devices, *manifest.view_devices)
    unknown = next((device for device in named if device not in DEVICES), None)
    if unknown is not None:
        raise ManifestError(f"unknown device {unknown!r}", where=where, fix="convert again")
    _check_tensors(manifest, where)
    if manifest.sidecar_digests.keys() != {*manifest.sidecars}:
        raise ManifestError("not every sidecar has its digest", where=where)
    if manifest.digests is not None and manifest.digests.keys() != {record.target for record in manifest.tensors}:
        raise ManifestError("not every tensor has its digest", where=where)
    paths = [path for patch in manifest.patches for claim in patch.modules for path in claim]
    if len(set(paths)) != len(paths):
        raise ManifestError("a module is patched twice", where=where)
    for patch in manifest.patches:
        wanted = patch.kind in ("replace", "fuse") and bool(patch.classes) and bool(patch.kernels)
        if not wanted or any(len(claim) != len(patch.classes) for claim in patch.modules):
            raise ManifestError(f"patch of {patch.patterns} is malformed", where=where)
        facts = (fact for found in (patch.facts or {}).values() for fact in found.values())
        if any(isinstance(fact, list | dict) for fact in facts):
            raise ManifestError(f"a fact of the patch of {patch.patterns} is no single value", where=where)


def _check_tensors(manifest: Manifest, where: str) -> None:
    """Parts fill their target, origins their part, and of each every element is used once: else nothing is invertible."""
    targets = set[str]()
    made_of: dict[str, tuple[OriginRecord, ...]] = {}
    parts, origins = _Uses(), _Uses()
    for record in manifest.tensors:
        if record.patch is not None and not 0 <= record.patch < len(manifest.patches):
            raise ManifestError(f"tensor {record.target!r} names patch {record.patch}", where=where)
        if record.target in targets:
            raise ManifestError(f"tensor {record.target!r} stands twice", where=where)
        targets.add(record.target)
        try:
            _check_numbers(record)
            if not record.exact:
                if any(part.pieces for part in record.parts):
                    raise ManifestError(f"{record.target!r} was computed, and has pieces", where=where)
                continue
            _check_pieces(record.arrangement(), {part.source: part.shape for part in record.parts}, parts)
            for part in record.parts:
                # a part that lies in several targets, some of it in each, has the same origins in all of them
                if part.source not in made_of:
                    made_of[part.source] = part.origins
                    _check_pieces(part.stored(), {each.file_name: each.shape for each in part.origins}, origins)
                elif made_of[part.source] != part.origins:
                    raise ValueError(f"{part.source!r} has other origins elsewhere")
        except ValueError as error:
            raise ManifestError(f"the parts of {record.target!r} do not add up: {error}", where=where) from None
    try:
        parts.check()
        origins.check()
    except ValueError as error:
        raise ManifestError(str(error), where=where) from None


def _check_numbers(record: TensorRecord) -> None:
    """Raises ValueError for a tensor or a piece beyond all sizes, before anything is reckoned with such numbers."""
    for shape in (record.shape, *(part.shape for part in record.parts), *(origin.shape for origin in record.origins)):
        count = 1
        for size in shape:
            count *= size
            if abs(count) > _MOST_ELEMENTS:
                raise ValueError("a shape has more than 2**60 elements")
    for part in record.parts:
        for piece in chain(part.pieces, *(origin.pieces for origin in part.origins)):
            if len(piece) > _MOST_NUMBERS or max(piece, default=0) > _MOST_ELEMENTS:
                raise ValueError("a piece has more dims or steps than any tensor")


class _Uses:
    """Which elements of each tensor were used."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[Piece]] = {}

    def add(self, shape: tuple[int, ...], piece: Piece) -> None:
        """Note the elements that a piece takes of a tensor of `shape`, in which it lies.

        Raises:
            ValueError: the tensor had another shape before.
        """
        if self._shapes.setdefault(piece.source, shape) != shape:
            raise ValueError(f"{piece.source!r} has two shapes")
        self._pieces.setdefault(piece.source, []).append(piece)

    def check(self) -> None:
        """Raises ValueError unless every element was used once."""
        for name, pieces in self._pieces.items():
            size, count = prod(self._shapes[name]), sum(piece.size for piece in pieces)
            if count != size:
                raise ValueError(f"{count} elements of {name!r} are used, of {size}")
            if len(pieces) == 1 and pieces[0].run_size == size:
                continue
            back = invert({name: Arrangement(self._shapes[name], tuple(pieces))}, self._shapes) or {}
            if has_overlap(back[name].pieces):
                raise ValueError(f"an element of {name!r} is used twice")


def _check_pieces(made: Arrangement, shapes: Mapping[str, tuple[int, ...]], used: _Uses) -> None:
    """Pieces lie inside their tensors and fill the target; `used` notes the elements of each source.

    Raises:
        ValueError: they do not.
    """
    if min((0, *made.shape, *(size for shape in shapes.values() for size in shape))) < 0:
        raise ValueError("a shape is negative")
    if not shapes or {piece.source for piece in made.pieces} != {*shapes}:
        raise ValueError("not every source has its pieces")
    if sum(piece.size for piece in made.pieces) != made.size:
        raise ValueError("the pieces do not fill it")
    for piece in made.pieces:
        shape = shapes[piece.source]
        if piece.size and (piece.source_end > prod(shape) or piece.target_end > made.size):
            raise ValueError(f"{list(piece.numbers())} lies outside")
        used.add(shape, piece)
    if has_overlap(made.pieces):
        raise ValueError("two of its elements stand in one place")


_Reader: TypeAlias = Callable[[Any, str], Any]


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: dataclasses, tuples, optional values and scalars, checked strictly."""
    return _reader(kind)(value, where)


@cache
def _reader(kind: Any) -> _Reader:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        read = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda value, where: None if value is None else read(value, where)
    if origin is tuple:
        return partial(_read_list, args[0])
    if origin is dict:
        return partial(_read_object, _reader(args[1]))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return partial(_read_dataclass, kind, {field.name: _reader(hints[field.name]) for field in fields(kind)})
    if kind is Any:
        return lambda value, where: value
    return partial(_read_scalar, kind)


def _read_list(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{where} is no list")
    if kind is int and all(type(item) is int for item in value):
        return tuple(value)
    read = _reader(kind)
    return tuple(read(item, f"{where}[{number}]") for number, item in enumerate(value))


def _read_object(read: _Reader, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is no object")
    return {key: read(item, f"{where}.{key}") for key, item in value.items()}


def _read_dataclass(kind: type, readers: Mapping[str, _Reader], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is no object")
    if value.keys() != readers.keys():
        stray, lacking = sorted(value.keys() - readers.keys()), [name for name in readers if name not in value]
        raise ValueError(f"{where} has unknown keys {stray}, lacks {lacking}")
    return kind(**{name: read(value[name], f"{where}.{name}") for name, read in readers.items()})


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{where} is {value!r}, not {kind.__name__}")
    return value
