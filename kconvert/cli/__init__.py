"""The command line.  `main` is the entry point; it returns the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kconvert.errors import InterruptedRunError, is_interrupt

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; never raises and never prints a traceback.

    `KCONVERT_TRACEBACK=1` in the environment shows the traceback of an unexpected error.
    """
    try:
        from kconvert.cli.app import run  # inside, so that Ctrl-C during the imports ends like any other

        return run(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        sys.stderr.write(f"kconvert: error: {InterruptedRunError()}\n")
        return InterruptedRunError.exit_code
