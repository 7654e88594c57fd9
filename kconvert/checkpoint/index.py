"""The index of a sharded checkpoint: `weight_map` from tensor name to file name.

Every file name is checked as text before anything is opened: absolute names, `..`, backslashes, NUL bytes and
names that are no `.safetensors` file are refused, `sub/x.safetensors` is legal.  `metadata` and its `total_size`
are optional and nothing is decided by them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kconvert.checkpoint.header import file_problem, parse_json_object
from kconvert.errors import CheckpointError
from kconvert.names import natural_key, unsafe_name_reason

__all__ = ["Index", "build_index", "parse_index", "read_index"]

MAX_INDEX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Index:
    """`raw` is the text exactly as in the file; `metadata` is empty where the file has none."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]
    raw: str


def read_index(path: Path) -> Index:
    """Read an index and check every name in it; opens no shard.

    Raises:
        CheckpointError: missing, too large, not valid JSON, no weight map, or a file name that is refused.
    """
    return parse_index(read_bounded(path, MAX_INDEX_BYTES), where=str(path))


def parse_index(raw: bytes, *, where: str) -> Index:
    """Parse the text of an index; `where` names its file in errors."""
    fields = parse_json_object(raw, what="index", where=where)
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        _refuse("metadata is not a JSON object", where)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse("weight_map is missing, empty or not a JSON object", where)
    seen: set[str] = set()
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in seen:
            _check_file_name(tensor, file_name, where)
            seen.add(file_name)
    return Index(weight_map=weight_map, metadata=metadata or {}, raw=raw.decode("utf-8"))


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file (links followed) that may not be larger than `most_bytes`."""
    problem = file_problem(path)
    if problem:
        raise CheckpointError(problem, where=str(path), fix="download the checkpoint again")
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if len(raw) > most_bytes:
        raise CheckpointError(f"larger than the {most_bytes} bytes allowed", where=str(path))
    return raw


def _check_file_name(tensor: str, file_name: object, where: str) -> None:
    reason = unsafe_name_reason(file_name)
    if reason:
        _refuse(f"weight_map maps {tensor!r} to the file name {file_name!r}, which is refused: {reason}", where)
    if not str(file_name).endswith(".safetensors"):
        _refuse(f"weight_map maps {tensor!r} to {file_name!r}, which is not a .safetensors file", where)


def _refuse(what: str, where: str) -> NoReturn:
    raise CheckpointError(what, where=where, fix="repair the index or download the checkpoint again")


def build_index(weight_map: Mapping[str, str], total_size_bytes: int) -> str:
    """The text of an index: same map, same text, whatever the order of the map.

    Args:
        weight_map: tensor name to file name, e.g. `{"lm_head.weight": "model-00001-of-00002.safetensors"}`.
        total_size_bytes: sum of the tensors' bytes, headers not counted.
    """
    ordered = {name: weight_map[name] for name in sorted(weight_map, key=natural_key)}
    content: dict[str, Mapping[str, str | int]] = {
        "metadata": {"total_size": int(total_size_bytes)},
        "weight_map": ordered,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {_flat_object(value)}" for key, value in content.items())
    return f"{{\n{lines}\n}}\n"


def _flat_object(value: Mapping[str, str | int]) -> str:
    """What `json.dumps(..., indent=2)` makes of an object in an object, in a tenth of the time: only this is done in C."""
    lines = json.dumps(value, separators=(",\n    ", ": "))
    return f"{{\n    {lines[1:-1]}\n  }}" if value else "{}"
