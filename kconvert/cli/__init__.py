"""The command line.  `main` is the entry point; it returns the exit code."""

from kconvert.cli.app import main

__all__ = ["main"]
