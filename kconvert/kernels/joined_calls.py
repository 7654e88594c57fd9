"""One projection instead of several: a stock forward, rewritten at the level of its syntax tree.

    q = self.q_proj(x).view(...)            a, b, c = self.kconvert_project("qkv_proj", x)
    k = self.k_proj(x).view(...)     ->     q = a.view(...)
    v = self.v_proj(x).view(...)            k = b.view(...) ...

The function is compiled into the globals of the module that has the stock class, so everything else in it is
what transformers wrote: caches, masks, attention interface, rotary embedding.  It is made once per class, holds
no state, has the stock default values and decorators, and its traceback shows the stock lines.  Only what is
plainly the same is rewritten.  Refused: source that is not at hand or not that of the function, closures,
`super()`, private names, a projection that is not called exactly once in the same run of statements, projections
of different inputs, and anything from the first projection to the last but plain assignments that leave the input
alone.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["NotJoinableError", "join_calls"]

_FACTS = ("shape", "dtype", "device", "ndim", "size", "dim")  # what may be read of a tensor whose values do not matter
_IN_PLACE = ("setattr", "setitem", "iadd", "isub", "imul", "itruediv")  # functions, and methods with underscores
_BEFORE = (ast.Assign, ast.AnnAssign)
_LAST = (*_BEFORE, ast.Return, ast.Expr)
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp)


class NotJoinableError(Exception):
    """Why a forward cannot be rewritten; never leaves the layout that asked."""


def join_calls(stock: type[nn.Module], packed: str, parts: Sequence[str]) -> Callable[..., Any]:
    """The forward of `stock` with the calls of its `parts` joined into one of `packed`.

    Args:
        stock: a module class.
        packed: the child that holds all rows; its instances have `kconvert_project`.
        parts: the children whose rows it holds, in part order.

    Raises:
        NotJoinableError: the forward is not of this kind; the text says why.
    """
    function = inspect.unwrap(stock.forward)
    if not isinstance(function, FunctionType):
        raise NotJoinableError("its forward is no Python function")
    definition, first_line, filename = _parse(function)
    _check_source(function)
    _check_scope(definition, function)
    self_name = definition.args.args[0].arg
    calls = {part: _calls_of(definition, self_name, part) for part in parts}
    for part, found in calls.items():
        if len(found) != 1:
            raise NotJoinableError(f"its forward calls {part} {len(found)} times")
    _rewrite(definition, self_name, packed, {part: found[0] for part, found in calls.items()})
    ast.increment_lineno(definition, first_line - 1)
    return _redecorated(stock.forward, function, _compiled(definition, function, filename))


def _parse(function: FunctionType) -> tuple[ast.FunctionDef, int, str]:
    """The function's definition without annotations, its first line, and the file."""
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
    return definition, max(first_line, 1), inspect.getsourcefile(function) or "<stock forward>"


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
        module = compile("".join(linecache.getlines(real.co_filename)), real.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        raise NotJoinableError("the source of its forward is not at hand") from None
    if not any(_key(code) == _key(real) for code in _codes(module)):
        raise NotJoinableError("the source of its forward is not that of the function")


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


def _check_scope(definition: ast.FunctionDef, function: FunctionType) -> None:
    if function.__code__.co_freevars:
        raise NotJoinableError(f"its forward is a closure over {function.__code__.co_freevars[0]}")
    self_name = definition.args.args[0].arg
    for node in ast.walk(definition):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            raise NotJoinableError(f"its forward uses the private name {name}")
        if isinstance(node, ast.Name) and node.id in ("super", "locals", "vars", "dir", "eval", "exec", "__class__"):
            raise NotJoinableError(f"its forward uses {node.id}")
        if isinstance(node, ast.Name) and node.id == self_name and not isinstance(node.ctx, ast.Load):
            raise NotJoinableError(f"its forward binds {self_name}")


def _calls_of(definition: ast.FunctionDef, self_name: str, child: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == child
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == self_name
    ]


def _rewrite(definition: ast.FunctionDef, self_name: str, packed: str, calls: dict[str, ast.Call]) -> None:
    """Replace the calls in place, with the joined call before the first statement that has one."""
    inputs = {_input_name(part, call) for part, call in calls.items()}
    if len(inputs) != 1:
        raise NotJoinableError(f"its projections have different inputs: {', '.join(sorted(inputs))}")
    (hidden,) = inputs
    places = [_place(definition, call, part) for part, call in calls.items()]
    block = places[0][0]
    if any(other is not block for other, _ in places):
        raise NotJoinableError("its projections are not in one run of statements")
    first, last = min(index for _, index in places), max(index for _, index in places)
    _check_local(definition, hidden)
    _check_unchanged(block[first : last + 1], hidden, list(calls.values()))
    names = {part: f"_kconvert_{part}" for part in calls}
    taken = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    if taken & set(names.values()):
        raise NotJoinableError("its forward uses a name of ours")
    swap = _Swap({id(call): names[part] for part, call in calls.items()})
    block[first : last + 1] = [swap.visit(statement) for statement in block[first : last + 1]]
    targets = ", ".join(names.values())
    joined = ast.parse(f"{targets}, = {self_name}.kconvert_project({packed!r}, {hidden})").body[0]
    for node in ast.walk(joined):
        ast.copy_location(node, block[first])
    block.insert(first, joined)


def _input_name(part: str, call: ast.Call) -> str:
    if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
        raise NotJoinableError(f"its forward gives {part} something else than one variable")
    return call.args[0].id


def _place(definition: ast.FunctionDef, call: ast.Call, part: str) -> tuple[list[ast.stmt], int]:
    """The innermost run of statements that holds the call, and the place of the statement in it."""
    block, index, statement = _innermost(definition.body, call)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise NotJoinableError(f"its forward calls {part} in an inner function")
    if _is_compound(statement):
        raise NotJoinableError(f"its forward calls {part} in the head of a statement")
    for node in ast.walk(statement):
        if isinstance(node, (*_CONDITIONAL, ast.GeneratorExp)) and any(inner is call for inner in ast.walk(node)):
            raise NotJoinableError(f"its forward calls {part} on a condition")
    return block, index


def _innermost(block: list[ast.stmt], call: ast.Call) -> tuple[list[ast.stmt], int, ast.stmt]:
    for index, statement in enumerate(block):
        if not any(node is call for node in ast.walk(statement)):
            continue
        for inner in _blocks(statement):
            if any(node is call for part in inner for node in ast.walk(part)):
                return _innermost(inner, call)
        return block, index, statement
    raise NotJoinableError("its forward calls a projection in a default value or decorator")


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The runs of statements inside a compound one; an inner function is none, it runs elsewhere."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(statement, name, None)
        if isinstance(inner, list):
            yield inner
    for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield handler.body


def _is_compound(statement: ast.stmt) -> bool:
    return any(True for _ in _blocks(statement))


def _check_local(definition: ast.FunctionDef, hidden: str) -> None:
    """Only the forward itself may bind the input."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Global | ast.Nonlocal) and hidden in node.names:
            raise NotJoinableError(f"its forward shares {hidden} with other functions")
    arguments = {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
    bound = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if hidden not in arguments | bound:
        raise NotJoinableError(f"its forward shares {hidden} with other functions")


def _check_unchanged(statements: Sequence[ast.stmt], hidden: str, calls: Sequence[ast.Call]) -> None:
    """From the first projection to the last, the input must be the same tensor with the same values.

    Whatever changes a tensor in place is refused there: the input may go by another name too.
    """
    projected = {id(call.args[0]) for call in calls}
    for statement in statements:
        is_last = statement is statements[-1]
        if not isinstance(statement, _LAST if is_last else _BEFORE):
            raise NotJoinableError("its forward has more than assignments between the projections")
        targets = _targets(statement)
        if not is_last and not all(isinstance(node, ast.Name | ast.Tuple | ast.expr_context) for node in targets):
            raise NotJoinableError("its forward assigns to more than variables between the projections")
        facts = (node.value for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr in _FACTS)
        allowed = projected | {id(node) for node in (*facts, *(targets if is_last else ()))}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == hidden and id(node) not in allowed:
                does = "uses" if isinstance(node.ctx, ast.Load) else "binds"
                raise NotJoinableError(f"its forward {does} {hidden} between the projections")
            if _is_in_place(node):
                raise NotJoinableError("its forward changes a tensor in place between the projections")
            if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
                raise NotJoinableError("its forward is left between the projections")


def _targets(statement: ast.stmt) -> list[ast.AST]:
    """What an assignment binds, as every node in it."""
    if isinstance(statement, ast.AnnAssign):
        return list(ast.walk(statement.target))
    return [node for target in getattr(statement, "targets", ()) for node in ast.walk(target)]


def _is_in_place(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))
        named = any(keyword.arg in ("out", "inplace") for keyword in node.keywords)
        return named or (called.endswith("_") and not called.endswith("__")) or called.strip("_") in _IN_PLACE
    return isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)


class _Swap(ast.NodeTransformer):
    """Replaces some calls, known by identity, by names."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """One of the calls as its name; any other with what is inside."""
        name = self._names.get(id(node))
        if name is None:
            return self.generic_visit(node)
        return ast.copy_location(ast.Name(name, ast.Load()), node)


def _compiled(definition: ast.FunctionDef, function: FunctionType, filename: str) -> FunctionType:
    """The function in the globals of the stock one, with its default values and without its decorators."""
    definition.decorator_list = []
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    tree = ast.fix_missing_locations(ast.Module(body=[definition], type_ignores=[]))
    module = compile(tree, filename, "exec", dont_inherit=True)
    code = next(item for item in module.co_consts if isinstance(item, CodeType))
    code = code.replace(co_qualname=function.__code__.co_qualname)
    return _like(function, FunctionType(code, function.__globals__, function.__name__, function.__defaults__))


def _redecorated(outer: Any, inner: FunctionType, made: FunctionType) -> FunctionType:
    """`made` in the place of `inner` below the decorators that make `outer` of it.

    They are copied and not called again: their arguments may come from the scope of the class, and some were put
    there when the program was running.
    """
    if outer is inner:
        return made
    wrapped: Any = outer.__wrapped__
    below = _redecorated(wrapped, inner, made)
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
