"""The headers and index of the source that lie beside a converted directory's weights, read back for `revert`.

They come from a directory that anybody may have put together, so nothing in them is believed: the file has to be the one
that the manifest names by digest, unpacked it may be 512 MiB, and it may hold nothing but the strings that belong there.
The names have to be the manifest's.  Every header has to have its digest there, to be one that the strict parser takes for
a file of the recorded size, and the index has to agree with them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kconvert.checkpoint import (
    Header,
    Index,
    SourceTensor,
    check_index,
    collect_tensors,
    parse_header,
    parse_index,
    parse_json_object,
    read_bounded,
)
from kconvert.convert.record import SOURCE_HEADERS_BYTES
from kconvert.errors import CheckpointError
from kconvert.manifest import Manifest, sha256_digest
from kconvert.names import unsafe_name_reason

__all__ = ["SourceHeaders", "load_source_headers"]

_BLOCK_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS
_STRING = re.compile(rb'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A JSON string, or what begins as one and never ends: so that any text is gone through once."""
_FRAME_BYTES, _FRAME_BYTES_PER_FILE = 64, 16
"""The most that may stand outside of strings: more would be other JSON, of which a little takes much memory."""
_INDEX_SUFFIX = ".safetensors.index.json"
_FIX = "get the directory again, or convert the checkpoint again"


@dataclass(frozen=True)
class SourceHeaders:
    """What the source's weight files and index said.

    Attributes:
        headers: by file name, in natural order.
        tensors: all of them by name.
        index, index_name: None where the source was a single file.
    """

    headers: Mapping[str, Header]
    tensors: Mapping[str, SourceTensor]
    index: Index | None
    index_name: str | None


def load_source_headers(directory: Path, manifest: Manifest) -> SourceHeaders:
    """Read and check the source's headers of a converted directory.

    Raises:
        CheckpointError: they are missing, damaged, or not those that the manifest is about.
    """
    if manifest.source_headers is None:
        _refuse("the source's headers were not kept", str(directory))
    path = directory / manifest.source_headers
    where = str(path)
    try:
        data = read_bounded(path, SOURCE_HEADERS_BYTES)
        if sha256_digest(data) != manifest.source_headers_digest:
            _refuse("is not the file that the manifest names: its digest is another one", where)
        text = _unpacked(data, where)
        if len(_STRING.sub(b"", text)) > _FRAME_BYTES + _FRAME_BYTES_PER_FILE * len(manifest.source_files):
            _refuse("holds more than headers and an index", where)
        return _parse(parse_json_object(text, what="the unpacked text", where=where), manifest, where)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where, fix=_FIX) from error


def _unpacked(data: bytes, where: str) -> bytes:
    """The one gzip member that `data` has to be; nothing is kept of one that turns out too large."""
    size = position = 0
    rest: bytes | memoryview = b""
    inflater, view = zlib.decompressobj(_GZIP), memoryview(data)
    try:
        while not inflater.eof:
            if not rest:
                rest = view[position : position + _BLOCK_BYTES]
                position += len(rest)
            block = inflater.decompress(rest, _BLOCK_BYTES)
            if not block and not rest:
                _refuse("ends early", where)
            rest = inflater.unconsumed_tail
            size += len(block)
            if size > SOURCE_HEADERS_BYTES:
                _refuse(f"unpacks to more than the {SOURCE_HEADERS_BYTES} bytes allowed", where)
    except zlib.error as error:
        raise CheckpointError(f"is no gzip file, or a damaged one: {error}", where=where) from error
    if inflater.unused_data or position < len(data):
        _refuse("holds something after its end", where)
    return zlib.decompress(data, _GZIP, size)


def _parse(value: Mapping[str, object], manifest: Manifest, where: str) -> SourceHeaders:
    files, index = value.get("files"), value.get("index")
    if value.keys() != {"files", "index"} or not isinstance(files, dict):
        _refuse("does not hold just files and an index", where)
    if sorted(files) != sorted(record.name for record in manifest.source_files):
        _refuse("holds headers of other files than the manifest", where)
    headers = {}
    for record in manifest.source_files:
        _check_name(record.name, ".safetensors", where)
        raw = _encoded(files[record.name], where)
        if sha256_digest(raw) != record.header_digest:
            _refuse(f"the header of {record.name} is not that of the source: its digest is another one", where)
        data_bytes = record.size_bytes - 8 - len(raw)
        headers[record.name] = parse_header(raw, data_bytes=data_bytes, where=f"{where}, {record.name}")
    tensors = collect_tensors(headers, where=where)
    if index is None:
        if len(headers) != 1:
            _refuse(f"holds no index, and {len(headers)} headers", where)
        return SourceHeaders(headers, tensors, None, None)
    if not isinstance(index, dict) or index.keys() != {"name", "text"}:
        _refuse("its index is no name and text", where)
    name = index["name"]
    _check_name(name, _INDEX_SUFFIX, where)
    parsed = parse_index(_encoded(index["text"], where), where=f"{where}, {name}")
    if {*parsed.weight_map.values()} != headers.keys():
        _refuse("its index names other files", where)
    check_index(parsed, tensors, where=f"{where}, {name}")
    return SourceHeaders(headers, tensors, parsed, name)


def _check_name(name: object, suffix: str, where: str) -> None:
    reason = unsafe_name_reason(name)
    if reason is None and not str(name).endswith(suffix):
        reason = f"no name of a {suffix} file"
    if reason is not None:
        _refuse(f"file name {name!r} is refused: {reason}", where)


def _encoded(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        _refuse("a header or the index is no text", where)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a header or the index is no text: {error.reason}", where=where) from error


def _refuse(what: str, where: str) -> NoReturn:
    raise CheckpointError(what, where=where)
