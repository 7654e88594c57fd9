"""Fuzz target: the index of a sharded checkpoint.

Never may a file name be accepted that leads out of the model directory, and what is accepted is what `json` reads.
"""

from __future__ import annotations

import json
import posixpath
from random import Random

from kconvert.checkpoint import read_index
from kconvert.errors import CheckpointError
from tests.fuzz.documents import Object, damage, from_value, mutate, parse, write
from tests.fuzz.target import Fault, MemoryFile, Outcome, check_refusal

__all__ = ["IndexTarget"]

_TENSORS = ("a", "b", "", "model.layers.0.mlp.gate_proj.weight", "größe", "x.10.w", "x.9.w", "x." + "9" * 5000)
_FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "sub/x.safetensors", "名.safetensors")
_PARTS = (
    "..",
    ".",
    "",
    "a",
    " ",
    "~",
    "\\",
    "\0",
    "\n",
    "\x7f",
    "\u202e",
    "\ud800",
    "C:",
    "a" * 300,
    "safetensors",
    "%2e%2e",
)


class IndexTarget:
    """Inputs are whole files."""

    name = "index"

    def make(self, rng: Random) -> bytes:
        """A weight map, with names that are now and then put together from odd parts."""
        files = [rng.choice(_FILES) if rng.random() < 0.7 else _odd_name(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        names = rng.sample(_TENSORS, rng.choice([1, 2, 3, 5]))
        value = {"metadata": {"total_size": 12}, "weight_map": {name: rng.choice(files) for name in names}}
        if rng.random() < 0.3:
            del value["metadata"]
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """Another structure, another name, or other bytes."""
        tree = parse(data)
        if tree is None or rng.random() < 0.15:
            return damage(data, rng)
        if isinstance(tree, Object) and rng.random() < 0.3:
            for key, value in tree.pairs:
                if key == '"weight_map"' and isinstance(value, Object):
                    value.pairs.append((json.dumps(rng.choice(_TENSORS)), from_value(_odd_name(rng))))
            return write(tree, rng)
        return write(mutate(tree, rng), rng)

    def check(self, data: bytes) -> Outcome:
        """By `read_index`, against `json` and the path arithmetic of `posixpath`."""
        with MemoryFile.opened() as file:
            file.fill(data)
            try:
                index = read_index(file.path)
            except CheckpointError as error:
                check_refusal(error, 4)
                return "refused"
        if index.weight_map != json.loads(data)["weight_map"] or index.raw.encode() != data:
            raise Fault("what was read is not what the file says")
        for name in index.weight_map.values():
            if _leads_out(name):
                raise Fault(f"file name {name!r} was accepted")
        return "accepted"


def _odd_name(rng: Random) -> str:
    return rng.choice(["/", "/", "\\", "//"]).join(rng.choices(_PARTS, k=rng.choice([1, 2, 3]))) + rng.choice(
        [".safetensors", ".safetensors", "/x.safetensors", "", ".bin", ".safetensors\0", ".safetensors/.."]
    )


def _leads_out(name: str) -> bool:
    """Whether a name, put behind a folder, is anything but a plain file path below it."""
    whole = posixpath.join("/models/mine", name)
    is_plain = posixpath.normpath(whole) == whole == f"/models/mine/{name}"
    is_odd = not name.endswith(".safetensors") or "\\" in name or any(ord(letter) < 32 for letter in name)
    return is_odd or not is_plain
