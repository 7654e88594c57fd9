"""Fuzz target: the manifest of a converted directory.

Every mutation gets a digest that fits, so that what is behind the digest is reached.  Never may a manifest be accepted
that names a file outside of its directory, or whose pieces lose or double an element: that is counted one by one.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from kconvert.errors import ManifestError
from kconvert.manifest import Manifest, canonical_json, load_manifest, sha256_digest
from kconvert.names import MANIFEST_NAME
from tests.fuzz.checkpoints import prepared_manifests
from tests.fuzz.documents import Array, Node, Object, containers_of, damage, is_number, mutate, parse, write
from tests.fuzz.target import Fault, Outcome, check_refusal

__all__ = ["TOKENS", "ManifestTarget", "other_pieces", "pieces_of", "sealed"]

TOKENS = (
    '"replace"',
    '"fuse"',
    '"copy"',
    '"apply"',
    '"F32"',
    '"BF16"',
    '"concatenate(0)"',
    "[0,0,96,1,1]",
    "[0,0]",
    "[]",
)
_MAX_COUNTED = 20_000


class ManifestTarget:
    """Inputs are whole files; they lie in a directory of their own, in memory where there is such a file system."""

    name = "manifest"

    def __init__(self) -> None:
        self._seeds = prepared_manifests()
        base = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=base if base.is_dir() else None)

    def make(self, rng: Random) -> bytes:
        """The manifest of a small conversion, some of its tensors left out."""
        value = json.loads(rng.choice(self._seeds))
        value["tensors"] = rng.sample(value["tensors"], rng.choice([1, 2, 3]))
        value["patches"] = value["patches"][: rng.choice([1, 1, 2])]
        for record in value["tensors"]:
            record["patch"] = 0 if record["patch"] is not None else None
        value["patches"][0]["facts"] = {"Qwen3RMSNorm": {"offset": 0.0, "cast_first": True}}
        del value["digest"]
        return canonical_json({**value, "digest": sha256_digest(canonical_json(value))})

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """Another structure, other pieces, or other bytes; sealed again in most cases."""
        tree = parse(data)
        if tree is None or rng.random() < 0.1:
            data = damage(data, rng)
        else:
            pieces = pieces_of(tree) if rng.random() < 0.35 else []
            if pieces:
                other_pieces(rng.choice(pieces), rng)
            else:
                tree = mutate(tree, rng, TOKENS)
            data = write(tree, rng)
        return sealed(data) if rng.random() < 0.97 else data

    def check(self, data: bytes) -> Outcome:
        """By `load_manifest`."""
        folder = Path(self._folder.name)
        (folder / MANIFEST_NAME).write_bytes(data)
        try:
            manifest = load_manifest(folder)
        except ManifestError as error:
            check_refusal(error, 4)
            return "refused"
        _check_manifest(manifest, folder)
        return "accepted"


def sealed(data: bytes) -> bytes:
    """A manifest with the digest that fits it, or the bytes as they are where none can."""
    tree = parse(data)
    if not isinstance(tree, Object):
        return data
    try:
        value = json.loads(data)
        value.pop("digest", None)
        digest = sha256_digest(canonical_json(value))
    except (ValueError, RecursionError):
        return data
    tree.pairs = [pair for pair in tree.pairs if pair[0] != '"digest"']
    return write(Object([*tree.pairs, ('"digest"', f'"{digest}"')]), Random(len(data)), may_break=False)


def pieces_of(node: Node) -> list[Array]:
    """Every list of pieces in a tree that is not empty."""
    objects = [found for found in containers_of(node) if isinstance(found, Object)]
    lists = [value for found in objects for key, value in found.pairs if key == '"pieces"']
    return [value for value in lists if isinstance(value, Array) and value.items]


def other_pieces(pieces: Array, rng: Random) -> None:
    """One piece as two, or as rows or columns: the same elements in most cases, and in some one too many or too few."""
    at = rng.randrange(len(pieces.items))
    piece = pieces.items[at]
    numbers = [int(item) for item in piece.items if is_number(item)] if isinstance(piece, Array) else []
    if len(numbers) != 5 or numbers[2] < 2:
        return
    source, target, size, source_step, target_step = numbers
    way = rng.randrange(5)
    cut, step = rng.randrange(1, size), rng.choice([-8, -1, 1, 8])
    if way == 0:
        made = [[source, target, cut, source_step, target_step], [source + cut, target + cut, size - cut, 1, 1]]
    elif way == 1 and size % 2 == 0:
        made = [[source, target, size // 2, 2, 2], [source + 1, target + 1, size // 2, 2, 2]]
    elif way == 2:
        rows = next((number for number in (2, 3, 5) if size % number == 0), 1)
        made = [[source, target, size // rows, 1, rows, rows, size // rows, 1]]
    elif way == 3:  # one element twice, and another not at all
        shifted = rng.choice([(-1, 0), (0, -1)])
        made = [[source, target, cut, 1, 1], [source + cut + shifted[0], target + cut + shifted[1], size - cut, 1, 1]]
    else:
        at_number = rng.randrange(5)
        made = [[max(number + step * (place == at_number), 0) for place, number in enumerate(numbers)]]
    lists: list[Node] = [Array([str(number) for number in found]) for found in map(_normal, made)]
    pieces.items = [*pieces.items[:at], *lists, *pieces.items[at + 1 :]]


def _normal(numbers: list[int]) -> list[int]:
    """Without a dim of one step."""
    dims = [numbers[place : place + 3] for place in range(2, len(numbers), 3)]
    return numbers[:2] + [number for dim in dims if dim[0] != 1 for number in dim]


def _check_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    if load_manifest(folder) != manifest:
        raise Fault("what is written is not what was read")
    for name in _file_names(manifest):
        if name.startswith("/") or "\\" in name or "\0" in name or {"..", ".", ""} & set(name.split("/")):
            raise Fault(f"file name {name!r} was accepted")
    _count_elements(manifest)


def _file_names(manifest: Manifest) -> list[str]:
    sidecars: list[Any] = list(manifest.sidecars)
    return [
        *manifest.weight_files,
        *(getattr(item, "name", item) for item in sidecars),
        *(file.name for file in manifest.source_files),
        *(origin.file for record in manifest.tensors for origin in record.origins),
        *([manifest.source_headers] if manifest.source_headers is not None else []),
    ]


def _count_elements(manifest: Manifest) -> None:
    """Every element of a target comes from one place, and every element of a part and of an origin goes to one."""
    exact = [record for record in manifest.tensors if record.exact]
    shapes = [shape for record in exact for shape in (record.shape, *(part.shape for part in record.parts))]
    if sum(math.prod(shape) for shape in shapes) > _MAX_COUNTED:
        return
    used: Counter[tuple[str, str, int]] = Counter()
    wanted: dict[tuple[str, str], int] = {}
    parts = {}
    for record in exact:
        filled: Counter[int] = Counter()
        for part in record.parts:
            wanted["part", part.source] = math.prod(part.shape)
            parts[part.source] = part
            for source, target in _places(part.pieces):
                used["part", part.source, source] += 1
                filled[target] += 1
        _check_filled(filled, math.prod(record.shape), record.target)
    for part in parts.values():
        filled = Counter()
        for origin in part.origins:
            wanted["origin", origin.file_name] = math.prod(origin.shape)
            for source, target in _places(origin.pieces):
                used["origin", origin.file_name, source] += 1
                filled[target] += 1
        _check_filled(filled, math.prod(part.shape), part.source)
    for (kind, name), size in wanted.items():
        if any(used[kind, name, place] != 1 for place in range(size)):
            raise Fault(f"an element of the {kind} {name!r} is nowhere, or in two places")
    if len(used) != sum(wanted.values()):
        raise Fault("an element lies outside")


def _places(pieces: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Where each element stands in the source and in the target."""
    found = []
    for source, target, *rest in pieces:
        dims = [rest[place : place + 3] for place in range(0, len(rest), 3)]
        for steps in product(*(range(size) for size, _, _ in dims)):
            found.append(
                (
                    source + sum(step * dim[1] for step, dim in zip(steps, dims, strict=True)),
                    target + sum(step * dim[2] for step, dim in zip(steps, dims, strict=True)),
                )
            )
    return found


def _check_filled(filled: Counter[int], size: int, name: str) -> None:
    if filled != Counter(range(size)):
        raise Fault(f"{name!r} is not filled once")
