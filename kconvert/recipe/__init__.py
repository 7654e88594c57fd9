"""Recipes: the YAML that says which modules get which kernel; read with a line number for every fault."""

from __future__ import annotations

from kconvert.recipe.load import load_recipe, parse_recipe, recipes_for
from kconvert.recipe.nodes import MAX_RECIPE_BYTES
from kconvert.recipe.profile import Profile, profile_of
from kconvert.recipe.reference import KernelRef
from kconvert.recipe.schema import Patch, Recipe, Target
from kconvert.recipe.shipped import find_recipe, shipped_recipes

__all__ = [
    "MAX_RECIPE_BYTES",
    "KernelRef",
    "Patch",
    "Profile",
    "Recipe",
    "Target",
    "find_recipe",
    "load_recipe",
    "parse_recipe",
    "profile_of",
    "recipes_for",
    "shipped_recipes",
]
