"""What the schema refused, as problems with a line, in the words of a recipe instead of pydantic's.

Decided here: the line of each fault, which known key an unknown one was meant to be, and the way out.  A missing
key that a misspelt one explains is left out.  Nothing is refused that the schema let pass.
"""

from __future__ import annotations

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kconvert.errors import RecipeError
from kconvert.names import near_misses
from kconvert.recipe.fields import RuleError
from kconvert.recipe.nodes import shorten
from kconvert.recipe.schema import Patch, Recipe, Target
from kconvert.recipe.values import EMPTY, Loc, Problem, ValueReader, describe, retype

__all__ = ["schema_problems"]

_Level = type[BaseModel]

_NAMES: dict[_Level, str] = {Recipe: "the recipe", Patch: "a patch entry", Target: "a target"}
_MOVES: dict[_Level, str] = {
    Recipe: "move it to the top level of the recipe",
    Patch: "move it into an item of 'patches'",
    Target: "move it into 'replace' or into an item of 'fuse'",
}
_KEYS: dict[_Level, tuple[str, ...]] = {
    level: tuple(field.alias or name for name, field in level.model_fields.items()) for level in _NAMES
}
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


def schema_problems(error: ValidationError, read: ValueReader) -> list[Problem]:
    """The faults of a schema error; `read` knows the lines of the values that were validated."""
    items = error.errors(include_url=False)
    guesses = {item["loc"]: _guess(item["loc"]) for item in items if item["type"] == "extra_forbidden"}
    explained = {(*loc[:-1], known[0]) for loc, known in guesses.items() if known}
    problems = []
    for item in items:
        loc = item["loc"]
        if loc in guesses:
            problems.append(Problem(read.key_lines[loc], 0, *_unknown_key(loc, guesses[loc])))
        elif item["type"] == "missing":
            if loc not in explained:
                problems.append(Problem(read.line_of(loc), 1, *_missing_key(loc)))
        else:
            problems.append(_bad_value(item, read))
    return problems


def _level(loc: Loc) -> _Level:
    """The model of the mapping at `loc`: `()`, `("patches", 0)`, or a target below that."""
    return Recipe if not loc else Patch if len(loc) == 2 else Target


def _guess(loc: Loc) -> tuple[str, ...]:
    """The known keys that the unknown one at `loc` may stand for; none where it belongs to another level."""
    key = str(loc[-1])
    if any(key in keys for keys in _KEYS.values()):
        return ()
    return near_misses(key.lower().replace("-", "_"), _KEYS[_level(loc[:-1])])


def _unknown_key(loc: Loc, guesses: tuple[str, ...]) -> tuple[str, str]:
    key, level = str(loc[-1]), _level(loc[:-1])
    for other, keys in _KEYS.items():
        if key in keys:
            return f"key {key!r} belongs to {_NAMES[other]}, not to {_NAMES[level]}", _MOVES[other]
    hint = f"did you mean {' or '.join(map(repr, guesses))}? " if guesses else ""
    what = f"unknown key {shorten(key)!r} in {_NAMES[level]}"
    return what, f"{hint}known keys: {', '.join(_KEYS[level])}"


def _missing_key(loc: Loc) -> tuple[str, str]:
    key = str(loc[-1])
    return f"key {key!r} is missing from {_NAMES[_level(loc[:-1])]}", f"add `{_EXAMPLES[key]}`"


def _bad_value(item: ErrorDetails, read: ValueReader) -> Problem:
    """A rule of ours that is broken, or a value of the wrong type."""
    loc = item["loc"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, RecipeError):
        at = cause.at if isinstance(cause, RuleError) else ()
        return Problem(read.line_of(loc + at), 1, cause.what, cause.fix or "correct it")
    return Problem(read.line_of(loc), 1, *_wrong_type(item["type"], item["input"], loc))


def _wrong_type(kind: str, value: object, loc: Loc) -> tuple[str, str]:
    if value is EMPTY:
        return f"{_label(loc)} has no value", "give it a value or remove it; what belongs to a key is indented deeper"
    wanted, fix = _WANTED.get(kind, ("another value", "correct it"))
    if kind == "string_type":
        fix = retype(value)
    if kind == "model_type":
        level = _level(loc)
        fix = f"write the keys of {_NAMES[level]}: {', '.join(_KEYS[level])}"
        if isinstance(value, tuple) and loc[-1:] == ("replace",):
            fix += "; 'replace' takes one target, 'fuse' several siblings"
    return f"{_label(loc)} must be {wanted}, not {shorten(describe(value))}", fix


def _label(loc: Loc) -> str:
    if not loc:
        return "the recipe"
    if isinstance(loc[-1], int):
        return f"item {loc[-1] + 1} of {loc[-2]!r}"
    return repr(loc[-1])
