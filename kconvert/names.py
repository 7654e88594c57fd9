"""File names that more than one layer must agree on, and the rule for names that come from data files.

Weights are written under transformers' `variant` convention, so that a stock `from_pretrained` on a
converted directory finds no file it knows and stops, instead of starting with random weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeAlias

__all__ = [
    "CONFIG_NAME",
    "DEVICES",
    "INDEX_NAME",
    "KERNELS_DIR",
    "MANIFEST_NAME",
    "PARITY_NAME",
    "SINGLE_NAME",
    "SOURCE_HEADERS_NAME",
    "STOCK_INDEX_NAME",
    "STOCK_SINGLE_NAME",
    "VARIANT",
    "NaturalKey",
    "is_own_name",
    "is_stock_weight_name",
    "modules_above",
    "natural_key",
    "near_misses",
    "parents",
    "printable",
    "shard_name",
    "starred",
    "unsafe_name_reason",
]

VARIANT = "kconvert"
CONFIG_NAME = "config.json"
MANIFEST_NAME = "kconvert_manifest.json"
PARITY_NAME = "kconvert_parity.json"
SOURCE_HEADERS_NAME = "kconvert_source_headers.json.gz"
KERNELS_DIR = "kconvert_kernels"
SINGLE_NAME = f"model.{VARIANT}.safetensors"
INDEX_NAME = f"model.safetensors.index.{VARIANT}.json"
STOCK_SINGLE_NAME = "model.safetensors"
STOCK_INDEX_NAME = "model.safetensors.index.json"

DEVICES = ("cpu", "cuda", "npu")
"""The device types that kconvert has kernels for, and that a recipe can have entries for."""

_SHARD = re.compile(
    r"(?:model|pytorch_model|adapter_model|consolidated|tf_model|flax_model)[-.]?\d*(?:-of-\d+)?\.[a-z0-9]+"
)
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot", ".pkl", ".pickle")


def shard_name(number: int, total: int) -> str:
    """The name of output shard `number` (from 1) of `total`, e.g. `model.kconvert-00001-of-00002.safetensors`."""
    return f"model.{VARIANT}-{number:05d}-of-{total:05d}.safetensors"


def is_own_name(name: str) -> bool:
    """Whether a top-level file or folder name is one that kconvert itself writes."""
    own = (MANIFEST_NAME, PARITY_NAME, SOURCE_HEADERS_NAME, KERNELS_DIR, INDEX_NAME)
    return name in own or name.startswith(f"model.{VARIANT}")


def is_stock_weight_name(name: str) -> bool:
    """Whether a stock loader may take the file `name` (no folder) for weights or a weight index.

    `model.safetensors`, its shards and index, `consolidated*.safetensors`, and every pickle or foreign
    weight format; `projector.safetensors` is not one.
    """
    lowered = name.lower()
    if lowered == "adapter_config.json":
        return True  # from_pretrained would follow it to another base model
    if lowered.endswith(_WEIGHT_SUFFIXES) or lowered.endswith(".index.json"):
        return True
    return lowered.endswith(".safetensors") and _SHARD.fullmatch(lowered) is not None


def unsafe_name_reason(name: object) -> str | None:
    """Why a file name out of a data file must not be opened, or None.

    Lexical, before anything is opened; links inside a Hub cache stay legal, and so does `sub/x.safetensors`.
    """
    if not isinstance(name, str):
        return f"not a string: {name!r}"
    if not name or name != name.strip():
        return "empty, or with blanks around it"
    if "\0" in name:
        return "holds a NUL byte"
    if any(ord(letter) < 32 or ord(letter) == 127 or 0xD800 <= ord(letter) <= 0xDFFF for letter in name):
        return "holds a control character, or is not valid UTF-8"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/"):
        return "absolute"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leaves the directory, or holds an empty part"
    return None


NaturalKey: TypeAlias = tuple[tuple[int, int, str], ...]


def natural_key(name: str) -> NaturalKey:
    """A sort key that orders the numbers in a dotted name as numbers: `layers.2` before `layers.10`.

    Different names have different keys (`layers.02` is not `layers.2`), so that a sort never depends on the input
    order.  Digits beyond 18 are text: Python refuses to read an endless number, and a header may hold one.
    """
    return tuple(map(_segment_key, name.split(".")))


@lru_cache(maxsize=1024)  # names that stand near each other have nearly all their segments in common
def _segment_key(part: str) -> tuple[int, int, str]:
    is_number = part.isdecimal() and part.isascii() and len(part) <= 18
    return (0, int(part), part) if is_number else (1, 0, part)


def parents(name: str) -> Iterator[str]:
    """The module paths above a tensor or module, the innermost first: `a.b`, `a` for `a.b.c`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


_MAX_DEPTH = 32
"""The most segments of a module path that is looked at; a header may hold names of millions."""


def modules_above(name: str) -> Iterator[str]:
    """The module paths above a tensor, the outermost first: `a`, `a.b` for `a.b.c`; none of more than 32 segments."""
    end = name.find(".")
    for _ in range(_MAX_DEPTH):
        if end < 0:
            return
        yield name[:end]
        end = name.find(".", end + 1)


def starred(path: str) -> str:
    """A module path with `*` in place of its numbers: `model.layers.*.mlp`."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def printable(name: str) -> str:
    """A file name as text that can be printed and stored: a file system allows bytes that are no UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def near_misses(word: str, known: Iterable[str], *, most: int = 3) -> tuple[str, ...]:
    """The known words nearest to `word`, best first, for the end of an error line."""
    import difflib

    return tuple(difflib.get_close_matches(word, sorted(set(known)), n=most, cutoff=0.6))
