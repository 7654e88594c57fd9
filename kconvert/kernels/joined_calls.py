"""One projection instead of several: the calls in a stock forward, joined in its syntax tree.

    q = self.q_proj(x).view(...)            a, b, c = self.kconvert_project("qkv_proj", x)
    k = self.k_proj(x).view(...)     ->     q = a.view(...)
    v = self.v_proj(x).view(...)            k = b.view(...) ...
    self.o_proj(y)                          self.kconvert_apply("o_proj", y)

Everything else in the function is what transformers wrote: caches, masks, attention interface, rotary embedding.
It is made once per class and holds no state.  Only what is plainly the same is joined.  Refused: what
`stock_function` refuses, closures, `super()`, private names, a projection that is not called exactly once in the
same run of statements, projections of different inputs, and anything from the first projection to the last but
plain assignments that leave the input alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

from torch import nn

from kconvert.kernels.stock_function import NotJoinableError, compile_like, parse_function, redecorate, unwrapped

__all__ = [
    "NotJoinableError",
    "apply_output",
    "check_scope",
    "innermost_run",
    "is_in_place",
    "join_calls",
    "joined_definition",
    "stock_definition",
    "targets_of",
]

_OUTPUT = "o_proj"
"""The projection behind attention, which is called with less work in Python."""
_FACTS = ("shape", "dtype", "device", "ndim", "size", "dim")  # what may be read of a tensor whose values do not matter
_IN_PLACE = ("setattr", "setitem", "iadd", "isub", "imul", "itruediv")  # functions, and methods with underscores
_BEFORE = (ast.Assign, ast.AnnAssign)
_LAST = (*_BEFORE, ast.Return, ast.Expr)
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp)


def join_calls(stock: type[nn.Module], packed: str, parts: Sequence[str]) -> Callable[..., Any]:
    """The forward of `stock` with the calls of its `parts` joined into one of `packed`.

    Args:
        stock: a module class.
        packed: the child that holds all rows; its instances have `kconvert_project` and `kconvert_apply`.
        parts: the children whose rows it holds, in part order.

    Raises:
        NotJoinableError: the forward is not of this kind; the text says why.
    """
    definition, function, filename = joined_definition(stock, packed, parts)
    apply_output(definition)
    return redecorate(stock.forward, function, compile_like(definition, function, filename))


def joined_definition(
    stock: type[nn.Module], packed: str, parts: Sequence[str]
) -> tuple[ast.FunctionDef, FunctionType, str]:
    """The syntax tree with the calls joined, the stock function below its decorators, and its file."""
    definition, function, filename = stock_definition(stock)
    self_name = definition.args.args[0].arg
    calls = {part: _calls_of(definition, self_name, part) for part in parts}
    for part, found in calls.items():
        if len(found) != 1:
            raise NotJoinableError(f"its forward calls {part} {len(found)} times")
    _join(definition, self_name, packed, {part: found[0] for part, found in calls.items()})
    return definition, function, filename


def apply_output(definition: ast.FunctionDef) -> None:
    """Let `kconvert_apply` call the projection behind attention, in place."""
    for call in _calls_of(definition, definition.args.args[0].arg, _OUTPUT):
        if len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred):
            call.args.insert(0, ast.copy_location(ast.Constant(_OUTPUT), call))
            cast("ast.Attribute", call.func).attr = "kconvert_apply"


def stock_definition(stock: type[nn.Module]) -> tuple[ast.FunctionDef, FunctionType, str]:
    """The syntax tree of a forward that may be changed, the function below its decorators, and its file.

    Raises:
        NotJoinableError: its source is not at hand, or it uses what a changed copy would not have.
    """
    function = unwrapped(stock.forward)
    definition, filename = parse_function(function)
    check_scope(definition, function)
    return definition, function, filename


def check_scope(definition: ast.FunctionDef, function: FunctionType) -> None:
    """Raises NotJoinableError where a changed copy of the function could mean something else by its names."""
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


def _join(definition: ast.FunctionDef, self_name: str, packed: str, calls: dict[str, ast.Call]) -> None:
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
    block, index, statement = innermost_run(definition.body, call)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise NotJoinableError(f"its forward calls {part} in an inner function")
    if _is_compound(statement):
        raise NotJoinableError(f"its forward calls {part} in the head of a statement")
    for node in ast.walk(statement):
        if isinstance(node, (*_CONDITIONAL, ast.GeneratorExp)) and any(inner is call for inner in ast.walk(node)):
            raise NotJoinableError(f"its forward calls {part} on a condition")
    return block, index


def innermost_run(block: list[ast.stmt], call: ast.Call) -> tuple[list[ast.stmt], int, ast.stmt]:
    """The innermost run of statements below `block` that holds the call, the place of its statement, and that."""
    for index, statement in enumerate(block):
        if not any(node is call for node in ast.walk(statement)):
            continue
        for inner in _blocks(statement):
            if any(node is call for part in inner for node in ast.walk(part)):
                return innermost_run(inner, call)
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
        targets = targets_of(statement)
        if not is_last and not all(isinstance(node, ast.Name | ast.Tuple | ast.expr_context) for node in targets):
            raise NotJoinableError("its forward assigns to more than variables between the projections")
        facts = (node.value for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr in _FACTS)
        allowed = projected | {id(node) for node in (*facts, *(targets if is_last else ()))}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == hidden and id(node) not in allowed:
                does = "uses" if isinstance(node.ctx, ast.Load) else "binds"
                raise NotJoinableError(f"its forward {does} {hidden} between the projections")
            if is_in_place(node):
                raise NotJoinableError("its forward changes a tensor in place between the projections")
            if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
                raise NotJoinableError("its forward is left between the projections")


def targets_of(statement: ast.stmt) -> list[ast.AST]:
    """What an assignment binds, as every node in it."""
    if isinstance(statement, ast.AnnAssign):
        return list(ast.walk(statement.target))
    return [node for target in getattr(statement, "targets", ()) for node in ast.walk(target)]


def is_in_place(node: ast.AST) -> bool:
    """Whether a node may change a tensor, as far as its text shows."""
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
