"""Constructor arguments of replaced modules: what the model itself passed, seen while it is being built.

A package's layout takes the arguments of the class it replaces.  They are read in the loading thread alone,
through the interpreter's call events, so nothing is patched: `sys.setprofile`, or `sys.settrace` where a
profiler is running.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from kconvert.errors import UsageError

__all__ = ["CapturedCalls", "capture_constructors"]


class CapturedCalls:
    """Arguments by module instance.  Holds the instances, so an id cannot be taken by another object."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def record(self, frame: FrameType, class_names: Collection[str]) -> None:
        """Note an `__init__` call of a class of interest; the outermost call for an instance counts."""
        code = frame.f_code
        if code.co_name != "__init__" or not code.co_argcount:
            return
        instance = frame.f_locals.get(code.co_varnames[0])
        if not isinstance(instance, nn.Module) or type(instance).__name__ not in class_names:
            return
        if id(instance) not in self._calls:
            self._calls[id(instance)] = (instance, *_arguments(frame))

    def arguments(self, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model passed to this module's class.

        Raises:
            UsageError: the module was not built by a Python `__init__` that was seen.
        """
        if id(module) not in self._calls:
            raise UsageError(
                f"the constructor arguments of a {type(module).__name__} were not seen",
                fix="use a fusion, whose layout takes modules",
            )
        return self._calls[id(module)][1:]


def _arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    info, code = inspect.getargvalues(frame), frame.f_code
    # not info.args, which ends with the keyword-only names
    positional = [info.locals[name] for name in code.co_varnames[1 : code.co_argcount]]
    if info.varargs:
        positional.extend(info.locals[info.varargs])
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    keywords = {name: info.locals[name] for name in names}
    if info.keywords:
        keywords.update(info.locals[info.keywords])
    return tuple(positional), keywords


@contextmanager
def capture_constructors(class_names: Collection[str]) -> Iterator[CapturedCalls]:
    """Record the constructor arguments of modules whose class has one of these names, in this thread.

    Raises:
        UsageError: both a profiler and a tracer are active, so that neither hook is free.
    """
    calls = CapturedCalls()
    if not class_names:
        yield calls
        return

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.record(frame, class_names)

    if sys.getprofile() is None:
        install: Any = sys.setprofile
    elif sys.gettrace() is None:
        install = sys.settrace
    else:
        raise UsageError(
            "a profiler and a tracer are both active while a kernel package is loaded", fix="stop one of them"
        )
    install(hook)
    try:
        yield calls
    finally:
        install(None)
