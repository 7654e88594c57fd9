"""Recipes: the YAML that says which modules get which kernel; read with a line number for every fault."""

from __future__ import annotations

from kconvert.recipe.load import MAX_RECIPE_BYTES, find_recipe, load_recipe, parse_recipe, shipped_recipes
from kconvert.recipe.schema import KernelRef, Patch, Recipe, Target

__all__ = [
    "MAX_RECIPE_BYTES",
    "KernelRef",
    "Patch",
    "Recipe",
    "Target",
    "find_recipe",
    "load_recipe",
    "parse_recipe",
    "shipped_recipes",
]
