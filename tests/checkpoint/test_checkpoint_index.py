"""The index: S1's names are refused before anything is opened, and what is written does not depend on order."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.checkpoint import build_index, index, read_index
from kconvert.errors import CheckpointError


def _write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors", "/abs/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", "a\\x.safetensors",
        "x\0.safetensors", "a//x.safetensors", "./x.safetensors", "sub/", "", ".", "..", " x.safetensors",
        "x\n.safetensors", "\ud800.safetensors", None, 3, ["x.safetensors"], {"file": "x.safetensors"}, True,
        "x.bin", "x", "x.safetensors.py", "sub", ".safetensors/..",
    ],
)  # fmt: skip
def test_a_bad_file_name_is_refused_by_name(name: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "model.safetensors.index.json", {"weight_map": {"good": "x.safetensors", "bad.t": name}})
    with pytest.raises(CheckpointError) as caught:
        read_index(path)
    assert "model.safetensors.index.json" in str(caught.value)
    assert "bad.t" in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "{", "null", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"a": "x.safetensors"}, "weight_map": {"a": "y.safetensors"}}',
        '{"metadata": [], "weight_map": {"a": "x.safetensors"}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_index(path)


def test_an_index_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(b'{"weight_map": {"a\xff": "x.safetensors"}}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_index(path)


def test_an_index_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "i.json", {"weight_map": {"a": "x.safetensors"}})
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", path.stat().st_size)
    assert read_index(path).weight_map == {"a": "x.safetensors"}
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="larger than"):
        read_index(path)


@pytest.mark.parametrize("metadata", [{}, {"total_size": 1.5}, {"total_size": "x"}, {"other": 1}, None])
def test_total_size_is_optional_and_not_trusted(metadata: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "i.json", {"metadata": metadata, "weight_map": {"a": "sub/x.safetensors"}})
    result = read_index(path)
    assert result.metadata == (metadata or {})
    assert result.weight_map == {"a": "sub/x.safetensors"}


def test_raw_is_the_text_exactly(tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    path.write_bytes(b'{\r\n  "weight_map": {"\xc3\xa4": "x.safetensors"} }\n\n')
    assert read_index(path).raw.encode() == path.read_bytes()


@given(
    weight_map=st.dictionaries(st.text(), st.sampled_from(["x.safetensors", "y.safetensors"]), min_size=1),
    seed=st.integers(0, 100),
)
def test_a_built_index_is_read_back_and_ignores_the_order(
    tmp_path_factory: pytest.TempPathFactory, weight_map: dict[str, str], seed: int
) -> None:
    shuffled = list(weight_map.items())
    Random(seed).shuffle(shuffled)
    text = build_index(weight_map, 12)
    assert build_index(dict(shuffled), 12) == text
    assert json.dumps(json.loads(text), indent=2) + "\n" == text
    path = tmp_path_factory.mktemp("index") / "i.json"
    path.write_text(text)
    assert read_index(path).weight_map == weight_map
    assert read_index(path).metadata == {"total_size": 12}


def test_a_built_index_of_nothing() -> None:
    assert json.loads(build_index({}, 0)) == {"metadata": {"total_size": 0}, "weight_map": {}}


def test_a_built_index_counts_layers_as_numbers() -> None:
    text = build_index({"layers.10.w": "b.safetensors", "layers.2.w": "a.safetensors"}, 7)
    assert text == (
        '{\n  "metadata": {\n    "total_size": 7\n  },\n  "weight_map": {\n'
        '    "layers.2.w": "a.safetensors",\n    "layers.10.w": "b.safetensors"\n  }\n}\n'
    )
