"""The shared rules about file names and tensor names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.names import (
    INDEX_NAME,
    MANIFEST_NAME,
    SINGLE_NAME,
    SOURCE_HEADERS_NAME,
    is_own_name,
    is_stock_weight_name,
    natural_key,
    near_misses,
    shard_name,
    unsafe_name_reason,
)


def test_natural_key_orders_numbers_as_numbers() -> None:
    names = ["layers.10.w", "layers.2.w", "layers.0.w", "embed", "layers.2.a", "layers.x.w", "layers"]
    assert sorted(names, key=natural_key) == [
        "embed",
        "layers",
        "layers.0.w",
        "layers.2.a",
        "layers.2.w",
        "layers.10.w",
        "layers.x.w",
    ]


@pytest.mark.parametrize("name", ["", ".", "a..b", "a.³", "a.٣", "a.-1", "a.1e5", "é.ß"])
def test_natural_key_takes_every_string(name: str) -> None:
    assert natural_key(name) <= natural_key(name)


@given(st.text(alphabet="ab01.", max_size=8), st.text(alphabet="ab01.", max_size=8))
def test_natural_key_tells_names_apart(first: str, second: str) -> None:
    assert (natural_key(first) == natural_key(second)) is (first == second)


def test_natural_key_takes_huge_numbers() -> None:
    assert natural_key("a." + "9" * 5000) != natural_key("a.9")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "sub/x.safetensors", "a b.bin", "..x", "x..", "a/..b/c", ".hidden", "é.safetensors"]
)
def test_safe_names(name: str) -> None:
    assert unsafe_name_reason(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (3, "not a string"),
        (None, "not a string"),
        ("", "empty"),
        (" x", "blanks around"),
        ("x\n", "blanks around"),
        ("a\0b", "NUL"),
        ("\ud800.safetensors", "not valid UTF-8"),
        ("..\\x", "backslash"),
        ("a\\b", "backslash"),
        ("/abs/x.safetensors", "absolute"),
        ("//x", "absolute"),
        ("../evil.safetensors", "leaves the directory"),
        ("a/../../x", "leaves the directory"),
        ("a/..", "leaves the directory"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("./a", "leaves the directory"),
        (".", "leaves the directory"),
        ("..", "leaves the directory"),
    ],
)
def test_unsafe_names(name: object, reason: str) -> None:
    assert reason in (unsafe_name_reason(name) or "")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "MODEL.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "consolidated.00.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.gguf",
        "weights.pt",
        "consolidated.00.pth",
    ],
)
def test_stock_weight_names(name: str) -> None:
    assert is_stock_weight_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "projector.safetensors",
        "model.py",
        "README.md",
        SINGLE_NAME,
        INDEX_NAME,
        MANIFEST_NAME,
        SOURCE_HEADERS_NAME,
        shard_name(1, 2),
    ],
)
def test_other_names_are_no_stock_weights(name: str) -> None:
    assert not is_stock_weight_name(name)


def test_own_names() -> None:
    assert shard_name(1, 12) == "model.kconvert-00001-of-00012.safetensors"
    assert all(map(is_own_name, (SINGLE_NAME, INDEX_NAME, MANIFEST_NAME, SOURCE_HEADERS_NAME, shard_name(3, 4))))
    assert not any(map(is_own_name, ("model.safetensors", "config.json", "kconvert")))


def test_near_misses() -> None:
    assert near_misses("kernals", ["kernel", "replace", "fuse"]) == ("kernel",)
    assert near_misses("zzz", ["kernel"]) == ()
