"""Fuzz target: the header of a safetensors file.

Never may a header be accepted that safetensors refuses, neither by `read_header`, which asks safetensors first, nor by
`parse_header` alone, which also reads text that no safetensors file holds.  What is accepted means the same to both.
"""

from __future__ import annotations

import json
import struct
from random import Random

from safetensors import SafetensorError, deserialize

from kconvert.checkpoint import DTYPE_BITS, Header, read_header
from kconvert.checkpoint.header import parse_header
from kconvert.errors import CheckpointError
from tests.fuzz.documents import Array, Node, Object, damage, from_value, is_number, mutate, parse, write
from tests.fuzz.target import Fault, MemoryFile, Outcome, check_refusal

__all__ = ["HeaderTarget"]

_NAMES = (
    "a",
    "b",
    "",
    "weight",
    "model.layers.0.mlp.gate_proj.weight",
    "größe",
    "e\u0301",
    "名",
    "\u2028",
    "\x7f",
    "A" * 300,
)
_TOKENS = tuple(json.dumps(dtype) for dtype in DTYPE_BITS)
_MAX_DATA_BYTES = 1 << 16


class HeaderTarget:
    """Inputs are whole files: length, JSON and data."""

    name = "header"

    def make(self, rng: Random) -> bytes:
        """Tensors one after another, now and then with a hole, an overlap or another size."""
        fields: list[tuple[str, Node]] = []
        begin = 0
        for name in rng.sample(_NAMES, rng.choice([0, 1, 1, 2, 2, 3, 5])):
            dtype = rng.choice(list(DTYPE_BITS))
            shape = [rng.choice([0, 1, 1, 2, 3, 4, 8]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
            shape += [8] if DTYPE_BITS[dtype] % 8 and rng.random() < 0.9 else []
            count = 1
            for size in shape:
                count *= size
            end = begin + count * DTYPE_BITS[dtype] // 8
            offsets = [begin, end]
            if rng.random() < 0.05:
                offsets = [offset + rng.choice([-8, -1, 1, 8]) for offset in offsets]
            elif rng.random() < 0.03:
                offsets[rng.randrange(2)] += rng.choice([-8, -1, 1, 8])
            entry = from_value({"dtype": dtype, "shape": shape, "data_offsets": offsets})
            if isinstance(entry, Object):
                rng.shuffle(entry.pairs)
            fields.append((json.dumps(name, ensure_ascii=rng.random() < 0.5), entry))
            begin = end
        if rng.random() < 0.4:
            fields.append(('"__metadata__"', from_value(rng.choice([{}, {"format": "pt"}, {"a": "1", "größe": "é"}]))))
        if rng.random() < 0.5:
            rng.shuffle(fields)
        return _file(write(Object(fields), rng), begin)

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """Another structure, other bytes, another length, or other data."""
        header, num_data = _parts(data)
        way = rng.random()
        if way < 0.06:
            return damage(data, rng)
        if way < 0.10:
            length = rng.choice(
                [len(header) + rng.choice([-1, 1, 8]), rng.randrange(2**16), 2**63, 100_000_001, 2**64 - 1]
            )
            return struct.pack("<Q", max(length, 0)) + data[8:]
        if way < 0.16:
            return _file(header, max(num_data + rng.choice([-8, -1, 1, 8]), 0))
        if way < 0.30:
            return _file(damage(header, rng), num_data)
        if way < 0.36:
            return _file(header + rng.choice([b" ", b"   ", b"\n", b"\0", b"\t\r", b"\x0b"]), num_data)
        tree = parse(header)
        if isinstance(tree, Object) and tree.pairs and rng.random() < 0.3:
            _shift(tree, rng)
        elif tree is not None:
            tree = mutate(tree, rng, _TOKENS)
        return _file(damage(header, rng) if tree is None else write(tree, rng), num_data)

    def check(self, data: bytes) -> Outcome:
        """By `read_header` and by `parse_header`, against `safetensors.deserialize`."""
        raw, num_data = _parts(data)
        theirs = _deserialized(data)
        whole = _kconvert_reads(data)
        is_framed = len(data) >= 8 and struct.unpack("<Q", data[:8])[0] == len(raw)
        alone = _kconvert_parses(raw, num_data) if is_framed else None
        if theirs is None and (whole is not None or alone is not None):
            raise Fault(f"accepted by {'read_header' if whole is not None else 'parse_header'}, refused by safetensors")
        if theirs is None:
            return "refused"
        if whole != alone:
            raise Fault("read_header and parse_header differ though safetensors accepts")
        if whole is None:
            return "refused by kconvert alone"
        _compare(whole, theirs, data)
        return "accepted"


def _file(header: bytes, num_data: int) -> bytes:
    return (
        struct.pack("<Q", len(header))
        + header
        + bytes(number % 251 for number in range(min(num_data, _MAX_DATA_BYTES)))
    )


def _parts(data: bytes) -> tuple[bytes, int]:
    """The JSON, as far as it is there, and the number of bytes behind it."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    header = data[8 : 8 + min(length, len(data))]
    return header, max(len(data) - 8 - len(header), 0)


def _shift(tree: Object, rng: Random) -> None:
    """Both offsets of a tensor moved, or swapped with those of another."""
    found = [
        pair
        for _, entry in tree.pairs
        if isinstance(entry, Object)
        for pair in entry.pairs
        if pair[0] == '"data_offsets"' and isinstance(pair[1], Array)
    ]
    if not found:
        return
    offsets = rng.choice(found)[1]
    other = rng.choice(found)[1]
    if not isinstance(offsets, Array) or not isinstance(other, Array):
        return
    if rng.random() < 0.3:
        offsets.items, other.items = other.items, offsets.items
        return
    step = rng.choice([-8, -4, -1, 1, 4, 8, 2**32, 2**63])
    offsets.items = [str(int(item) + step) if is_number(item) else item for item in offsets.items]


def _deserialized(data: bytes) -> list[tuple[str, dict[str, object]]] | None:
    try:
        return list(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError:
        return None


def _kconvert_reads(data: bytes) -> Header | None:
    with MemoryFile.opened() as file:
        file.fill(data)
        try:
            return read_header(file.path)
        except CheckpointError as error:
            check_refusal(error, 4)
            return None


def _kconvert_parses(raw: bytes, num_data: int) -> Header | None:
    try:
        return parse_header(raw, data_bytes=num_data, where="x.safetensors")
    except CheckpointError as error:
        check_refusal(error, 4)
        return None


def _compare(ours: Header, theirs: list[tuple[str, dict[str, object]]], data: bytes) -> None:
    entries = {
        entry.name: (entry.dtype, list(entry.shape), data[entry.offset : entry.offset + entry.size_bytes])
        for entry in ours.tensors
    }
    expected = {
        name: (fields["dtype"], fields["shape"], bytes(fields["data"]))  # type: ignore[call-overload]
        for name, fields in theirs
    }
    if entries != expected or len(entries) != len(ours.tensors):
        raise Fault("names, dtypes, shapes or bytes are not those that safetensors reads")
