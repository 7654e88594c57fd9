"""JSON documents as trees that can hold what no Python value can: a key twice, `-0`, half a surrogate pair.

A leaf is the text of a token, so that a mutation writes any number or string as it likes.  `mutate` changes a tree in
one place, `write` gives its text back in one of many ways that mean the same, and now and then in one that is no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, TypeGuard, TypeVar

__all__ = ["Array", "Node", "Object", "containers_of", "damage", "from_value", "is_number", "mutate", "parse", "write"]


@dataclass
class Array:
    """Items in order."""

    items: list[Node]


@dataclass
class Object:
    """Pairs of a key token (quotes included) and a value, in order; keys may repeat."""

    pairs: list[tuple[str, Node]]


Node: TypeAlias = "str | Array | Object"

_NUMBERS = (
    *("0", "-0", "-1", "1", "2", "3", "7", "8", "64", "255", "4294967296", "2147483648"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616"),
    *("1152921504606846975", "1152921504606846976", "1152921504606846977", "288230376151711744"),
    *("0.0", "-0.0", "1.0", "1.5", "2.0", "0e0", "1e0", "1E2", "8e-1", "1e400", "-1e400", "1e-400"),
    *("00", "01", "-01", "+1", "1.", ".5", "0x8", "1_0", "1e", "-", "--1", "\u0663", "\uff18"),
    *("9" * 20, "9" * 400, "9" * 4300, "9" * 4301, "0" * 99 + "8", "1" + "0" * 308, "1e" + "9" * 30),
    *("NaN", "Infinity", "-Infinity", "nan", "true", "false", "null", "True", "None"),
)
_STRINGS = (
    *('""', '"a"', '"A"', '"x"', '" "', '"a b"', '"."', '".."', '"/"', '"0"', '"null"'),
    *(r'"\ud800"', r'"\udc00\ud800"', r'"\ud800\udc00"', r'"\uD83D\uDE00"', r'"\ud800x"', r'"a\udfff"'),
    *(r'"\u0000"', r'"\u001f"', r'"\u007f"', r'"\u2028"', r'"\ufeff"', r'"\u00e9"', r'"\/"', r'"\""', r'"\\"'),
    *('"\x00"', '"\n"', '"\t"', '"\x1f"', '"\x7f"', '"\ufeff"', '"é"', '"e\u0301"', '"😀"', '"\U0010ffff"', '"\ufffe"'),
    *(r'"\x41"', r'"\u12"', r'"\u+123"', r'"\u 041"', r'"\a"', r'"\'"', '"', '"a', "'a'", "a"),
    *('"F32"', '"f32"', '"F4"', '"F8_E4M3"', '"BF16"', '"U8"', '"BOOL"', '"I64"', '"F6_E2M3"', '"C64"', '"F99"'),
    *('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"format"', '"pt"', '"weight_map"', '"metadata"'),
    *('"model.safetensors"', '"sub/x.safetensors"', '"../x.safetensors"', '"/x.safetensors"', r'"a\\x.safetensors"'),
    *('"a/../x.safetensors"', r'"x\u0000.safetensors"', '"x.safetensors "', '"./x.safetensors"', '"x.bin"'),
    '"' + "n" * 3000 + '"',
)
_BLANKS = ("", "", " ", "  ", "\n", "\t", "\r\n", "\r")
_NO_BLANKS = ("\x0b", "\x0c", "\u00a0", "\ufeff", "\u2028", "\x00", "/**/", "#", ",")
_NO_TEXT = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xef\xbb\xbf", b"\x00", b"\xe2\x82")


def from_value(value: Any) -> Node:
    """A Python value as a tree."""
    if isinstance(value, dict):
        return Object([(_text(key), from_value(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return Array([from_value(item) for item in value])
    return json.dumps(value, ensure_ascii=False)


def is_number(node: Node) -> TypeGuard[str]:
    """Whether a leaf is a whole number of a length that can be reckoned with."""
    return isinstance(node, str) and node.isascii() and node.isdigit() and len(node) < 30


def parse(data: bytes) -> Node | None:
    """The tree of some JSON, or None where it is none, or too deep to be walked."""

    def pairs(found: list[tuple[str, Any]]) -> Object:
        return Object([(_text(key), _node(item)) for key, item in found])

    try:
        return _node(json.loads(data, object_pairs_hook=pairs, parse_int=_Token, parse_float=_Token))
    except (ValueError, RecursionError):
        return None


class _Token(str):
    """A number as it stood in the text."""

    __slots__ = ()


def _node(value: Any) -> Node:
    if isinstance(value, Object):
        return value
    if isinstance(value, list):
        return Array([_node(item) for item in value])
    return str(value) if isinstance(value, _Token) else json.dumps(value, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def containers_of(node: Node) -> Iterator[Array | Object]:
    """Every array and object of a tree, itself included."""
    todo = [node]
    while todo:
        found = todo.pop()
        if isinstance(found, Array):
            yield found
            todo += found.items
        elif isinstance(found, Object):
            yield found
            todo += (value for _, value in found.pairs)


def mutate(root: Node, rng: Random, tokens: Sequence[str] = ()) -> Node:
    """`root` changed in one place.

    Args:
        root: is changed itself where that is possible.
        rng: decides where and how.
        tokens: leaves that this kind of document knows, taken more often than others.
    """
    containers = list(containers_of(root))
    if not containers:
        return _any(rng, tokens)
    found = rng.choice(containers)
    size = len(found.items) if isinstance(found, Array) else len(found.pairs)
    at = rng.randrange(size) if size else 0
    if isinstance(found, Array):
        found.items = _changed(found.items, at, rng, lambda item: _other(item, rng, tokens)) or [_any(rng, tokens)]
    else:
        found.pairs = _changed(found.pairs, at, rng, lambda pair: _other_pair(pair, rng, tokens)) or [
            (rng.choice(_STRINGS), _any(rng, tokens))
        ]
    return root


_Item = TypeVar("_Item")


def _changed(items: list[_Item], at: int, rng: Random, other: Callable[[_Item], _Item]) -> list[_Item]:
    """The items with one of them gone, doubled, moved, or another; none where there are none."""
    if not items:
        return []
    way = rng.randrange(10)
    if way == 0:
        return items[:at] + items[at + 1 :]
    if way == 1:
        place = rng.randrange(len(items) + 1)
        return [*items[:place], items[at], *items[place:]]
    if way == 2 and len(items) > 1:
        place = rng.randrange(len(items))
        made = list(items)
        made[at], made[place] = made[place], made[at]
        return made
    if way == 3:
        place = rng.randrange(len(items) + 1)
        return [*items[:place], other(items[at]), *items[place:]]
    return [*items[:at], other(items[at]), *items[at + 1 :]]


def _other_pair(pair: tuple[str, Node], rng: Random, tokens: Sequence[str]) -> tuple[str, Node]:
    key, value = pair
    if rng.random() < 0.7:
        return key, _other(value, rng, tokens)
    return rng.choice([_escaped(key, rng), _any(rng, tokens), rng.choice(_STRINGS)]), value


def _other(node: Node, rng: Random, tokens: Sequence[str]) -> Node:
    if isinstance(node, str):
        if is_number(node) and rng.random() < 0.7:
            return _other_number(node, rng)
        if node[:1] == '"' and rng.random() < 0.4:
            return _escaped(node, rng)
        return _any(rng, tokens) if rng.random() < 0.9 else _nested(node, rng)
    way = rng.randrange(5)
    if way == 0:
        return _any(rng, tokens)
    if way == 1:
        return Array([node])
    if way == 2:
        return Object([('"a"', node)])
    if way == 3:
        return _nested(node, rng)
    if isinstance(node, Object):
        return Array([item for _, item in node.pairs])
    return Object([(f'"{number}"', item) for number, item in enumerate(node.items)])


def _other_number(token: str, rng: Random) -> str:
    number = int(token)
    return str(
        rng.choice(
            [
                *(number + 1, number - 1, number * 2, number // 2, -number, number + 8, number + 2**32, number * 2**32),
                *(f"-{token}", f"{token}.0", f"{token}e0", f"0{token}", f"+{token}", f"{token}.", f'"{token}"'),
                f"{number / 10}e1",
            ]
        )
    )


def _escaped(token: str, rng: Random) -> str:
    """A string token with a letter of it written as an escape, which means the same."""
    inner = token[1:-1]
    if len(token) < 3 or not inner.isascii() or "\\" in inner:
        return token
    at = rng.randrange(len(inner))
    return f'"{inner[:at]}\\u{ord(inner[at]):04x}{inner[at + 1 :]}"'


def _nested(node: Node, rng: Random) -> Node:
    for _ in range(rng.choice([1, 5, 100, 130, 300, 480, 700])):
        node = Array([node]) if rng.random() < 0.7 else Object([('"a"', node)])
    return node


def _any(rng: Random, tokens: Sequence[str]) -> str:
    if tokens and rng.random() < 0.4:
        return rng.choice(tokens)
    return rng.choice(_NUMBERS) if rng.random() < 0.5 else rng.choice(_STRINGS)


def write(root: Node, rng: Random, *, may_break: bool = True) -> bytes:
    """The text of a tree: compact, as `json.dumps` has it, or with blanks of any kind between tokens.

    With `may_break` it has, now and then, something between two tokens that JSON does not allow there.
    """
    style = rng.choice(["compact", "compact", "spaced", "wild", "wild", "broken" if may_break else "wild"])
    num_tokens = sum(len(found.items if isinstance(found, Array) else found.pairs) for found in containers_of(root))
    odd = 0.5 / (num_tokens + 1) if style == "broken" else 0.0

    def blank() -> str:
        if style in ("compact", "spaced"):
            return " " if style == "spaced" else ""
        return rng.choice(_NO_BLANKS) if rng.random() < odd else rng.choice(_BLANKS)

    out: list[str] = []
    todo: list[Node | tuple[str]] = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, tuple):
            out.append(node[0])
        elif isinstance(node, str):
            out.append(node)
        else:
            pairs = [("", item) for item in node.items] if isinstance(node, Array) else node.pairs
            opened, closed = "[]" if isinstance(node, Array) else "{}"
            out.append(opened)
            parts: list[Node | tuple[str]] = []
            for number, (key, value) in enumerate(pairs):
                comma = f"{blank() if style != 'spaced' else ''},{blank()}" if number else blank()
                parts.append((comma + (f"{key}{'' if style == 'spaced' else blank()}:{blank()}" if key else ""),))
                parts.append(value)
            parts.append((blank() + closed,))
            todo += reversed(parts)
    return "".join(out).encode("utf-8", "surrogatepass")


def damage(data: bytes, rng: Random) -> bytes:
    """`data` changed as bytes: flipped, cut, doubled, or with something in between."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice([1, 1, 1, 2, 4, 16])
    way = rng.randrange(7)
    if way == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if way == 1:
        return data[:at] + rng.randbytes(size) + data[at + size :]
    if way == 2:
        return data[:at] + rng.choice(_NO_TEXT) + data[at:]
    if way == 3:
        return data[:at] + data[at + size :]
    if way == 4:
        return data[:at]
    if way == 5:
        return data[: at + size] + data[at:]
    return data + rng.choice([b" ", b"\n", b"\0", b"}", b"{}", b"x", b"\xff"])
