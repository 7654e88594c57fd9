"""The sweep over all causal-LM types: `python -m tests.sweep.sweep`, or `make sweep`.

Each type runs in a process of its own with a time limit, so that a crash or a hang is the outcome of that type and
stops nothing.  Over all types the result is written to `docs/model-types.md`; over named ones it is only shown.  The
exit code is 1 if a type is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["main", "run_isolated"]

PAGE = Path(__file__).parents[2] / "docs" / "model-types.md"


def _work(model_type: str, directory: str) -> None:
    """In the process of one type: everything, and the outcome as a file."""
    import torch
    from transformers import logging

    from tests.sweep.outcome import check_type

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    work = Path(directory) / "work"
    work.mkdir()
    outcome = check_type(model_type, work)
    (Path(directory) / "outcome.json").write_text(json.dumps(outcome.to_json()), encoding="utf-8")


def run_isolated(context: Any, model_type: str, limit: float, work: Any = _work, outcome_class: Any = None) -> Any:
    """The outcome of a type from a process of its own.

    Args:
        context: of `multiprocessing`.
        model_type: what to run.
        limit: seconds.
        work: what runs in the process; it leaves `outcome.json` in the folder that it is given.
        outcome_class: what the outcome is made as; that of this sweep if left out.
    """
    from tests.sweep.outcome import Outcome

    made = outcome_class or Outcome
    with tempfile.TemporaryDirectory(prefix="kconvert-sweep-") as directory:
        process = context.Process(target=work, args=(model_type, directory), daemon=True)
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return made(model_type, reason=f"no result after {limit:g} seconds")
        result = Path(directory) / "outcome.json"
        if not result.is_file():
            return made(model_type, reason=f"its process ended with code {process.exitcode} and no result")
        return made(**json.loads(result.read_text(encoding="utf-8")))


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.sweep", description="Run kconvert on model types.")
    parser.add_argument("types", nargs="*", help="model types; all of them, and write the page, if left out")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each type")
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch
    import transformers

    from tests.sweep.outcome import TOLERANCE
    from tests.sweep.report import row_of, write_report
    from tests.sweep.tiny import causal_types

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sweep.preload"])
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(
            lambda name: run_isolated(context, name, options.limit), options.types or causal_types()
        ):
            outcomes.append(outcome)
            sys.stdout.write(f"{row_of(outcome)}\n")
            sys.stdout.flush()
    if not options.types:
        page = write_report(
            outcomes, transformers=transformers.__version__, torch=torch.__version__, tolerance=TOLERANCE
        )
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
    return 1 if any(outcome.status == "WRONG" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
