"""What is too large, too long or only nearly a number: headers, indexes and configs from elsewhere."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, deserialize, safe_open

from kconvert.checkpoint import header, open_checkpoint, read_header, read_index, reader
from kconvert.checkpoint.header import parse_header
from kconvert.errors import CheckpointError
from tests.checkpoint.conftest import ModelDir


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":[1, -0 ],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,-0]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,-0]},"__metadata__":{"b":"-0"}}',
    ],
)
def test_minus_zero_is_no_size(text: str) -> None:
    """To Python it is 0, to safetensors a float."""
    raw = text.encode()
    with pytest.raises(SafetensorError):
        deserialize(struct.pack("<Q", len(raw)) + raw)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match="-0 is no size"):
        parse_header(raw, data_bytes=0, where="x.safetensors")


@pytest.mark.parametrize("name", ["-0", "a-0.b", "layer-01"])
def test_minus_zero_in_a_name_is_read(name: str) -> None:
    fields = {"__metadata__": {"-0": name}, name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    raw = json.dumps(fields).encode()
    found = parse_header(raw, data_bytes=2, where="x.safetensors")
    assert [entry.name for entry in found.tensors] == [name]
    theirs = deserialize(struct.pack("<Q", len(raw)) + raw + bytes(2))  # type: ignore[no-untyped-call]
    assert [each for each, _ in theirs] == [name]


def test_a_header_text_over_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 10)
    monkeypatch.setattr(header, "parse_json_object", None)
    with pytest.raises(CheckpointError, match="header of 11 bytes, more than the 10 allowed"):
        parse_header(b"{         }", data_bytes=0, where="x.safetensors")


def test_a_config_over_the_limit_is_refused(model: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    model.weights("model.safetensors", "a")
    size = (model.path / "config.json").stat().st_size
    monkeypatch.setattr(reader, "MAX_CONFIG_BYTES", size)
    assert open_checkpoint(model.path).model_type == "llama"
    monkeypatch.setattr(reader, "MAX_CONFIG_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=r"config\.json: larger than"):
        open_checkpoint(model.path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_an_endless_file_is_not_read(model: ModelDir, name: str) -> None:
    model.sharded()
    (model.path / name).unlink(missing_ok=True)
    (model.path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_checkpoint(model.path)


LONG = "n" * 3_000_000


def _read_with_a_long_name(what: str, model: ModelDir) -> None:
    entry = {"dtype": LONG if what == "dtype" else "U8", "shape": [], "data_offsets": [0, 1]}
    texts = {
        "tensor": json.dumps({LONG: 1}),
        "dtype": json.dumps({"a": entry}),
        "key twice": f'{{"{LONG}":1,"{LONG}":1}}',
    }
    if what in texts:
        parse_header(texts[what].encode(), data_bytes=1, where="x.safetensors")
    model.index({LONG: "x.bin"} if what == "indexed tensor" else {"a": LONG})
    read_index(model.path / "model.safetensors.index.json")


@pytest.mark.parametrize("what", ["tensor", "dtype", "key twice", "indexed tensor", "file"])
def test_a_name_as_long_as_its_file_does_not_fill_the_screen(what: str, model: ModelDir) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read_with_a_long_name(what, model)
    message = str(caught.value)
    assert len(message) < 5000
    assert "\n" not in message
    assert message.endswith(("download or save the file again", "repair the index or download the checkpoint again"))


def test_a_tensor_of_a_terabyte_costs_nothing() -> None:
    fields = {"a": {"dtype": "F8_E4M3", "shape": [2**20, 2**20], "data_offsets": [0, 2**40]}}
    raw = json.dumps(fields).encode()
    descriptor = os.memfd_create("sparse")
    try:
        os.write(descriptor, struct.pack("<Q", len(raw)) + raw)
        os.truncate(descriptor, 8 + len(raw) + 2**40)
        path = Path(f"/proc/self/fd/{descriptor}")
        (entry,) = read_header(path).tensors
        assert (entry.size_bytes, entry.offset) == (2**40, 8 + len(raw))
        os.truncate(descriptor, 8 + len(raw) + 2**40 + 1)
        with pytest.raises(CheckpointError, match="safetensors refuses"):
            read_header(path)
        with pytest.raises(SafetensorError), safe_open(str(path), framework="np"):
            pass
    finally:
        os.close(descriptor)


def test_names_that_differ_only_to_unicode_are_different_tensors(tmp_path: Path) -> None:
    names = ["é", "e\u0301", "E\u0301", "\u212b", "å", "a\u030a", "ﬁ", "fi", "\u200b", "", " ", "名" * 20_000]
    fields = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]} for number, name in enumerate(names)
    }
    raw = json.dumps(fields, ensure_ascii=False).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(range(len(names))))
    assert [entry.name for entry in read_header(path).tensors] == names
    with safe_open(str(path), framework="np") as file:
        assert set(file.keys()) == set(names)
