"""Reads a recipe, and turns every fault into one line with file and line number.

The YAML is composed to nodes and no further: no constructor runs, so no tag can make an object.  Values
are read as in YAML 1.2 or stricter: only `true` and `false` are booleans, only plain decimal digits are
numbers, and everything else (`on`, `no`, `1.0`, `010`) is the string that was written.

Refused: more than 1 MB, anything but UTF-8 without a byte order mark, several documents, anchors and
aliases, explicit tags, merge keys, duplicate keys, keys that are not strings, deep nesting.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml.composer import Composer
from yaml.error import MarkedYAMLError, YAMLError
from yaml.events import AliasEvent, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from kconvert.errors import RecipeError
from kconvert.names import near_misses
from kconvert.recipe.schema import (
    EMPTY,
    Loc,
    PlacedDict,
    Recipe,
    RuleError,
    describe,
    known_keys,
    level_of,
    proper_level,
)

__all__ = ["MAX_RECIPE_BYTES", "find_recipe", "load_recipe", "parse_recipe", "shipped_recipes"]

MAX_RECIPE_BYTES = 1_000_000
_MAX_DEPTH = 16
_MAX_SCALAR = 1000
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_QUOTE_HINT = "check indentation and colons there, and quote values that hold any of * & { } [ ] : #"


@dataclass(frozen=True, order=True)
class _Problem:
    """One fault; sorted by line, and on one line an unknown key (rank 0) before what follows from it."""

    line: int
    rank: int
    what: str
    fix: str


def load_recipe(path: Path) -> Recipe:
    """Read the recipe file `path`.

    Raises:
        RecipeError: the file cannot be read, or is no valid recipe; the message starts with `file:line`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError(
            f"cannot read the recipe: {reason}", where=str(path), fix="give a readable YAML file"
        ) from None
    return _parse(data, str(path), path)


def parse_recipe(text: bytes | str, where: str) -> Recipe:
    """Parse a recipe's text; `where` is what error messages call it.

    Raises:
        RecipeError: it is no valid recipe; the message starts with `where:line`.
    """
    return _parse(text, where, None)


def _parse(data: bytes | str, where: str, path: Path | None) -> Recipe:
    text = _decode(data, where)
    node = _compose(text, where)
    walker = _Walker(where)
    value = walker.read(node, ())
    _raise_first(walker.problems, where)
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        _raise_first(list(_problems(error, walker)), where)
        raise  # unreachable: a ValidationError holds at least one error
    recipe.keep_source(text, path)
    return recipe


def _raise_first(problems: list[_Problem], where: str) -> None:
    """Raise the first problem by line, with the number of the others; nothing where there is none."""
    if not problems:
        return
    first = min(problems)
    others = len(problems) - 1
    more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
    raise RecipeError(first.what + more, where=f"{where}:{first.line}", fix=first.fix) from None


# --- text -----------------------------------------------------------------------------------------


def _decode(data: bytes | str, where: str) -> str:
    """The text of a recipe; too much of it, a byte order mark, or anything but UTF-8 is refused."""
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(encoded) > MAX_RECIPE_BYTES:
        raise RecipeError(
            f"the recipe is larger than {MAX_RECIPE_BYTES} bytes", where=where, fix="give a recipe, not a data file"
        )
    save = "save it as UTF-8 without a byte order mark"
    if encoded.startswith(b"\xef\xbb\xbf"):
        raise RecipeError("the recipe starts with a byte order mark (BOM)", where=f"{where}:1", fix=save)
    if encoded.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")) or b"\0" in encoded[:4]:
        raise RecipeError("the recipe is UTF-16 or UTF-32, not UTF-8", where=f"{where}:1", fix=save)
    try:
        return encoded.decode("utf-8")
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start) + 1
        what = f"the recipe is not UTF-8: byte 0x{encoded[error.start]:02x}"
        raise RecipeError(what, where=f"{where}:{line}", fix=save) from None


