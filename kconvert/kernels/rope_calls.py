"""The rotary embedding of a stock forward as one call of ours, found in its syntax tree.

    q = self.q_norm(E).transpose(1, 2)                        q = E.transpose(1, 2)
    k = self.k_norm(F).transpose(1, 2)                ->      k = F.transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)               q, k = self.kconvert_rope(
                                                                  apply_rotary_pos_emb, (...), q, k, cos, sin)

A call is taken where the function that the forward's globals have under that name is proven to be a rotary embedding of q
and k.  It is handed on, so that one that somebody puts there later is called as it is.  Norms are taken where only the
rotation reads what they give, both in the same run of statements and with nothing but the exchange of heads and tokens
between.  Refused: what `joined_calls` refuses, and calls on a condition inside an expression or in inner functions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from torch import nn

from kconvert.kernels.joined_calls import (
    apply_output,
    innermost_run,
    is_in_place,
    joined_definition,
    stock_definition,
    targets_of,
)
from kconvert.kernels.ops.rope.variant import RopeVariant, prove_rope
from kconvert.kernels.stock_function import NotJoinableError, compile_like, redecorate

__all__ = ["NotJoinableError", "RopeForward", "fuse_rope"]

_PARAMETERS = ("q", "k", "cos", "sin")
_AXIS = "unsqueeze_dim"


@dataclass(frozen=True)
class RopeForward:
    """A changed forward.

    Attributes:
        forward: the function; the instances that it is called with have `kconvert_rope`.
        variants: each function whose calls were taken, and what it computes.
        num_norms: how many norms were taken with them.
    """

    forward: Callable[..., Any]
    variants: dict[Any, RopeVariant]
    num_norms: int


def fuse_rope(stock: type[nn.Module], *, packed: str | None = None, parts: Sequence[str] = ()) -> RopeForward:
    """The forward of `stock` with its rotary embeddings as calls of `kconvert_rope`.

    Args:
        stock: a module class.
        packed: the child that holds the rows of `parts`, to be joined as `join_calls` does; None for none.
        parts: see `join_calls`.

    Raises:
        NotJoinableError: there is no such call, or the forward is not of this kind; the text says why.
    """
    definition, function, filename = (
        stock_definition(stock) if packed is None else joined_definition(stock, packed, parts)
    )
    if packed is not None:
        apply_output(definition)
    variants: dict[Any, RopeVariant] = {}
    num_norms = 0
    self_name = definition.args.args[0].arg
    for call, callee, variant in _rope_calls(definition, function):
        norms = _take_norms(definition, function, call, self_name)
        num_norms += 2 if norms is not None else 0
        variants[callee] = variant
        call.args = [call.func, ast.Constant(cast("Any", norms)), *call.args]
        call.func = ast.Attribute(ast.Name(self_name, ast.Load()), "kconvert_rope", ast.Load())
        for node in (call.func, call.func.value, call.args[1]):
            ast.copy_location(node, call)
    made = redecorate(stock.forward, function, compile_like(definition, function, filename))
    return RopeForward(made, variants, num_norms)


def _rope_calls(definition: ast.FunctionDef, function: FunctionType) -> list[tuple[ast.Call, Any, RopeVariant]]:
    found = []
    reasons = []
    inner = _inner_nodes(definition)
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not _is_plain(node):
            continue
        name = node.func.id
        if name in function.__code__.co_varnames or name in function.__code__.co_cellvars:
            continue
        callee = function.__globals__.get(name)
        if not callable(callee) or isinstance(callee, type):
            continue
        variant = prove_rope(callee)
        if isinstance(variant, str):
            reasons.append(f"{name} {variant}")
        elif id(node) in inner:
            reasons.append(f"{name} is called in an inner function")
        else:
            found.append((node, callee, variant))
    if not found:
        told = f": {reasons[0]}" if reasons else ""
        raise NotJoinableError(f"its forward calls no rotary embedding of q and k{told}")
    return found


def _inner_nodes(definition: ast.FunctionDef) -> set[int]:
    """What runs elsewhere than in the forward itself, or was evaluated where it is defined."""
    outside: list[ast.AST] = [definition.args, *definition.decorator_list]
    kinds = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Lambda,
        ast.GeneratorExp,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
    )
    outside += [node for node in ast.walk(definition) if isinstance(node, kinds) and node is not definition]
    return {id(node) for root in outside for node in ast.walk(root)}


def _is_plain(call: ast.Call) -> bool:
    """Whether a call gives each of `q`, `k`, `cos` and `sin` once, the axis perhaps, and nothing else."""
    if len(call.args) > len(_PARAMETERS) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return False
    given = [*_PARAMETERS[: len(call.args)], *(str(keyword.arg) for keyword in call.keywords)]
    return sorted(name for name in given if name != _AXIS) == sorted(_PARAMETERS)


def _take_norms(
    definition: ast.FunctionDef, function: FunctionType, call: ast.Call, self_name: str
) -> tuple[str, str, bool] | None:
    """Take the norms of q and k out of the tree; their names, and whether heads and tokens are exchanged after them.

    None, and the tree as it was, where that would change what anything but the rotation reads.
    """
    block, index, statement = innermost_run(definition.body, call)
    names = [arg.id for arg in call.args[:2] if isinstance(arg, ast.Name)]
    if len(names) != 2 or names[0] == names[1] or set(names) & set(function.__code__.co_cellvars):
        return None
    if not isinstance(statement, ast.Assign) or statement.value is not call or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Tuple) or [getattr(item, "id", None) for item in target.elts] != names:
        return None
    others = [*call.args[2:], *(keyword.value for keyword in call.keywords)]
    if any(_mentions(node, name) for node in others for name in names) or any(map(_is_not_calm, others)):
        return None
    found = [_norm_of(block[:index], name, self_name) for name in names]
    if found[0] is None or found[1] is None or found[0].is_swapped != found[1].is_swapped:
        return None
    for norm in found:
        assert norm is not None
        norm.remove()
    return found[0].name, found[1].name, found[0].is_swapped


@dataclass(frozen=True)
class _Norm:
    """The call of a norm in an assignment, and what holds it: another call's attribute, or the assignment itself."""

    name: str
    is_swapped: bool
    call: ast.Call
    holder: ast.Assign | ast.Attribute

    def remove(self) -> None:
        """Put what it norms in its place."""
        self.holder.value = self.call.args[0]


