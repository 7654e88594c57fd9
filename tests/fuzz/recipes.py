"""Fuzz target: a recipe.

Whatever the text, a recipe comes out or one line that begins with the place: no other exception, no object that a tag
makes, no name that no file or class has.  A recipe is YAML, so half of the inputs are written as JSON.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from kconvert.errors import RecipeError
from kconvert.recipe import Recipe, parse_recipe, shipped_recipes
from tests.fuzz.documents import damage, mutate, parse, write
from tests.fuzz.target import Fault, Outcome, check_refusal

__all__ = ["RecipeTarget"]

_FUSED: dict[str, Any] = {
    "recipe": 1,
    "name": "mine",
    "model_type": ["qwen3"],
    "bake": True,
    "patches": [
        {
            "kernel": "./my-kernel:RMSNormMLP",
            "trust_remote_code": True,
            "for": ["cuda", "npu"],
            "fuse": [
                {"class": "Qwen3RMSNorm", "path": "model.layers.*.post_attention_layernorm"},
                {"class": "Qwen3MLP", "path": "model.layers.*.mlp"},
            ],
        },
        {
            "kernel": "owner/repo:Norm",
            "version": 2,
            "dtype": "bfloat16",
            "optional": True,
            "for": "cpu",
            "replace": {"class": "Qwen3RMSNorm", "path": "model.layers.{0-3,7}.input_layernorm"},
        },
        {"kernel": "owner/repo:Norm", "revision": "main", "replace": {"class": "A", "path": "model.norm"}},
    ],
}
_TOKENS = (
    *('"recipe"', '"name"', '"model_type"', '"patches"', '"kernel"', '"replace"', '"fuse"', '"class"', '"path"'),
    *(
        '"for"',
        '"npu"',
        '"tpu"',
        '"version"',
        '"revision"',
        '"dtype"',
        '"optional"',
        '"trust_remote_code"',
        '"bake"',
        '"<<"',
        '"kernals"',
    ),
    *(
        '"cuda_fused_swiglu"',
        '"./x:Y"',
        '"../../x:Y"',
        '"/x:Y"',
        '"evil/kernel:Y"',
        '"a/b/c:Y"',
        '"x:y:Z"',
        '"./x:__import__"',
    ),
    *(
        '"model.layers.*.mlp"',
        '"model.{0-3,7}.mlp"',
        '"model.{3-0}"',
        '"{0-999999999}"',
        '"a..b"',
        '"**"',
        '"{}"',
        '"*"',
    ),
    *('"bfloat16"', '"float8"', "1", "2", "-1", "true", "on", "no", "~", "1.0", "0o7", "1_000", "2001-01-01", ".inf"),
    *("&a 1", "*a", "!!python/object:os.system x", "!t 1", "!!str 1", "!<tag:yaml.org,2002:int> 1", "!", "&", "*"),
)
_LINES = (
    *(
        "&a",
        "*a",
        "<<: {a: 1}",
        "--- ",
        "---",
        "...",
        "%YAML 1.1",
        "%YAML 9.9",
        "%YAML " + "9" * 5000 + ".1",
        "%TAG ! tag:x,2000:",
    ),
    *(
        "? a",
        "? [a, b]",
        ": b",
        "- ",
        "- - - - a",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "!!python/object/apply:os.system ['true']",
        "!x",
    ),
    *(
        '"\\x41"',
        '"\\u00e9"',
        '"\\U00110000"',
        '"\\UFFFFFFFF"',
        '"\\ud800"',
        '"\\x"',
        "'''",
        '"',
        "'",
        "|",
        ">9",
        "|+0",
        "|1-",
    ),
    *(
        "\t",
        "\u0085",
        "\u2028",
        "\ufeff",
        "\x00",
        "\x7f",
        "\ufffe",
        "#",
        " #",
        "@",
        "`",
        "a: b: c",
        "on: no",
        "yes",
        "null",
    ),
    *(
        "recipe: 1",
        "recipe: 2",
        "name: x",
        "patches: []",
        "bake: true",
        "patches:",
        "- kernel: x",
        "    replace: {class: A, path: b}",
    ),
    *("[" * 40, "{a: " * 40, "- " * 40, "? " * 40, "- " * 3000, "{" * 3000, "? " * 3000, "a" * 2000, "a: &a [*a]"),
)


class RecipeTarget:
    """Inputs are whole files."""

    name = "recipe"

    def __init__(self) -> None:
        texts = [path.read_bytes() for path in shipped_recipes().values()]
        shared = [json.dumps(_FUSED).encode(), json.dumps({**_FUSED, "patches": _FUSED["patches"][:1]}).encode()]
        self._seeds = [*shared * 6, *texts]

    def make(self, rng: Random) -> bytes:
        """A recipe that comes with kconvert, or one as JSON."""
        return rng.choice(self._seeds)

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """Another structure where it is JSON, other lines, or other bytes."""
        tree = parse(data)
        way = rng.random()
        if tree is not None and way < 0.7:
            return write(mutate(tree, rng, _TOKENS), rng)
        return damage(data, rng) if way > 0.85 else _other_lines(data, rng)

    def check(self, data: bytes) -> Outcome:
        """By `parse_recipe`."""
        try:
            recipe = parse_recipe(data, "x.yaml")
        except RecipeError as error:
            check_refusal(error, 3)
            if not str(error).startswith("x.yaml:"):
                raise Fault(f"the place is missing: {str(error)[:300]!r}") from error
            return "refused"
        _check_recipe(recipe, data)
        return "accepted"


def _other_lines(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    line = lines[at]
    way = rng.randrange(8)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(rng.randrange(len(lines) + 1), line)
    elif way == 2:
        lines[at] = b" " * rng.choice([1, 2, 4]) + line
    elif way == 3:
        lines[at] = line.removeprefix(b"  ")
    elif way == 4:
        place = rng.randrange(len(line) + 1)
        lines[at] = line[:place] + rng.choice(_LINES).encode("utf-8", "surrogatepass") + line[place:]
    elif way == 5:
        lines.insert(at, rng.choice(_LINES).encode("utf-8", "surrogatepass"))
    elif way == 6:
        key, colon, _ = line.partition(b": ")
        lines[at] = key + colon + rng.choice(_TOKENS + _LINES).encode("utf-8", "surrogatepass")
    else:
        lines[at] = re.sub(rb"[A-Za-z0-9_*]+", lambda word: rng.choice([word[0], word[0], b"", b"*", b"no"]), line)
    return b"\n".join(lines)


def _check_recipe(recipe: Recipe, data: bytes) -> None:
    """What a recipe may hold, told once more in another way."""
    if recipe.text.encode() != data or parse_recipe(recipe.text, "x.yaml") != recipe:
        raise Fault("the text that is kept is another")
    if not (recipe.patches or recipe.bake) or recipe.recipe != 1:
        raise Fault("nothing to do, or another version")
    for patch in recipe.patches:
        if (patch.replace is None) == (patch.fuse is None) or not patch.kernels:
            raise Fault(f"entry at {patch.where} takes no modules, or names no kernel")
        for kernel in patch.kernels:
            is_name = re.fullmatch(r"[a-z][a-z0-9_]*", kernel.text) is not None
            if (kernel.kind == "builtin") != is_name or (
                kernel.is_package and not str(kernel.class_name).isidentifier()
            ):
                raise Fault(f"kernel {kernel.text!r} was accepted as {kernel.kind}")
            if kernel.kind == "hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+", kernel.source, re.ASCII):
                raise Fault(f"kernel {kernel.text!r} was accepted as one of the Hub")
        for target in patch.targets:
            if not target.class_name.isidentifier() or not re.fullmatch(r"[\w.*{},\- ]+", target.path.text, re.ASCII):
                raise Fault(f"target {target.path.text!r} was accepted")
