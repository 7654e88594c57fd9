"""Whether transformers renames or merges a model type's tensors while loading, told without importing it.

Without the structural check, file names are taken as module names, which is wrong for such a type.  The
mapping's own source file is read as text: a type that it names as a quoted word counts as mapped, so the
answer errs on the safe side.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from kconvert.errors import CheckpointError

__all__ = ["check_unmapped", "unsettled_names"]


def unsettled_names(model_type: str) -> str | None:
    """Why a type's file names may differ from its module names, or None where they are the same."""
    spec = find_spec("transformers")
    source = Path(spec.origin).with_name("conversion_mapping.py") if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        return "transformers' conversion mapping was not found"
    text = source.read_text(encoding="utf-8")
    if re.search(rf"""["']{re.escape(model_type)}["']""", text) is None:
        return None
    return f"transformers renames or joins tensors of model type {model_type!r} while loading"


def check_unmapped(model_type: str, model_dir: Path) -> None:
    """Refuse a type whose file names differ from its module names, or of which that cannot be told.

    Raises:
        CheckpointError: the structural check is needed.
    """
    what = unsettled_names(model_type)
    if what is not None:
        raise CheckpointError(
            f"{what}, so names cannot be settled without the model",
            where=str(model_dir),
            fix="leave out --no-model-check",
        )
