"""Canonical JSON and digests: the same value always gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

__all__ = ["canonical_items", "canonical_json", "canonical_parts", "sha256_digest", "sha256_of", "unique_pairs"]


def canonical_json(value: Any) -> bytes:
    """`value` as UTF-8 JSON with sorted keys, ending in a newline; a dataclass is an object, and NaN is refused.

    For people, an object has a line for each key, and for each item of a list in it; what is deeper shares its line.
    """
    return b"".join(canonical_parts(canonical_items(value))) if isinstance(value, dict) else _line(value) + b"\n"


def canonical_items(value: Mapping[str, Any]) -> dict[str, bytes]:
    """Each key of an object to the canonical JSON of its value."""
    return {key: _value(item) for key, item in value.items()}


def canonical_parts(items: Mapping[str, bytes]) -> Iterator[bytes]:
    """The canonical JSON of an object out of its `canonical_items`, which may be too large to be held twice."""
    yield b"{" if items else b"{}"
    for number, key in enumerate(sorted(items)):
        yield b",\n " if number else b"\n "
        yield _line(key) + b": "
        yield items[key]
    yield b"\n}\n" if items else b"\n"


def _value(value: Any) -> bytes:
    if not (isinstance(value, list | tuple) and value):
        return _line(value)
    return b"[\n  " + b",\n  ".join(map(_line, value)) + b"\n ]"


def _line(value: Any) -> bytes:
    # without an indent: only so is it done in C, which counts for 100,000 tensors
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, default=_fields).encode()


def _fields(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return vars(value)  # none of them caches anything in itself


def sha256_digest(data: bytes) -> str:
    """`sha256:<hex>` of `data`."""
    return sha256_of((data,))


def sha256_of(parts: Iterable[bytes]) -> str:
    """`sha256:<hex>` of the parts one after another."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return f"sha256:{hasher.hexdigest()}"


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for `json.loads` that refuses a key given twice.

    Raises:
        ValueError: naming the key.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found
