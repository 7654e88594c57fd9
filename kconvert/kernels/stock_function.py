"""A stock function as a syntax tree, and a changed tree as a function in the stock one's place.

The source is taken for the function's own only where the file, compiled again, has its very code.  The new
function has the globals, default values, decorators and name of the stock one, and its traceback shows the
stock lines.  Refused: source that is not at hand or not that of the function, and decorators that cannot be copied.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

__all__ = ["NotJoinableError", "compile_like", "parse_function", "redecorate", "unwrapped"]


class NotJoinableError(Exception):
    """Why a forward cannot be changed; never leaves the layout that asked."""


def unwrapped(forward: Any) -> FunctionType:
    """The function below the decorators of a forward.

    Raises:
        NotJoinableError: it is no Python function.
    """
    function = inspect.unwrap(forward)
    if not isinstance(function, FunctionType):
        raise NotJoinableError("its forward is no Python function")
    return function


def parse_function(function: FunctionType) -> tuple[ast.FunctionDef, str]:
    """The function's definition without annotations, at the lines that it has in its file, and the file.

    Raises:
        NotJoinableError: the source is not at hand, or not that of the function.
    """
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise NotJoinableError("the source of its forward is not at hand") from None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        raise NotJoinableError("its forward is no plain method")
    definition.returns = None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    _check_source(function)
    ast.increment_lineno(definition, max(first_line, 1) - 1)
    return definition, inspect.getsourcefile(function) or "<stock forward>"


def _codes(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _codes(item)


def _check_source(function: FunctionType) -> None:
    """The file may have changed since it was imported, or lie about a function that was made elsewhere.

    The whole file is compiled, because the bytes of a function's code depend on what its module imports.
    """
    real = function.__code__
    try:
        keys = _keys_in("".join(linecache.getlines(real.co_filename)), real.co_filename)
    except (SyntaxError, ValueError):
        raise NotJoinableError("the source of its forward is not at hand") from None
    if _key(real) not in keys:
        raise NotJoinableError("the source of its forward is not that of the function")


@lru_cache(maxsize=4)  # one function is looked at several times, and a long file takes long
def _keys_in(text: str, filename: str) -> frozenset[tuple[object, ...]]:
    """Of every function in a file."""
    return frozenset(map(_key, _codes(compile(text, filename, "exec", dont_inherit=True))))


def _key(code: CodeType) -> tuple[object, ...]:
    """What tells one function's code from another's, with the functions inside it."""
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    constants = tuple(_constant(item) for item in code.co_consts)
    return code.co_qualname, code.co_firstlineno, code.co_code, code.co_exceptiontable, signature, names, constants


def _constant(item: object) -> object:
    """A constant such that 1, 1.0 and True, and 0.0 and -0.0, are different ones."""
    if isinstance(item, CodeType):
        return _key(item)
    if isinstance(item, tuple | frozenset):
        return type(item), type(item)(map(_constant, item))
    return type(item), repr(item)


def compile_like(definition: ast.FunctionDef, function: FunctionType, filename: str) -> FunctionType:
    """The function in the globals of the stock one, with its default values and without its decorators."""
    definition.decorator_list = []
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    tree = ast.fix_missing_locations(ast.Module(body=[definition], type_ignores=[]))
    module = compile(tree, filename, "exec", dont_inherit=True)
    code = next(item for item in module.co_consts if isinstance(item, CodeType))
    code = code.replace(co_qualname=function.__code__.co_qualname)
    return _like(function, FunctionType(code, function.__globals__, function.__name__, function.__defaults__))


def redecorate(outer: Any, inner: FunctionType, made: FunctionType) -> FunctionType:
    """`made` in the place of `inner` below the decorators that make `outer` of it.

    They are copied and not called again: their arguments may come from the scope of the class, and some were put
    there when the program was running.
    """
    if outer is inner:
        return made
    wrapped: Any = outer.__wrapped__
    below = redecorate(wrapped, inner, made)
    cells = getattr(outer, "__closure__", None) or ()
    if not isinstance(outer, FunctionType) or not any(_holds(cell, wrapped) for cell in cells):
        raise NotJoinableError("its forward has a decorator that cannot be copied")
    closure = tuple(CellType(below) if _holds(cell, wrapped) else cell for cell in cells)
    copied = _like(outer, FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure))
    copied.__dict__["__wrapped__"] = below  # as functools has it
    return copied


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # not filled yet
        return False


def _like(function: FunctionType, made: FunctionType) -> FunctionType:
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__doc__ = function.__doc__
    made.__dict__.update(function.__dict__)
    return made
