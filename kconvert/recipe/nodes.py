"""Recipe text to YAML nodes: which bytes are text, and which YAML a recipe may use.

The text is composed to nodes and no further: no constructor runs, so no tag can make an object.

Refused, with the line: more than 1 MB, anything but UTF-8 without a byte order mark, YAML syntax errors, an
empty text, a second document, anchors and aliases, explicit tags, deep nesting, and more nodes than a recipe
needs (a hostile megabyte would keep the pure Python parser busy for 20 seconds).
"""

from __future__ import annotations

from typing import Any, NoReturn

from yaml.composer import Composer
from yaml.error import MarkedYAMLError
from yaml.events import AliasEvent, NodeEvent
from yaml.nodes import Node, ScalarNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from kconvert.errors import RecipeError

__all__ = ["MAX_NODES", "MAX_RECIPE_BYTES", "compose", "decode", "shorten"]

MAX_RECIPE_BYTES = 1_000_000
MAX_NODES = 20_000  # a patch entry has about 15
_MAX_DEPTH = 16
_QUOTE_HINT = "check indentation and colons there, and quote values that hold any of * & { } [ ] : #"


def decode(data: bytes | str, where: str) -> str:
    """The text of a recipe.

    Raises:
        RecipeError: too much of it, a byte order mark, or anything but UTF-8.
    """
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(encoded) > MAX_RECIPE_BYTES:
        what = f"the recipe is larger than {MAX_RECIPE_BYTES} bytes"
        raise RecipeError(what, where=where, fix="give a recipe, not a data file")
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


def compose(text: str, where: str) -> Node | None:
    """The root node of the only document in `text`; None where there is nothing in it.

    Raises:
        RecipeError: a syntax error, or YAML that recipes may not use.
    """
    try:
        node = _NodeLoader(text, where).read_only_document()
    except RecipeError:
        raise
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        char = error.character
        what = f"character {f'U+{char:04X}' if isinstance(char, int) else repr(char)} is not allowed in YAML"
        raise RecipeError(what, where=f"{where}:{line}", fix="remove it") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        what = "not valid YAML: " + " ".join(part for part in (error.context, error.problem) if part)
        fix = "indent with spaces, not tabs" if r"'\t'" in what else _QUOTE_HINT
        raise RecipeError(shorten(what, 300), where=place, fix=fix) from None
    except (ValueError, OverflowError) as error:  # from escapes and versions with numbers that are too large
        raise RecipeError(shorten(f"not valid YAML: {error}", 300), where=where, fix=_QUOTE_HINT) from None
    empty = isinstance(node, ScalarNode) and node.style is None and not node.value
    return None if empty else node


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
        self._num_nodes = 0

    def read_only_document(self) -> Node | None:
        node = self.get_node() if self.check_node() else None
        if self.check_node():
            second = self.peek_event()  # type: ignore[no-untyped-call]
            self._refuse(second, "a second document starts here", "keep one recipe per file")
        return node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._check_event(event)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self._refuse(event, f"more than {MAX_NODES} keys and values", "give a recipe, not a data file")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(event, f"nested more than {_MAX_DEPTH} levels deep", "a recipe needs five levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _check_event(self, event: Any) -> None:
        if isinstance(event, AliasEvent):
            fix = "write the value out; a string that starts with '*' needs quotes"
            self._refuse(event, f"alias *{event.anchor} is not allowed", fix)
        if isinstance(event, NodeEvent) and event.anchor is not None:
            fix = "write the value out where it is used; a string that starts with '&' needs quotes"
            self._refuse(event, f"anchor &{event.anchor} is not allowed", fix)
        if (tag := getattr(event, "tag", None)) is not None:
            fix = "remove the tag; a string that starts with '!' needs quotes"
            self._refuse(event, f"tag {shorten(tag)!r} is not allowed", fix)

    def _refuse(self, event: Any, what: str, fix: str) -> NoReturn:
        raise RecipeError(what, where=f"{self._where}:{event.start_mark.line + 1}", fix=fix)


def shorten(text: str, most: int = 80) -> str:
    """`text` with at most `most` characters, for an error line."""
    return text if len(text) <= most else text[: most - 3] + "..."
