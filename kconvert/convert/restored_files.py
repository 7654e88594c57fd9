"""The source's weight files and index, as runs of bytes of the converted files.

The manifest says where each element of a source's tensor went, in two steps: into a tensor of the model, and with that into
one of the converted files.  Both are turned round and put together, so any chain of ops is undone in one copy.

What `apply` wrote comes back verbatim or not at all: a computed tensor or a rounded one is refused, and so is a header with
a tensor that the manifest does not place.  A saved model has values of its own.  There a dtype that differs is converted to
the source's, and a tensor that changed its shape, or that the save left out, gives its file and the index new text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kconvert.checkpoint import (
    DTYPE_BITS,
    Converted,
    Header,
    SourceTensor,
    build_header,
    build_index,
)
from kconvert.convert.source_headers import SourceHeaders
from kconvert.errors import ManifestError, VerificationError
from kconvert.manifest import Manifest
from kconvert.rewrite import Cast, OutputFile, Place, extents_of
from kconvert.transforms import Arrangement, compose, cuts_bytes, invert

__all__ = ["RestoredFiles", "check_invertible", "restore_files"]

_NO_INVERSE = "use the source itself"
_UNLIKE = "get the directory again, or convert the checkpoint again"


@dataclass(frozen=True)
class RestoredFiles:
    """What is written, and how it differs from what the source had.

    Attributes:
        files: the weight files.
        index: the text of the index; None where there is none.
        new_headers: the names of files whose header is not the source's.
        left_out: the names of tensors that a save has left out.
        empty: the names of files that had only such tensors, and are not written.
        rounded: of a saved model, how many tensors are rounded, by the dtype that they are saved in and the source's.
    """

    files: tuple[OutputFile, ...]
    index: str | None
    new_headers: tuple[str, ...]
    left_out: tuple[str, ...]
    empty: tuple[str, ...]
    rounded: Mapping[tuple[str, str], int]


def check_invertible(converted: Converted) -> None:
    """Refuse what was computed.

    Raises:
        VerificationError: naming the first such tensor and its op.
    """
    lost = [record for record in converted.manifest.tensors if not record.exact]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise VerificationError(
            f"{lost[0].target!r}{more} was made by {lost[0].op}, which has no exact inverse",
            where=str(converted.directory),
            fix=_NO_INVERSE,
        )


def restore_files(converted: Converted, source: SourceHeaders) -> RestoredFiles:
    """Put the source's files together; reads nothing.

    Raises:
        ManifestError: the source's headers are not what the manifest is about.
        VerificationError: values cannot come back.
    """
    _check_origins(converted, source)
    way = _Way.through(converted)
    restored = [_restore(name, header, source, way) for name, header in source.headers.items()]
    files = tuple(each.file for each in restored if each.file is not None)
    left_out = tuple(name for each in restored for name in each.left_out)
    new_headers = tuple(each.file.name for each in restored if each.file is not None and each.has_new_header)
    index = source.index.raw if source.index is not None else None
    if source.index is not None and (new_headers or left_out):
        kept = {name: file for name, file in source.index.weight_map.items() if name in way.arrangements}
        index = build_index(kept, sum(file.size_bytes - len(file.prefix) for file in files))
    return RestoredFiles(
        files,
        index,
        new_headers,
        left_out,
        tuple(name for name, each in zip(source.headers, restored, strict=True) if each.file is None),
        Counter(dtypes for each in restored for dtypes in each.rounded if converted.is_saved),
    )


def _check_origins(converted: Converted, source: SourceHeaders) -> None:
    """What the manifest says of the source's tensors is what their headers say, and `apply` has lost none of them."""
    is_saved, where = converted.is_saved, str(converted.directory)
    missing = {*source.tensors}
    for record in converted.manifest.tensors:
        for origin in record.origins:
            tensor = source.tensors.get(origin.file_name)
            told = origin.dtype, origin.file, origin.shape
            if tensor is None or told != (tensor.dtype, tensor.file, origin.shape if is_saved else tensor.shape):
                raise ManifestError(
                    f"says that {origin.file_name!r} was {origin.dtype} {list(origin.shape)} in {origin.file}, "
                    "the source's headers do not",
                    where=where,
                    fix=_UNLIKE,
                )
            if not is_saved and tensor.is_rounded_to(record.dtype):
                raise VerificationError(
                    f"{tensor.name!r} was rounded from {tensor.dtype} to {record.dtype} for {record.target!r} "
                    f"({record.op}), which has no exact inverse",
                    where=where,
                    fix=_NO_INVERSE,
                )
            missing.discard(tensor.name)
    if missing and not is_saved:
        raise ManifestError(
            f"does not say where {min(missing)!r} went, which the source's headers have ({len(missing)} such tensors)",
            where=where,
            fix=_UNLIKE,
        )


