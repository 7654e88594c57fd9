"""The forward of an attention class with one packed projection, as text for an exported package.

It is the stock source with three calls joined (`kernels.joined_calls`).  What it reads of its own module is read there
when it runs, `modeling_qwen3.apply_rotary_pos_emb`, so whatever is put there later is followed as in the stock code.
Refused: what cannot be joined, what the source does not show, and names that are not those of the module.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kconvert.kernels.joined_calls import NotJoinableError, joined_definition

__all__ = ["NotJoinableError", "joined_source"]

_IMPORTED = {"torch": torch, "nn": nn, "F": nn.functional}
"""What every exported `layers.py` imports under these names."""


def joined_source(stock: type[nn.Module], packed: str, parts: Sequence[str], home: str) -> str:
    """The text of a method `forward`, not indented.

    Args:
        stock: the attention class.
        packed: the child that holds all rows; the module has `{packed}_rows` too.
        parts: the children whose rows it holds.
        home: the name by which the text reaches the module of `stock`.

    Raises:
        NotJoinableError: the forward cannot be joined, or not be written down.
    """
    definition, function, _ = joined_definition(stock, packed, parts)
    if _num_wrappers(stock.forward, function) != len(definition.decorator_list):
        raise NotJoinableError("its forward is wrapped by more than the decorators in its source")
    local = {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    local |= {
        node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if home in local:
        raise NotJoinableError(f"its forward binds {home}")
    outside = _Rewrite(function.__globals__, set(), packed, home)  # what is evaluated where the function is made
    decorators = [outside.visit(node) for node in definition.decorator_list]
    defaults = [outside.visit(node) for node in definition.args.defaults]
    named = [node and outside.visit(node) for node in definition.args.kw_defaults]
    definition.decorator_list, definition.args.defaults, definition.args.kw_defaults = [], [], []
    rewritten = _Rewrite(function.__globals__, local, packed, home).visit(definition)
    rewritten.decorator_list, rewritten.args.defaults, rewritten.args.kw_defaults = decorators, defaults, named
    rewritten.name = "forward"
    return ast.unparse(ast.fix_missing_locations(rewritten))


def _num_wrappers(outer: Any, inner: object) -> int:
    """How many decorators have wrapped a function; one that was put there while the program ran counts too."""
    count = 0
    while outer is not inner:
        outer, count = outer.__wrapped__, count + 1
    return count


class _Rewrite(ast.NodeTransformer):
    """Names of the stock module to attributes of it, and our call to one that needs nothing of kconvert."""

    def __init__(self, names: dict[str, object], local: set[str], packed: str, home: str) -> None:
        self._names, self._local, self._packed, self._home = names, local, packed, home

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`self.kconvert_project("qkv_proj", x)` to `split_rows(self.qkv_proj(x), self.qkv_proj_rows)`."""
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "kconvert_project"):
            return self.generic_visit(node)
        owner, hidden = ast.unparse(node.func.value), ast.unparse(node.args[1])
        text = f"split_rows({owner}.{self._packed}({hidden}), {owner}.{self._packed}_rows)"
        return ast.parse(text, mode="eval").body

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Without the annotation, whose names may be imported nowhere here."""
        if node.value is None or not isinstance(node.target, ast.Name):
            raise NotJoinableError("its forward has annotations that cannot be copied")
        return self.generic_visit(ast.Assign([node.target], node.value))

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Without strings that stand alone, such as the docstring."""
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A global of the stock module as its attribute."""
        name = node.id
        if name in self._local or not isinstance(node.ctx, ast.Load):
            return node
        if name in self._names:
            if _IMPORTED.get(name) is self._names[name]:
                return node
            return ast.Attribute(ast.Name(self._home, ast.Load()), name, ast.Load())
        if hasattr(builtins, name):
            return node
        raise NotJoinableError(f"its forward uses {name}, which its module has not")


def definition_source(module: object, name: str) -> str:
    """The text of a function, class or assignment at the top of a module."""
    text = inspect.getsource(module)  # type: ignore[arg-type]
    for node in ast.parse(text).body:
        targets = {getattr(target, "id", None) for target in getattr(node, "targets", [getattr(node, "target", None)])}
        if getattr(node, "name", None) == name or name in targets:
            lines = text.splitlines()
            first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
            return "\n".join(lines[first - 1 : node.end_lineno])
    raise LookupError(f"{module} defines no {name}")
