"""The header of one safetensors file: read strictly, or built for a file that is to be written.

A file passes safetensors' own check first and then the parser here, which may refuse more and never less:
duplicate keys, unknown fields and dtypes, sizes that do not match the offsets, holes, overlaps and bytes after
the last tensor.  Only the header is read and nothing is allocated by a size that the file merely claims.
Tensor data is never touched, so every dtype of safetensors works, the ones that numpy does not know included.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from kconvert.errors import CheckpointError

__all__ = ["DTYPE_BITS", "FLOAT_DTYPES", "Header", "TensorEntry", "build_header", "read_header"]

_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
DTYPE_BITS: Mapping[str, int] = MappingProxyType({dtype: bits for bits, dtypes in _BITS.items() for dtype in dtypes})
"""Bits per element of every dtype that safetensors 0.8 knows."""

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes that weights may be converted from."""

MAX_HEADER_BYTES = 100_000_000
_MAX_COUNT = 2**60
_ALIGNMENT = 64
_METADATA = "__metadata__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELDS = {"dtype", "shape", "data_offsets"}
_LFS_START = b"version "
_DAMAGED = "download or save the file again"


class TensorEntry(NamedTuple):
    """One tensor of a file; `offset` counts from the start of the file, not from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """`raw` is the JSON exactly as in the file, padding included; `tensors` are in file order."""

    raw: bytes
    metadata: dict[str, str] | None
    tensors: tuple[TensorEntry, ...]

    @property
    def data_offset(self) -> int:
        """Where the data begins: 8 length bytes and the JSON."""
        return 8 + len(self.raw)

    @property
    def prefix(self) -> bytes:
        """The first bytes of the file: the 8 length bytes and the JSON."""
        return struct.pack("<Q", len(self.raw)) + self.raw


def read_header(path: Path) -> Header:
    """Read and check the header of one file.

    Raises:
        CheckpointError: no regular file, or safetensors or the parser here refuses it; the line names the file.
    """
    where = str(path)
    problem = file_problem(path)
    if problem:
        raise CheckpointError(problem, where=where, fix=_DAMAGED)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start == _LFS_START:
                raise CheckpointError("a Git LFS pointer, not weights", where=where, fix="run `git lfs pull`")
            _check_with_safetensors(path)
            raw = file.read(_header_length(start, os.fstat(file.fileno()).st_size, where))
            data_bytes = os.fstat(file.fileno()).st_size - 8 - len(raw)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=where) from error
    return parse_header(raw, data_bytes=data_bytes, where=where)


def file_problem(path: Path) -> str | None:
    """Why `path` cannot be read as a regular file (links followed), or None.  Opens nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "is a broken link" if path.is_symlink() else "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if stat.S_ISREG(mode) else "is not a regular file"


def _check_with_safetensors(path: Path) -> None:
    from safetensors import safe_open

    try:
        with safe_open(os.fspath(path), framework="np"):
            pass
    except Exception as error:
        raise CheckpointError(f"safetensors refuses the file: {error}", where=str(path), fix=_DAMAGED) from error


def _header_length(start: bytes, file_bytes: int, where: str) -> int:
    if len(start) < 8:
        _refuse(f"too short for a safetensors file ({file_bytes} bytes)", where)
    length: int = struct.unpack("<Q", start)[0]
    if length > MAX_HEADER_BYTES:
        _refuse(f"header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed", where)
    if length > file_bytes - 8:
        _refuse(f"header of {length} bytes in a file of {file_bytes} bytes", where)
    return length


