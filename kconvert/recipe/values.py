"""YAML nodes to plain values, with the line of every key and value.

A mapping becomes a `PlacedDict`, a sequence a tuple, a scalar a str, int or bool, and nothing `EMPTY`.
Scalars are read as in YAML 1.2 or stricter: only `true` and `false` are booleans, only plain decimal digits
are numbers, and everything else (`on`, `no`, `1.0`, `010`) is the string that was written.

Refused, all of them at once: merge keys, duplicate keys, keys that are not strings, and long strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

__all__ = ["EMPTY", "Loc", "PlacedDict", "Problem", "ValueReader", "describe", "retype"]

_MAX_STRING = 1000
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")

Loc = tuple[str | int, ...]
"""Where a value lies, as pydantic says it: `("patches", 0, "replace", "path")`."""


class _Empty:
    """The value of a key with nothing behind it (`replace:`); no field accepts it."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY = _Empty()


class PlacedDict(dict[str, Any]):
    """A mapping of the recipe file together with the place where it starts."""

    def __init__(self, line: int, where: str) -> None:
        self.line, self.where = line, where
        super().__init__()


@dataclass(frozen=True, order=True)
class Problem:
    """One fault; sorted by line, and on one line an unknown key (rank 0) before what follows from it."""

    line: int
    rank: int
    what: str
    fix: str


class ValueReader:
    """Reads the nodes of one recipe.

    Attributes:
        problems: the faults found, in no order.
        lines: the line on which to look for each value.
        key_lines: the line of each key.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.problems: list[Problem] = []
        self.lines: dict[Loc, int] = {}
        self.key_lines: dict[Loc, int] = {}

    def read(self, node: Node, loc: Loc = ()) -> Any:
        """The value of `node`, which lies at `loc`."""
        line = node.start_mark.line + 1
        # A scalar is looked for on its own line, a block under a key on the line of the key.
        self.lines[loc] = line if isinstance(node, ScalarNode) else self.key_lines.get(loc, line)
        if isinstance(node, MappingNode):
            return self._read_mapping(node, loc)
        if isinstance(node, SequenceNode):
            return tuple(self.read(item, (*loc, number)) for number, item in enumerate(node.value))
        return self._read_scalar(node)

    def line_of(self, loc: Loc) -> int:
        """The line of `loc`, or of the nearest thing around it."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines[loc]

    def _read_mapping(self, node: MappingNode, loc: Loc) -> PlacedDict:
        line = self.lines[loc]
        made = PlacedDict(line, f"{self._where}:{line}")
        for key_node, value_node in node.value:
            key = self._read_key(key_node)
            if key is None:
                continue
            inner = (*loc, key)
            if key in made:
                self._add(
                    key_node, f"key {key!r} appears twice, first on line {self.key_lines[inner]}", "keep one of them"
                )
                continue
            self.key_lines[inner] = key_node.start_mark.line + 1
            made[key] = self.read(value_node, inner)
        return made

    def _read_key(self, node: Node) -> str | None:
        if not isinstance(node, ScalarNode):
            self._add(node, "a key must be a string, not a list or mapping", "quote values that hold { } [ ]")
            return None
        if node.style is None and node.value == "<<":
            self._add(node, "merge key '<<' is not allowed", "write the keys out")
            return None
        key = self._read_scalar(node)
        if isinstance(key, str):
            return key
        self._add(node, f"a key must be a string, not {describe(key)}", "use the keys that recipes know")
        return None

    def _read_scalar(self, node: Node) -> Any:
        text: str = node.value
        if len(text) > _MAX_STRING:
            self._add(node, f"a string of {len(text)} characters, more than {_MAX_STRING}", "shorten it")
            return ""
        if isinstance(node, ScalarNode) and node.style is not None:
            return text
        if text in ("true", "false"):
            return text == "true"
        if text in ("", "~", "null"):
            return EMPTY
        return int(text) if _NUMBER.fullmatch(text) else text

    def _add(self, node: Node, what: str, fix: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, 0, what, fix))


def describe(value: object) -> str:
    """A value of a recipe in the words of an error message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {value}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple | list):
        return "a list"
    return "nothing" if value is EMPTY or value is None else repr(value)


def retype(value: object) -> str:
    """The way out where `value` stands and a string was wanted."""
    if isinstance(value, int):
        return f"quote it: '{str(value).lower()}'"
    return "give it a value" if value is EMPTY else "write a string"
