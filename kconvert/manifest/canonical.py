"""Canonical JSON and digests: the same value always gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "sha256_digest", "unique_pairs"]


def canonical_json(value: Any) -> bytes:
    """`value` as UTF-8 JSON with sorted keys, ending in a newline; NaN is refused.

    For people, an object has a line for each key, and for each item of a list in it; what is deeper shares its line.
    """
    if not isinstance(value, dict):
        return f"{_line(value)}\n".encode()
    lines = ",\n".join(f" {_line(key)}: {_value(value[key])}" for key in sorted(value))
    return (f"{{\n{lines}\n}}\n" if lines else "{}\n").encode()


def _value(value: Any) -> str:
    if not (isinstance(value, list | tuple) and value):
        return _line(value)
    items = ",\n".join(f"  {_line(item)}" for item in value)
    return f"[\n{items}\n ]"


def _line(value: Any) -> str:
    # without an indent: only so is it done in C, which counts for 100,000 tensors
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def sha256_digest(data: bytes) -> str:
    """`sha256:<hex>` of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


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
