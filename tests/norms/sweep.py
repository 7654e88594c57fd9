"""The table of norms: `python -m tests.norms.sweep`, or `make sweep-norms`, writes `docs/norms.md`.

Imports the file of every class, which takes minutes.  The exit code is 1 if a class is wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

__all__ = ["PAGE", "main"]

PAGE = Path(__file__).parents[2] / "docs" / "norms.md"


def main() -> int:
    """Run over all classes and write the page; gives the exit code."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")

    import torch
    import transformers

    from tests.norms.classes import find_norms
    from tests.norms.outcome import Outcome, outcomes_of
    from tests.norms.report import row_of, write_report

    outcomes: list[Outcome] = []
    for norm in find_norms():
        for outcome in outcomes_of(norm, norm.load()):
            outcomes.append(outcome)
            sys.stdout.write(f"{row_of(outcome)}\n")
            sys.stdout.flush()
    page = write_report(outcomes, transformers=transformers.__version__, torch=torch.__version__)
    PAGE.write_text(page, encoding="utf-8")
    return 1 if any(outcome.status == "WRONG" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
