"""Conversion from end to end: where the offline engine meets transformers."""

from kconvert.convert.apply import ApplyResult, apply_recipe, build_job, default_output
from kconvert.convert.draft import DraftEntry, DraftRecipe, LeftOut, draft_recipe
from kconvert.convert.prepare import Prepared, prepare

__all__ = [
    "ApplyResult",
    "DraftEntry",
    "DraftRecipe",
    "LeftOut",
    "Prepared",
    "apply_recipe",
    "build_job",
    "default_output",
    "draft_recipe",
    "prepare",
]
