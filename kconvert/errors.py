"""Every error that kconvert raises on purpose, with the exit code that the command line gives for it.

One line says what is wrong, where, and the way out.  Errors also derive from the builtin that a Python
caller would expect (`ValueError`, `RuntimeError`), so that code which knows nothing of kconvert can
catch them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "InterruptedRunError",
    "KconvertError",
    "KernelRefusedError",
    "KernelUnavailableError",
    "LoadError",
    "ManifestError",
    "OutputError",
    "PatternError",
    "PreflightError",
    "RecipeError",
    "RegistrationError",
    "TrustError",
    "UnknownKernelError",
    "UsageError",
    "VerificationError",
    "is_interrupt",
    "one_line",
]


_MOST_LETTERS = 4000
"""Of what is wrong: it may quote a name out of a file, and that may be as long as the file."""


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is a Ctrl-C; one that falls into the making of a class comes wrapped."""
    while not isinstance(error, KeyboardInterrupt):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def one_line(error: BaseException) -> str:
    """An error that is not ours as `Type: first line of its text`."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"


class KconvertError(Exception):
    """Base of all errors.  `str(error)` is one line: `where: what; fix`.

    Args:
        what: what is wrong, with the offending value.
        where: a file, `file:line`, tensor or module; left out where there is none.
        fix: the way out, as an imperative.
        details: plain data that `--json` shows beside the message.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        what = what if len(what) <= _MOST_LETTERS else f"{what[: _MOST_LETTERS - 3]}..."
        self.what, self.where, self.fix = what, where, fix
        self.details = dict(details or {})
        text = f"{where}: {what}" if where else what
        super().__init__(" ".join((f"{text}; {fix}" if fix else text).split()))


class UsageError(KconvertError, ValueError):
    """The command or call itself is wrong: options that exclude each other, output inside the source."""

    exit_code = 2


class RecipeError(KconvertError, ValueError):
    """The recipe is malformed, or does not fit this model."""

    exit_code = 3


class PatternError(RecipeError):
    """A path pattern that cannot be parsed."""


class UnknownKernelError(RecipeError):
    """A kernel ID that no registered kernel and no layout spec has."""


class CheckpointError(KconvertError, ValueError):
    """The source checkpoint is damaged, incomplete, already converted, or of a kind that is refused."""

    exit_code = 4


class ManifestError(CheckpointError):
    """A manifest that is damaged, of an unknown schema, or does not match the files beside it."""


class VerificationError(KconvertError, ValueError):
    """The result is not what it has to be."""

    exit_code = 5


class LoadError(VerificationError):
    """A converted checkpoint did not load whole: missing, unexpected or random tensors."""


class PreflightError(KconvertError, RuntimeError):
    """The target disk or machine cannot hold the result."""

    exit_code = 6


class OutputError(KconvertError, ValueError):
    """The output exists, is locked by another run, or holds files that kconvert did not write."""

    exit_code = 7


class KernelRefusedError(KconvertError, RuntimeError):
    """A kernel package that cannot be used as it is."""

    exit_code = 8


class KernelUnavailableError(KernelRefusedError):
    """A kernel that is known but cannot run on this machine."""


class TrustError(KernelRefusedError):
    """Code that this machine was not told to trust, or whose digest has changed."""


class RegistrationError(KconvertError, TypeError, ValueError):
    """A kernel class that cannot be registered."""


class InterruptedRunError(KconvertError, RuntimeError):
    """The run was stopped by the user."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted", fix="no output was changed")
