"""The app, and the one place where errors are printed and become an exit code."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.main

from kconvert import __version__
from kconvert.cli.apply import apply_command
from kconvert.cli.bench_kernels import bench_kernels_command
from kconvert.cli.check_kernel import check_kernel_command
from kconvert.cli.doctor import doctor_command
from kconvert.cli.export_kernel_config import export_kernel_config_command
from kconvert.cli.export_package import export_package_command
from kconvert.cli.inspect import inspect_command
from kconvert.cli.list_kernels import list_kernels_command
from kconvert.cli.new_kernel import new_kernel_command
from kconvert.cli.output import note, note_added, print_json, printable, warn
from kconvert.cli.plan import plan_command
from kconvert.cli.revert import revert_command
from kconvert.cli.verify import verify_command
from kconvert.errors import InterruptedRunError, KconvertError, UsageError, is_interrupt, one_line

__all__ = ["app", "run"]

EXIT_CODES = """\
Exit codes: 0 ok; 1 unexpected; 2 usage, or the output equals or lies inside the source; 3 recipe (unknown
kernel ID, no match, wrong class or model type); 4 checkpoint, source or converted (missing member, damaged,
already converted, shape mismatch, pickle); 5 verification failed; 6 preflight (disk or memory); 7 output exists,
is locked, or a resume is refused; 8 kernel or trust refused, changed digest; 130 interrupted.
"""
SEE_EXIT_CODES = "Exit codes: see kconvert --help."

app = typer.Typer(
    name="kconvert",
    help="Compile a Hugging Face checkpoint, once and offline, into the form that fast kernels want.",
    epilog=EXIT_CODES,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("apply", epilog=SEE_EXIT_CODES)(apply_command)
app.command("plan", epilog=SEE_EXIT_CODES)(plan_command)
app.command("inspect", epilog=SEE_EXIT_CODES)(inspect_command)
app.command("verify", epilog=SEE_EXIT_CODES)(verify_command)
app.command("revert", epilog=SEE_EXIT_CODES)(revert_command)
app.command("list-kernels", epilog=SEE_EXIT_CODES)(list_kernels_command)
app.command("bench-kernels", epilog=SEE_EXIT_CODES)(bench_kernels_command)
app.command("new-kernel", epilog=SEE_EXIT_CODES)(new_kernel_command)
app.command("check-kernel", epilog=SEE_EXIT_CODES)(check_kernel_command)
app.command("doctor", epilog=SEE_EXIT_CODES)(doctor_command)
app.command("export-package", epilog=SEE_EXIT_CODES)(export_package_command)
app.command("export-kernel-config", epilog=SEE_EXIT_CODES)(export_kernel_config_command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"kconvert {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run(argv: Sequence[str]) -> int:
    """Run the command line with these arguments, print what goes wrong, and return the exit code."""
    arguments = list(argv)
    _open_closed_streams()
    shown = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        _check_working_directory()
        result = typer.main.get_command(app).main(args=arguments, prog_name="kconvert", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        return _interrupted(arguments) if code == InterruptedRunError.exit_code else code  # typer eats the interrupt
    except KconvertError as error:
        code = _fail(arguments, str(error), error.exit_code, error.details)
        note_added(error)
        return code
    except KeyboardInterrupt:
        return _interrupted(arguments)
    except BrokenPipeError:
        # the reader has gone (`| head`); keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_interrupt(error):
            return _interrupted(arguments)
        if hasattr(error, "format_message"):  # click's usage errors; typer may carry a click of its own
            return _fail(arguments, _usage_line(error), 2)
        if os.environ.get("KCONVERT_TRACEBACK") == "1":
            raise
        line = f"unexpected {one_line(error)}; this is a fault in kconvert, KCONVERT_TRACEBACK=1 shows where"
        return _fail(arguments, line, 1)
    finally:
        warnings.showwarning = shown


def _check_working_directory() -> None:
    """Raises UsageError where it was removed: no relative path means anything, and libraries ask for it."""
    try:
        os.getcwd()  # noqa: PTH109 - only whether there is one
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror})", fix="change to another one") from None


def _usage_line(error: Any) -> str:
    """click's sentence, and where the usage is shown: of the command, where one was reached."""
    text = " ".join(error.format_message().split())
    command = error.ctx.command_path if error.ctx is not None else "kconvert"
    return f"{text.rstrip('.')}{'' if text.endswith('?') else ';'} `{command} --help` shows the usage"


def _interrupted(arguments: Sequence[str]) -> int:
    error = InterruptedRunError()
    return _fail(arguments, str(error), error.exit_code)


def _open_closed_streams() -> None:
    """Give a process that was started without stdout or stderr (`2>&-`) streams that lead nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - lives with the process


def _fail(arguments: Sequence[str], message: str, code: int, details: Mapping[str, Any] | None = None) -> int:
    note(printable(f"kconvert: error: {message}"))  # names out of foreign files must not drive the terminal
    if "--json" in arguments:
        print_json({**(details or {}), "error": message, "exit_code": code})
    return code


def _show_warning(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
    warn(str(message))
