"""A recipe file to a `Recipe`, with every fault as one line: `file:line: what; fix`.

The way: text to nodes (`nodes`), nodes to values with lines (`values`), values to models (`schema`), and what the
models refuse back to lines (`faults`).  Refused here: only a file that cannot be read.  Where several things are
wrong, the first by line is told, and how many more there are.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from kconvert.errors import RecipeError
from kconvert.recipe.faults import schema_problems
from kconvert.recipe.nodes import MAX_RECIPE_BYTES, compose, decode
from kconvert.recipe.schema import Recipe
from kconvert.recipe.shipped import shipped_recipes
from kconvert.recipe.values import Problem, ValueReader

__all__ = ["load_recipe", "parse_recipe", "recipes_for"]


def load_recipe(path: Path) -> Recipe:
    """Read the recipe file `path`.

    Raises:
        RecipeError: the file cannot be read, or is no valid recipe; the message starts with `file:line`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        what = f"cannot read the recipe: {getattr(error, 'strerror', None) or error}"
        raise RecipeError(what, where=str(path), fix="give a readable YAML file") from None
    return _parse(data, str(path), path)


def recipes_for(model_type: str) -> tuple[str, ...]:
    """The names of the shipped recipes that may be applied to a model type, sorted."""
    return tuple(name for name, path in shipped_recipes().items() if model_type in load_recipe(path).model_type)


def parse_recipe(text: bytes | str, where: str) -> Recipe:
    """Parse a recipe's text; `where` is what error messages call it.

    Raises:
        RecipeError: it is no valid recipe; the message starts with `where:line`.
    """
    return _parse(text, where, None)


def _parse(data: bytes | str, where: str, path: Path | None) -> Recipe:
    text = decode(data, where)
    node = compose(text, where)
    if node is None:
        fix = f"start with the keys {', '.join(Recipe.model_fields)}"
        raise RecipeError("the recipe is empty", where=f"{where}:1", fix=fix)
    reader = ValueReader(where)
    value = reader.read(node)
    if reader.problems:
        raise _first(reader.problems, where)
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        raise _first(schema_problems(error, reader), where) from None
    recipe.keep_source(text, path)
    return recipe


def _first(problems: list[Problem], where: str) -> RecipeError:
    """The first problem by line as an error, with the number of the others."""
    first = min(problems)
    others = len(problems) - 1
    more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
    return RecipeError(first.what + more, where=f"{where}:{first.line}", fix=first.fix)
