"""Canonical JSON and digests: the same value always gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "sha256_digest", "unique_pairs"]


def canonical_json(value: Any) -> bytes:
    """`value` as UTF-8 JSON with sorted keys, indented for people, ending in a newline; NaN is refused."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1, allow_nan=False)
    return (text + "\n").encode()


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
