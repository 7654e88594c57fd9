"""Constructor arguments of replaced modules: what the model itself passed, seen while it is being built.

A package's layout takes the arguments of the class it replaces.  They are read in the loading thread alone,
through the interpreter's call events, so nothing is patched: `sys.setprofile`, or `sys.settrace` where a
profiler is running.  What a call passed by position and what by name does not show there, so a layout gets each
value under the name that the replaced class has for it, wherever the layout has a parameter of that name.
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

__all__ = ["CapturedCalls", "capture_constructors", "fit_arguments"]


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


def fit_arguments(
    stock: type[nn.Module], layout: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `stock` module as `layout` takes them.

    Parameters of one name belong together, in whatever order and whether by position or keyword only; those that are
    left belong together in their order.  A default of the stock class that the layout has no parameter for is left
    out; anything else that it does not take is passed on, so that the error names it.
    """
    kind = inspect.Parameter
    try:
        wanted = inspect.signature(layout).parameters
        known = inspect.signature(stock).parameters
        values = inspect.signature(stock).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a constructor that cannot be looked at
        return args, kwargs
    positional_only = {kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY}
    if any(each.kind in positional_only for each in wanted.values()) or any(
        known[name].kind is kind.VAR_POSITIONAL for name in values
    ):
        return args, kwargs
    takes_any = any(each.kind is kind.VAR_KEYWORD for each in wanted.values())
    free = [
        each.name for each in wanted.values() if each.kind is kind.POSITIONAL_OR_KEYWORD and each.name not in values
    ]
    found: dict[str, Any] = {}
    for name, value in values.items():
        if known[name].kind is kind.VAR_KEYWORD:
            found.update(value)
        elif name in wanted:
            found[name] = value
        elif takes_any or value is not known[name].default:
            is_placed = free and known[name].kind is not kind.KEYWORD_ONLY
            found[free.pop(0) if is_placed else name] = value
    return (), found


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
