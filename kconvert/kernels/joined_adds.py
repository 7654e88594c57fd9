"""A residual add and the norm behind it in one call: in the stock forward of a decoder layer, joined in its syntax tree.

    h = residual + h                     h, normed = self.kconvert_add_norm("norm", residual, h)
    residual = h                  ->     residual = h
    h = self.norm(h)                     h = normed

Everything else in the function is what transformers wrote.  Joined are statements that follow each other in one run, the
one in the middle being such a plain copy or missing; a forward without any is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from kconvert.kernels.joined_calls import check_scope
from kconvert.kernels.stock_function import NotJoinableError, compile_like, parse_function, redecorate, unwrapped

__all__ = ["join_adds"]

_NORMED = "_kconvert_normed"


def join_adds(stock: type[nn.Module], norms: Collection[str]) -> Callable[..., Any]:
    """The forward of `stock` with every residual add in front of one of its `norms` joined with it.

    Args:
        stock: a module class.
        norms: children that take one tensor; its instances have `kconvert_add_norm(norm, left, right)`, which gives
            `left + right` and the norm of that.

    Raises:
        NotJoinableError: the forward is not of this kind; the text says why.
    """
    function = unwrapped(stock.forward)
    definition, filename = parse_function(function)
    check_scope(definition, function)
    if any(isinstance(node, ast.Name) and node.id == _NORMED for node in ast.walk(definition)):
        raise NotJoinableError("its forward uses a name of ours")
    self_name = definition.args.args[0].arg
    joined = sum(_join(block, self_name, norms) for block in _blocks(definition))
    if not joined:
        raise NotJoinableError("its forward has no residual add in front of a norm")
    return redecorate(stock.forward, function, compile_like(definition, function, filename))


def _blocks(definition: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Every run of statements in a function."""
    for node in ast.walk(definition):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _join(block: list[ast.stmt], self_name: str, norms: Collection[str]) -> int:
    """Join what can be in a run of statements, in place; gives how many there were."""
    count = 0
    for place in range(len(block)):
        add = block[place]
        total = _assigned(add)
        value = getattr(add, "value", None)
        if total is None or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            continue
        behind = block[place + 1 : place + 3]
        if behind and _is_name(getattr(behind[0], "value", None), total) and _assigned(behind[0]) not in (None, total):
            behind = behind[1:]
        else:
            behind = behind[:1]
        norm = _norm_of(behind[0], self_name, total, norms) if behind else None
        if norm is None:
            continue
        count += 1
        normed = behind[0]
        made = ast.parse(f"{total}, {_NORMED} = {self_name}.kconvert_add_norm({norm!r}, None, None)").body[0]
        assert isinstance(made, ast.Assign)
        assert isinstance(made.value, ast.Call)
        made.value.args[1:] = [value.left, value.right]
        for node in ast.walk(made):
            if not hasattr(node, "lineno") or node.lineno == 1:
                ast.copy_location(node, add)
        block[place] = made
        normed.value = ast.copy_location(ast.Name(_NORMED, ast.Load()), normed)  # type: ignore[attr-defined]
    return count


def _assigned(statement: ast.stmt) -> str | None:
    """The one variable that a plain assignment binds."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _norm_of(statement: ast.stmt, self_name: str, total: str, norms: Collection[str]) -> str | None:
    """The norm in `x = self.NORM(total)`."""
    call = getattr(statement, "value", None)
    if _assigned(statement) is None or not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
        return None
    function = call.func
    if not (isinstance(function, ast.Attribute) and _is_name(function.value, self_name) and function.attr in norms):
        return None
    return function.attr if _is_name(call.args[0], total) else None
