"""The sweep over all types whose tensors are renamed or joined while loading: `python -m tests.bake.sweep`.

Each class runs in a process of its own with a time limit, so that a crash or a hang is the outcome of that class and
stops nothing.  Over all of them the table in `docs/baking.md` is written; over named ones it is only shown.  The exit
code is 1 if a class is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.sweep.sweep import run_isolated

__all__ = ["PAGE", "main", "work"]

PAGE = Path(__file__).parents[2] / "docs" / "baking.md"


def work(label: str, directory: str) -> None:
    """In the process of one class: everything, and the outcome as a file."""
    import torch
    from transformers import logging

    from tests.bake.mapped import Subject
    from tests.bake.outcome import check_subject

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(directory) / "work"
    folder.mkdir()
    outcome = check_subject(Subject.from_label(label), folder)
    (Path(directory) / "outcome.json").write_text(json.dumps(outcome.to_json()), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bake.sweep", description="Bake every mapped model type.")
    parser.add_argument("types", nargs="*", help="model types or classes; all, and write the page, if left out")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each class")
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch
    import transformers

    from tests.bake.mapped import Subject, subjects
    from tests.bake.outcome import Outcome
    from tests.bake.report import is_shown, row_of, update_page

    chosen = [
        subject
        for subject in subjects()
        if not options.types or {subject.model_type, subject.class_name} & set(options.types)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bake.preload"])

    def made(model_type: str, **values: Any) -> Outcome:
        """An outcome as the process left it, or that of the label of one that left none."""
        subject = Subject.from_label(model_type)
        return Outcome(**{"model_type": subject.model_type, "class_name": subject.class_name, **values})

    def run(label: str) -> Any:
        return run_isolated(context, label, options.limit, work, made)

    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run, (subject.label for subject in chosen)):
            outcomes.append(outcome)
            if is_shown(outcome):
                sys.stdout.write(f"{row_of(outcome)}\n")
                sys.stdout.flush()
    if not options.types:
        update_page(PAGE, outcomes, transformers=transformers.__version__, torch=torch.__version__)
    return 1 if any(outcome.status == "WRONG" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
