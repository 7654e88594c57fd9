"""Conversion from end to end: where the offline engine meets transformers."""

from kconvert.convert.apply import ApplyResult, apply_recipe, build_job, default_output
from kconvert.convert.prepare import Prepared, prepare

__all__ = ["ApplyResult", "Prepared", "apply_recipe", "build_job", "default_output", "prepare"]