@dataclass(frozen=True)
class _Way:
    """The way back.

    Attributes:
        arrangements: each tensor of the source out of the converted ones.
        stored: the converted tensors.
        places: where their bytes are.
        where: the converted directory, for errors.
    """

    arrangements: Mapping[str, Arrangement]
    stored: Mapping[str, SourceTensor]
    places: Mapping[str, Place]
    where: str

    @classmethod
    def through(cls, converted: Converted) -> _Way:
        """That of a converted directory."""
        paths = {file.name: file.path for file in converted.files}
        places = {
            name: Place(paths[tensor.file], tensor.offset, tensor.dtype) for name, tensor in converted.tensors.items()
        }
        return cls(_arrangements(converted.manifest), converted.tensors, places, str(converted.directory))


def _arrangements(manifest: Manifest) -> dict[str, Arrangement]:
    parts = {part.source: part for record in manifest.tensors for part in record.parts}
    of_targets = invert(
        {record.target: record.arrangement() for record in manifest.tensors},
        {name: part.shape for name, part in parts.items()},
    )
    of_parts = invert(
        {name: part.stored() for name, part in parts.items()},
        {origin.file_name: origin.shape for part in parts.values() for origin in part.origins},
    )
    if of_targets is None or of_parts is None:  # a manifest that is loaded has every element once
        raise ManifestError("its parts do not add up")
    return {name: compose(made, of_targets) for name, made in of_parts.items()}


@dataclass(frozen=True)
class _Restored:
    """A file; None where nothing is left for it."""

    file: OutputFile | None
    has_new_header: bool
    left_out: tuple[str, ...]
    rounded: tuple[tuple[str, str], ...]


def _restore(name: str, header: Header, source: SourceHeaders, way: _Way) -> _Restored:
    tensors = [source.tensors[entry.name] for entry in header.tensors]
    kept = [tensor for tensor in tensors if tensor.name in way.arrangements]
    left_out = tuple(tensor.name for tensor in tensors if tensor.name not in way.arrangements)
    if left_out and not kept:
        return _Restored(None, False, left_out, ())
    for tensor in kept:
        _check_convertible(tensor, way)
    extents = [extents_of(way.arrangements[tensor.name], tensor.dtype, way.places) for tensor in kept]
    has_new_header = bool(left_out) or any(way.arrangements[tensor.name].shape != tensor.shape for tensor in kept)
    prefix = _new_header(kept, header, way) if has_new_header else header.prefix
    file = OutputFile(name, prefix, tuple(extent for each in extents for extent in each))
    return _Restored(file, has_new_header, left_out, tuple(_rounded(kept, way)))


def _check_convertible(tensor: SourceTensor, way: _Way) -> None:
    made = way.arrangements[tensor.name]
    if cuts_bytes(made.pieces, DTYPE_BITS[tensor.dtype]):
        raise ManifestError(f"{tensor.name!r} is {tensor.dtype}, and its parts begin inside of a byte", where=way.where)
    for stored in (way.stored[name] for name in made.sources):
        if stored.dtype == tensor.dtype:
            continue
        try:
            Cast(stored.dtype, tensor.dtype)
        except ValueError:
            raise VerificationError(
                f"{stored.name!r} is saved as {stored.dtype}, which cannot become {tensor.dtype}, the dtype of "
                f"{tensor.name!r} in the source",
                where=way.where,
                fix="save the model in the source's dtype",
            ) from None


def _rounded(kept: Sequence[SourceTensor], way: _Way) -> list[tuple[str, str]]:
    """The dtypes of each tensor whose values a cast may round: as it is stored, and as it was in the source."""
    dtypes = ((way.stored[way.arrangements[tensor.name].sources[0]], tensor.dtype) for tensor in kept)
    return [(stored.dtype, dtype) for stored, dtype in dtypes if stored.is_rounded_to(dtype)]


def _new_header(kept: Sequence[SourceTensor], header: Header, way: _Way) -> bytes:
    tensors = []
    for tensor in kept:
        made = way.arrangements[tensor.name]
        tensors.append((tensor.name, tensor.dtype, made.shape, made.size * DTYPE_BITS[tensor.dtype] // 8))
    return build_header(tensors, header.metadata)
