"""Conversion from end to end: where the offline engine meets transformers."""

from kconvert.convert.apply import ApplyResult, Options, apply_recipe, default_output
from kconvert.convert.draft import DraftEntry, DraftRecipe, LeftOut, draft_recipe
from kconvert.convert.expected import Expected, expect
from kconvert.convert.job import build_job, final_items
from kconvert.convert.prepare import Prepared, prepare
from kconvert.convert.revert import (
    NotRestored,
    PreparedRevert,
    RevertResult,
    check_revert_output,
    prepare_revert,
    revert,
)

__all__ = [
    "ApplyResult",
    "DraftEntry",
    "DraftRecipe",
    "Expected",
    "LeftOut",
    "NotRestored",
    "Options",
    "Prepared",
    "PreparedRevert",
    "RevertResult",
    "apply_recipe",
    "build_job",
    "check_revert_output",
    "default_output",
    "draft_recipe",
    "expect",
    "final_items",
    "prepare",
    "prepare_revert",
    "revert",
]
