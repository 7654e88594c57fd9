"""Which file a recipe's name means: an existing file first, else a recipe that comes with kconvert.

Decided here: where shipped recipes lie.  Refused: a name that is neither, with the nearest shipped names.  No
recipe is read.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from kconvert.errors import RecipeError
from kconvert.names import near_misses
from kconvert.recipe.nodes import shorten

__all__ = ["find_recipe", "shipped_recipes"]


def _recipe_folder() -> Path:
    """Inside the installed package, or beside it in a source checkout."""
    package = Path(str(importlib.resources.files("kconvert")))
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with kconvert, by name, sorted."""
    files = {path.stem: path for path in _recipe_folder().glob("*.yaml") if path.is_file()}
    return dict(sorted(files.items()))


def find_recipe(name_or_path: str) -> Path:
    """The recipe file that `name_or_path` means: an existing file first, else a shipped recipe by name.

    A folder of that name does not hide a shipped recipe: `qwen3` may well be the model directory.

    Raises:
        RecipeError: neither; lists the shipped names.
    """
    path = Path(name_or_path)
    try:
        if path.exists() and not path.is_dir():
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
    raise RecipeError(f"no recipe file or shipped recipe {shorten(name_or_path)!r}", fix=fix)
