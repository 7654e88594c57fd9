"""Headers: what safetensors writes is read, what is built it reads, and S3's malformed ones are refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file as save_torch

from kconvert.checkpoint import DTYPE_BITS, build_header, header, read_header
from kconvert.checkpoint.header import parse_header
from kconvert.errors import CheckpointError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TEXT = json.dumps(F32)


def _file(text: str | bytes, data_bytes: int = 8, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data_bytes)


def _one(data_bytes: int = 8, **changes: Any) -> bytes:
    fields = {key: value for key, value in {**F32, **changes}.items() if value is not ...}
    return _file(json.dumps({"a": fields}), data_bytes)


def _spans(data_bytes: int, *spans: tuple[int, int]) -> bytes:
    fields = {
        f"t{number}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for number, (begin, end) in enumerate(spans)
    }
    return _file(json.dumps(fields), data_bytes)


MALFORMED = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "length 2**63": _file(json.dumps({"a": F32}), length=2**63),
    "length beyond the file": _file(json.dumps({"a": F32}), length=10_000),
    "length over the limit": _file(json.dumps({"a": F32}), length=100_000_001),
    "length zero": _file("", length=0),
    "overlap": _spans(8, (0, 6), (4, 8)),
    "overlap as long as the data": _spans(10, (0, 6), (4, 8)),
    "same span twice": _spans(8, (0, 8), (0, 8)),
    "hole between": _spans(8, (0, 4), (6, 8)),
    "hole made up by an overlap": _spans(10, (0, 4), (6, 10), (8, 10)),
    "hole at the start": _one(16, data_offsets=[8, 16]),
    "trailing bytes": _one(9),
    "truncated data": _one(7),
    "no tensor but data": _file("{}", 4),
    "duplicate tensor": _file('{"a":' + TEXT + ',"a":' + TEXT + "}"),
    "duplicate field": _file('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "duplicate metadata": _file('{"__metadata__":{},"__metadata__":{},"a":' + TEXT + "}"),
    "duplicate metadata key": _file('{"__metadata__":{"x":"1","x":"2"},"a":' + TEXT + "}"),
    "shape 2**32 x 2**32": _one(shape=[2**32, 2**32]),
    "shape wraps to zero": _one(shape=[2**32, 2**32], data_offsets=[0, 0]),
    "offset 2**64": _one(data_offsets=[2**64 - 8, 2**64]),
    "offsets reversed": _one(data_offsets=[8, 0]),
    "one offset": _one(data_offsets=[8]),
    "three offsets": _one(data_offsets=[0, 8, 8]),
    "size does not match": _one(shape=[3]),
    "negative dim": _one(shape=[-2]),
    "negative dims with a positive product": _one(shape=[-1, -2]),
    "bool dim": _one(data_offsets=[0, 4], shape=[True], data_bytes=4),
    "float dim": _one(shape=[2.0]),
    "string dim": _one(shape=["2"]),
    "shape null": _one(shape=None),
    "negative offset": _one(data_offsets=[-8, 0]),
    "bool offset": _one(data_bytes=1, dtype="U8", shape=[1], data_offsets=[False, True]),
    "unknown dtype": _one(dtype="F99"),
    "dtype in lower case": _one(dtype="f32"),
    "dtype a number": _one(dtype=32),
    "dtype missing": _one(dtype=...),
    "shape missing": _one(shape=...),
    "offsets missing": _one(data_offsets=...),
    "unknown field": _one(strides=[1]),
    "half a byte": _one(dtype="F4", shape=[3], data_offsets=[0, 1], data_bytes=1),
    "tensor a list": _file('{"a":[]}', 0),
    "metadata a number": _file('{"__metadata__":{"x":1}}', 0),
    "metadata a list": _file('{"__metadata__":[]}', 0),
    "metadata null": _file('{"__metadata__":null}', 0),
    "metadata nested": _file('{"__metadata__":{"x":{}}}', 0),
    "an array": _file("[]", 0),
    "blank first": _file(" {}", 0),
    "no JSON": _file("{", 0),
    "two documents": _file("{}{}", 0),
    "not UTF-8": _file(b'{"\xff":{}}', 0),
    "lone surrogate": _file('{"\\ud800":' + TEXT + "}"),
    "NaN": _file('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
    "endless number": _file('{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % ("9" * 5000)),
    "deep nesting": _file('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0),
    "BOM": _file(b"\xef\xbb\xbf{}", 0),
}


@pytest.mark.parametrize("own_parser_alone", [False, True], ids=["both checks", "own parser"])
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_header_is_refused_with_the_file_name(
    case: str, own_parser_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(MALFORMED[case])
    if own_parser_alone:
        monkeypatch.setattr(header, "_check_with_safetensors", lambda path: None)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "model-00001-of-00002.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_safetensors_is_asked_first(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(MALFORMED["overlap"])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: safetensors refuses the file: .+"):
        read_header(path)


def test_a_long_header_is_refused_by_its_length_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    with path.open("ab") as file:
        file.truncate(200_000_000)  # a sparse file
    monkeypatch.setattr(header, "_check_with_safetensors", lambda path: None)
    with pytest.raises(CheckpointError, match="more than the 100000000 allowed"):
        read_header(path)


def test_an_empty_tensor_may_be_listed_after_the_one_that_begins_where_it_does(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(_spans(8, (0, 8), (0, 0), (8, 8)))
    assert [entry.name for entry in read_header(path).tensors] == ["t1", "t0", "t2"]


def test_the_sound_neighbour_of_the_malformed_headers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(_one())
    (entry,) = read_header(path).tensors
    assert (entry.name, entry.dtype, entry.shape, entry.size_bytes) == ("a", "F32", (2,), 8)


@pytest.mark.parametrize("kind", ["missing", "folder", "broken link", "pipe"])
def test_what_is_no_regular_file_is_refused_without_opening_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    word = {"missing": "missing", "broken link": "broken link"}.get(kind, "not a regular file")
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: is .*{word.split()[-1]}"):
        read_header(path)


def test_a_git_lfs_pointer_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(path)


def test_every_dtype_of_safetensors_is_read(tmp_path: Path) -> None:
    for dtype, bits in DTYPE_BITS.items():
        path = tmp_path / f"{dtype}.safetensors"
        path.write_bytes(_one(bits, dtype=dtype, shape=[2, 4], data_offsets=[0, bits]))
        assert read_header(path).tensors[0].size_bytes == bits
    assert len(DTYPE_BITS) == 22


def test_what_torch_saves_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "scale": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
    }
    save_torch(tensors, path, metadata={"format": "pt"})
    result = read_header(path)
    data = path.read_bytes()
    assert result.metadata == {"format": "pt"}
    assert data[8 : result.data_offset] == result.raw
    assert {entry.name: entry.shape for entry in result.tensors} == {
        "scale": (), "empty": (0, 3), "weight": (2, 3), "fp8": (4,),
    }  # fmt: skip
    for entry in result.tensors:
        expected = tensors[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[entry.offset : entry.offset + entry.size_bytes] == expected
    assert [entry.offset for entry in result.tensors] == sorted(entry.offset for entry in result.tensors)


def test_metadata_is_none_where_the_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_numpy({"a": np.zeros(3, dtype=np.int64)}, path)
    assert read_header(path).metadata is None


def _sizes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 5), max_size=4)


@st.composite
def _layouts(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], int]]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True, max_size=6))
    tensors = []
    for name in names:
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(_sizes())
        if DTYPE_BITS[dtype] % 8:
            shape = [*shape, 8]
        tensors.append((name, dtype, tuple(shape), int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8))
    return [tensor for tensor in tensors if tensor[0] != "__metadata__"]


_texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(tensors=_layouts(), metadata=st.none() | st.dictionaries(_texts, _texts, max_size=3))
def test_a_built_header_is_read_back_by_both_parsers(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, str, tuple[int, ...], int]],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("built") / "x.safetensors"
    prefix = build_header(tensors, metadata)
    path.write_bytes(prefix + bytes(sum(tensor[3] for tensor in tensors)))
    result = read_header(path)
    assert [(e.name, e.dtype, e.shape, e.size_bytes) for e in result.tensors] == tensors
    assert result.metadata == metadata
    assert len(prefix) % 64 == 0
    assert result.data_offset == len(prefix)
    offset = len(prefix)
    for entry in result.tensors:
        assert entry.offset == offset
        offset += entry.size_bytes
    with safe_open(str(path), framework="np") as file:
        assert set(file.keys()) == {tensor[0] for tensor in tensors}


@given(data=st.binary(max_size=80))
def test_any_bytes_are_read_or_refused_cleanly(data: bytes) -> None:
    message, size_bytes = "", 0
    try:
        result = parse_header(b"{" + data, data_bytes=0, where="x.safetensors")
        size_bytes = sum(entry.size_bytes for entry in result.tensors)
    except CheckpointError as error:
        message = str(error)
    assert message == "" or message.startswith("x.safetensors: ")
    assert size_bytes == 0


def test_the_built_bytes_are_compact_with_the_metadata_first() -> None:
    built = build_header([("b", "F32", (2,), 8), ("a", "U8", (), 1)], {"z": "1", "format": "pt"})
    text = (
        '{"__metadata__":{"format":"pt","z":"1"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"a":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    )
    assert built[8:].rstrip(b" ").decode() == text
    assert struct.unpack("<Q", built[:8])[0] == len(built) - 8


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", "F32", (2,), 7)],
        [("a", "F99", (2,), 8)],
        [("a", "U8", (1,), 1), ("a", "U8", (1,), 1)],
        [("__metadata__", "U8", (1,), 1)],
        [("\ud800", "U8", (1,), 1)],
        [("a", "F4", (3,), 1)],
        [("a", "U8", (-1,), -1)],
    ],
    ids=["size", "dtype", "twice", "reserved", "surrogate", "half a byte", "negative"],
)
def test_a_header_that_could_not_be_read_is_not_built(tensors: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    with pytest.raises(CheckpointError):
        build_header(tensors, None)


def test_metadata_that_could_not_be_read_is_not_built() -> None:
    with pytest.raises(CheckpointError, match="is not an object of strings"):
        build_header([], {"format": 1})  # type: ignore[dict-item]


def test_a_header_over_the_limit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 100)
    tensors = [(f"t{number}", "U8", (1,), 1) for number in range(5)]
    assert len(build_header(tensors[:1])) <= 108
    with pytest.raises(CheckpointError, match="smaller shards"):
        build_header(tensors)