def parse_header(raw: bytes, *, data_bytes: int, where: str) -> Header:
    """Parse header JSON for a file that holds `data_bytes` after it; `where` names the file in errors."""
    if len(raw) > MAX_HEADER_BYTES:
        _refuse(f"header of {len(raw)} bytes, more than the {MAX_HEADER_BYTES} allowed", where)
    if not raw.startswith(b"{"):
        _refuse("header does not begin with '{'", where)
    # `-0` is 0 to Python, and no size to safetensors
    fields = parse_json_object(raw, what="header", where=where, parse_int=_parse_size if b"-0" in raw else int)
    metadata = _parse_metadata(fields.pop(_METADATA), where) if _METADATA in fields else None
    data_offset = 8 + len(raw)
    entries = [_parse_entry(name, entry, data_offset, where) for name, entry in fields.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
    _check_contiguous(entries, data_offset, data_offset + data_bytes, where)
    return Header(raw=raw, metadata=metadata, tensors=tuple(entries))


def _parse_size(text: str) -> int:
    if text.startswith("-"):
        raise ValueError(f"{text} is no size")
    return int(text)


def parse_json_object(raw: bytes, *, what: str, where: str, parse_int: Callable[[str], int] = int) -> dict[str, Any]:
    """Parse UTF-8 JSON that must be one object without duplicate keys.

    `NaN` and `Infinity` are read, because transformers writes them into some configs.

    Args:
        raw: the bytes of the document.
        what: how errors call the document.
        where: the file that errors name.
        parse_int: what reads a whole number; a ValueError of it refuses the document.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}", where=where, fix=_DAMAGED) from error
    if not isinstance(value, dict):
        _refuse(f"{what} is not a JSON object", where)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {next(key for key, count in counts.items() if count > 1)!r}")
    return result


def _parse_metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(_is_text(key) and _is_text(item) for key, item in value.items()):
        _refuse(f"{_METADATA} is not an object of strings", where)
    return value


def _parse_entry(name: str, fields: object, data_offset: int, where: str) -> TensorEntry:
    if not _is_text(name):
        _refuse(f"tensor name {name!r} is not valid UTF-8", where)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        _refuse(f"tensor {name!r} has other fields than dtype, shape and data_offsets", where)
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(f"tensor {name!r} has the unknown dtype {dtype!r}", where)
    shape, offsets = _sizes_of(fields["shape"]), _sizes_of(fields["data_offsets"])
    if shape is None or offsets is None:
        wrong = "shape" if shape is None else "data_offsets"
        _refuse(f"{wrong} of tensor {name!r} is not a list of sizes from 0 to 2**60", where)
    if len(offsets) != 2:
        _refuse(f"data_offsets of tensor {name!r} are not two numbers", where)
    try:
        size_bytes = tensor_bytes(dtype, shape)
    except ValueError as error:
        _refuse(f"tensor {name!r}: {error}", where)
    if offsets[1] - offsets[0] != size_bytes:
        _refuse(f"tensor {name!r} needs {size_bytes} bytes, its offsets {list(offsets)} give another size", where)
    return TensorEntry(name, dtype, shape, data_offset + offsets[0], size_bytes)


def _sizes_of(value: object) -> tuple[int, ...] | None:
    """A list of sizes, or None where it is none."""
    if not isinstance(value, list):
        return None
    for size in value:
        # `type` and not `isinstance`: a bool is an int.
        if type(size) is not int or not 0 <= size <= _MAX_COUNT:
            return None
    return tuple(value)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of a known dtype; ValueError where they are no whole number or out of all bounds."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_COUNT:
            raise ValueError("has more than 2**60 elements")
    bits = count * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{count} elements of {dtype} are not a whole number of bytes")
    return bits // 8


def _check_contiguous(entries: Sequence[TensorEntry], begin: int, end: int, where: str) -> None:
    for entry in entries:
        if entry.offset != begin:
            kind = "overlaps the tensor before it" if entry.offset < begin else "has a hole before it"
            _refuse(f"tensor {entry.name!r} {kind}", where)
        begin += entry.size_bytes
    if begin != end:
        kind = "longer" if end > begin else "shorter"
        _refuse(f"file is {abs(end - begin)} bytes {kind} than its header says", where)


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return value.isascii() or _SURROGATE.search(value) is None


def _refuse(what: str, where: str) -> NoReturn:
    raise CheckpointError(what, where=where, fix=_DAMAGED)


def build_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file: 8 length bytes and compact JSON, padded with spaces to a multiple of 64 in all.

    So the data begin on a cache line, and a tensor that is mapped from the file is aligned as one in memory of its own:
    some products depend on that in the last bit.

    Args:
        tensors: `(name, dtype, shape, size_bytes)`, laid out one after another in this order.
        metadata: written first as `__metadata__`, keys sorted; None leaves it out.

    Raises:
        CheckpointError: what `read_header` would refuse: an unknown dtype, a size that does not match the shape,
            a name that comes twice, or a header beyond 100 MB.
    """
    begin, where = 0, "header to be written"
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[_METADATA] = _parse_metadata(dict(sorted(metadata.items())), where)
    for name, dtype, shape, size_bytes in tensors:
        if name in fields or name == _METADATA:
            raise CheckpointError(f"tensor name {name!r} comes twice or is reserved")
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size_bytes]}
        _parse_entry(name, fields[name], 0, where)
        begin += size_bytes
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a tensor name or the metadata is not valid UTF-8: {error}") from error
    raw = text + b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"header of {len(raw)} bytes for {len(tensors)} tensors, more than the {MAX_HEADER_BYTES} allowed",
            fix="use smaller shards: --max-shard-size",
        )
    return struct.pack("<Q", len(raw)) + raw