def _norm_of(before: Sequence[ast.stmt], name: str, self_name: str) -> _Norm | None:
    """The norm that gives the variable its value, where nothing reads it or changes tensors from there on."""
    is_swapped = False
    for statement in reversed(before):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or _is_not_calm(statement):
            return None
        if not all(isinstance(node, ast.Name | ast.Tuple | ast.expr_context) for node in targets_of(statement)):
            return None
        if not _mentions(statement, name):
            continue
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        if getattr(statement.targets[0], "id", None) != name:
            return None
        holder: ast.Assign | ast.Attribute = statement
        while (inner := _transposed(holder.value)) is not None:
            holder, is_swapped = inner, not is_swapped
        value = holder.value
        if isinstance(value, ast.Name) and value.id == name:
            continue
        norm = _child_call(value, self_name)
        return None if norm is None else _Norm(norm, is_swapped, value, holder)  # type: ignore[arg-type]  # it is a call
    return None


def _transposed(node: ast.expr) -> ast.Attribute | None:
    """The `x.transpose` of `x.transpose(1, 2)`, or None."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return None
    is_ours = node.func.attr == "transpose" and [ast.unparse(arg) for arg in node.args] == ["1", "2"]
    return node.func if is_ours else None


def _child_call(node: ast.expr, self_name: str) -> str | None:
    """The name of the child in `self.name(x)`, or None."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
        return None
    called = node.func
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == self_name:
        return called.attr
    return None


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))


def _is_not_calm(node: ast.AST) -> bool:
    kinds = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Lambda)
    return any(isinstance(inner, kinds) or is_in_place(inner) for inner in ast.walk(node))
