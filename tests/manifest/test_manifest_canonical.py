"""Canonical JSON: the same value, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.manifest import OmittedRecord, canonical_json, sha256_digest, unique_pairs

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


def turned(value: object) -> object:
    """The same value, every mapping filled in the other order."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return [turned(item) for item in value] if isinstance(value, list) else value


@given(VALUES)
def test_order_of_keys_does_not_matter_and_nothing_is_lost(value: object) -> None:
    data = canonical_json(value)
    assert canonical_json(turned(value)) == data
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data
    assert data.endswith(b"\n")


def test_text_is_written_as_it_is() -> None:
    assert canonical_json({"b": "größer", "a": 1}) == '{\n "a": 1,\n "b": "größer"\n}\n'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


def test_dataclasses_are_objects_and_nothing_else_is() -> None:
    record = OmittedRecord(name="a", reason="b")
    assert canonical_json({"c": [record]}) == b'{\n "c": [\n  {"name": "a", "reason": "b"}\n ]\n}\n'
    for value in ({1}, Path("a"), object()):
        with pytest.raises(TypeError, match="is not JSON"):
            canonical_json({"c": value})


def test_digest() -> None:
    assert sha256_digest(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_unique_pairs() -> None:
    assert json.loads('{"a": {"b": 1}, "b": 2}', object_pairs_hook=unique_pairs) == {"a": {"b": 1}, "b": 2}
    with pytest.raises(ValueError, match="key 'b' stands twice"):
        json.loads('{"a": {"b": 1, "b": 1}}', object_pairs_hook=unique_pairs)