class _NodeLoader(Reader, Scanner, Parser, Composer, BaseResolver):
    """SafeLoader without its constructor: it yields nodes, and refuses what nodes cannot show later."""

    def __init__(self, text: str, where: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._where = where
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = f"{self._where}:{event.start_mark.line + 1}"
        if isinstance(event, AliasEvent):
            fix = "write the value out; a string that starts with '*' needs quotes"
            raise RecipeError(f"alias *{event.anchor} is not allowed", where=place, fix=fix)
        if isinstance(event, NodeEvent) and event.anchor is not None:
            fix = "write the value out where it is used; a string that starts with '&' needs quotes"
            raise RecipeError(f"anchor &{event.anchor} is not allowed", where=place, fix=fix)
        if (tag := getattr(event, "tag", None)) is not None:
            fix = "remove the tag; a string that starts with '!' needs quotes"
            raise RecipeError(f"tag {_short(tag)!r} is not allowed", where=place, fix=fix)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecipeError(
                f"nested more than {_MAX_DEPTH} levels deep", where=place, fix="a recipe needs five levels"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _compose(text: str, where: str) -> Node:
    """The root node of the only document in `text`."""
    try:
        loader = _NodeLoader(text, where)
        node = loader.get_node() if loader.check_node() else None
        if loader.check_node():
            second = loader.peek_event()  # type: ignore[no-untyped-call]
            place = f"{where}:{second.start_mark.line + 1}"
            raise RecipeError("a second document starts here", where=place, fix="keep one recipe per file")
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character {_char(error.character)} is not allowed in YAML"
        raise RecipeError(what, where=f"{where}:{line}", fix="remove it") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        what = "not valid YAML: " + " ".join(part for part in (error.context, error.problem) if part)
        fix = "indent with spaces, not tabs" if r"'\t'" in what else _QUOTE_HINT
        raise RecipeError(_short(what, 300), where=place, fix=fix) from None
    except (YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(_short(f"not valid YAML: {error}", 300), where=where, fix=_QUOTE_HINT) from None
    if node is None or (isinstance(node, ScalarNode) and node.style is None and not node.value):
        raise RecipeError(
            "the recipe is empty", where=f"{where}:1", fix=f"start with the keys {', '.join(known_keys(()))}"
        )
    return node


def _char(character: object) -> str:
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# --- values ---------------------------------------------------------------------------------------


class _Walker:
    """Turns nodes into plain values, and remembers the line of every key and value.

    A mapping becomes a `PlacedDict`, a sequence a tuple, a scalar a str, int or bool, and nothing `EMPTY`.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.problems: list[_Problem] = []
        self.lines: dict[Loc, int] = {}
        self.key_lines: dict[Loc, int] = {}

    def read(self, node: Node, loc: Loc) -> Any:
        line = node.start_mark.line + 1
        # A scalar is looked for on its own line, a block under a key on the line of the key.
        self.lines[loc] = self.key_lines.get(loc, line) if not isinstance(node, ScalarNode) else line
        if isinstance(node, MappingNode):
            return self._read_mapping(node, loc)
        if isinstance(node, SequenceNode):
            return tuple(self.read(item, (*loc, number)) for number, item in enumerate(node.value))
        return self._read_scalar(node, line)

    def _read_mapping(self, node: MappingNode, loc: Loc) -> PlacedDict:
        line = self.lines[loc]
        made = PlacedDict(line, f"{self._where}:{line}")
        for key_node, value_node in node.value:
            key = self._read_key(key_node)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            inner = (*loc, key)
            if key in made:
                self._add(line, f"key {key!r} appears twice, first on line {self.key_lines[inner]}", "keep one of them")
                continue
            self.key_lines[inner] = line
            made[key] = self.read(value_node, inner)
        return made

    def _read_key(self, node: Node) -> str | None:
        line = node.start_mark.line + 1
        if not isinstance(node, ScalarNode):
            self._add(line, "a key must be a string, not a list or mapping", "quote values that hold { } [ ]")
            return None
        if node.style is None and node.value == "<<":
            self._add(line, "merge key '<<' is not allowed", "write the keys out")
            return None
        key = self._read_scalar(node, line)
        if isinstance(key, str):
            return key
        self._add(line, f"a key must be a string, not {describe(key)}", "use the keys that recipes know")
        return None

    def _read_scalar(self, node: Node, line: int) -> Any:
        text: str = node.value
        if len(text) > _MAX_SCALAR:
            self._add(line, f"a string of {len(text)} characters, more than {_MAX_SCALAR}", "shorten it")
            return ""
        if getattr(node, "style", None) is not None:
            return text
        if text in ("true", "false"):
            return text == "true"
        if text in ("", "~", "null"):
            return EMPTY
        return int(text) if _NUMBER.fullmatch(text) else text

    def _add(self, line: int, what: str, fix: str) -> None:
        self.problems.append(_Problem(line, 0, what, fix))


# --- faults that the schema found -------------------------------------------------------------------


def _problems(error: ValidationError, walker: _Walker) -> Iterator[_Problem]:
    """The faults of a schema error as problems; a missing key that a misspelt one explains is left out."""
    found: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    explained: set[Loc] = set()
    for item in found:
        loc: Loc = item["loc"]
        if item["type"] == "extra_forbidden":
            guesses = _guesses(str(loc[-1]), loc[:-1])
            explained.update((*loc[:-1], guess) for guess in guesses[:1])
    for item in found:
        if not (item["type"] == "missing" and item["loc"] in explained):
            yield _problem(item, walker)


def _problem(item: dict[str, Any], walker: _Walker) -> _Problem:
    loc: Loc = item["loc"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, RecipeError):
        at = cause.at if isinstance(cause, RuleError) else ()
        return _Problem(_line(loc + at, walker), 1, cause.what, cause.fix or "correct it")
    if item["type"] == "extra_forbidden":
        what, fix = _unknown_key(str(loc[-1]), loc[:-1])
        return _Problem(walker.key_lines[loc], 0, what, fix)
    if item["type"] == "missing":
        what, fix = f"key {loc[-1]!r} is missing from {level_of(loc[:-1])}", f"add `{_EXAMPLES[str(loc[-1])]}`"
        return _Problem(_line(loc, walker), 1, what, fix)
    what, fix = _wrong_value(item["type"], item["input"], loc)
    return _Problem(_line(loc, walker), 1, what, fix)


def _line(loc: Loc, walker: _Walker) -> int:
    """The line of `loc`, or of the nearest thing around it."""
    while loc and loc not in walker.lines:
        loc = loc[:-1]
    return walker.lines[loc]


_EXAMPLES = {
    "recipe": "recipe: 1",
    "name": "name: qwen3",
    "model_type": "model_type: [qwen3]",
    "patches": "patches:",
    "kernel": "kernel: [cuda_fused_swiglu, cpu_fused_swiglu]",
    "class": "class: Qwen3MLP",
    "path": 'path: "model.layers.*.mlp"',
}
_WANTED = {
    "string_type": ("a string", "write a string"),
    "int_type": ("a whole number", "write it without quotes, e.g. 1"),
    "greater_than_equal": ("1 or more", "versions count from 1"),
    "bool_type": ("true or false", "write true or false, in lower case and without quotes"),
    "tuple_type": ("a list", "start each item with '- '"),
    "model_type": ("a mapping", "write its keys as `key: value`"),
}


def _wrong_value(kind: str, value: object, loc: Loc) -> tuple[str, str]:
    wanted, fix = _WANTED.get(kind, ("another value", "correct it"))
    if value is EMPTY:
        return f"{_label(loc)} has no value", "give it a value or remove it; what belongs to a key is indented deeper"
    if kind == "string_type" and isinstance(value, int):
        fix = f"quote it: '{str(value).lower()}'"
    if kind == "model_type":
        fix = f"write the keys of {level_of(loc)}: {', '.join(known_keys(loc))}"
        if isinstance(value, tuple) and loc[-1:] == ("replace",):
            fix += "; 'replace' takes one target, 'fuse' several siblings"
    return f"{_label(loc)} must be {wanted}, not {_short(describe(value))}", fix


def _label(loc: Loc) -> str:
    if not loc:
        return "the recipe"
    if isinstance(loc[-1], int):
        return f"item {loc[-1] + 1} of {loc[-2]!r}"
    return repr(loc[-1])


def _guesses(key: str, level: Loc) -> tuple[str, ...]:
    return () if proper_level(key) else near_misses(key.lower().replace("-", "_"), known_keys(level))


def _unknown_key(key: str, level: Loc) -> tuple[str, str]:
    proper = proper_level(key)
    if proper is not None:
        return f"key {key!r} belongs to {proper[0]}, not to {level_of(level)}", proper[1]
    what = f"unknown key {_short(key)!r} in {level_of(level)}"
    guesses = _guesses(key, level)
    hint = f"did you mean {' or '.join(map(repr, guesses))}? " if guesses else ""
    return what, f"{hint}known keys: {', '.join(known_keys(level))}"


# --- shipped recipes ------------------------------------------------------------------------------


def _recipe_folder() -> Path:
    """Where shipped recipes lie: inside the installed package, or beside it in a source checkout."""
    package = Path(str(importlib.resources.files("kconvert")))
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with kconvert, by name, sorted."""
    files = (path for path in _recipe_folder().glob("*.yaml") if path.is_file())
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def find_recipe(name_or_path: str) -> Path:
    """The recipe file that `name_or_path` means: an existing file first, else a shipped recipe by name.

    A folder of that name does not hide a shipped recipe: `qwen3` may well be the model directory.

    Raises:
        RecipeError: neither; lists the shipped names.
    """
    path = Path(name_or_path)
    try:
        if name_or_path and path.exists() and not path.is_dir():
            return path
    except OSError:  # a name that no file system takes, e.g. too long: it can still not be a shipped one
        pass
    shipped = shipped_recipes()
    name = name_or_path.removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    guesses = near_misses(Path(name).name, shipped)
    hint = f"did you mean {' or '.join(map(repr, guesses))}? " if guesses else ""
    fix = f"{hint}shipped recipes: {', '.join(shipped) or 'none'}; or give the path of a YAML file"
    raise RecipeError(f"no recipe file or shipped recipe {_short(name_or_path)!r}", fix=fix)
