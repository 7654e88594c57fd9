"""Attention with q, k and v in one projection: `qkv_proj`, q rows first, then k, then v.

    q, k, v = split( qkv(x) )

Whatever the attention class does with them is its own: norms, rotary embedding, caches, masks, and `o_proj`.
The three parts may have any number of rows, so grouped and multi-query attention are the same case.  Where the forward
calls a rotary embedding that is known, there is a second copy that has it and the norms before it as one call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.joined_calls import is_in_place, join_calls, stock_definition
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.qkv_proj.spec import SPEC
from kconvert.kernels.ops.rope.fused import RotatingLayout
from kconvert.kernels.packed_linear import PackedLinearLayout, call_linear
from kconvert.kernels.rope_calls import NotJoinableError, fuse_rope

__all__ = ["QKVProjLayout", "RotatingKernel"]


class QKVProjLayout(RotatingLayout, PackedLinearLayout):
    """`qkv_proj.weight` `[q + k + v rows, hidden]`, `qkv_proj.bias` `[q + k + v rows]` where the parts have one.

    Class attributes of a patched class:
        kconvert_rope_forward: the joined forward with the rotary embedding as one call, or None.
        kconvert_not_fused: why there is none.
        kconvert_keeps_parts: whether the forward changes none of q, k and v in place, as far as its text shows.
    """

    spec = SPEC
    qkv_proj: nn.Linear
    kconvert_rope_forward: ClassVar[Callable[..., Any] | None] = None
    kconvert_not_fused: ClassVar[str | None] = None
    kconvert_keeps_parts: ClassVar[bool] = False

    @classmethod
    def join(cls, stock: type[nn.Module]) -> Callable[..., Any]:
        """The stock forward with one projection."""
        ((packed, parts),) = cls.kconvert_joined.items()
        return join_calls(stock, packed, parts)

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """The joined forward, and that with the rotary embedding."""
        made = super().class_members(stock)
        ((packed, parts),) = cls.kconvert_joined.items()
        fused, why_not, keeps_parts = None, None, False
        try:
            definition, _, _ = stock_definition(stock)
            keeps_parts = not any(map(is_in_place, ast.walk(definition)))
            fused = fuse_rope(stock, packed=packed, parts=parts)
        except NotJoinableError as error:
            why_not = str(error)
        return {
            **made,
            "kconvert_rope_forward": fused and fused.forward,
            "kconvert_not_fused": why_not,
            "kconvert_ropes": {} if fused is None else fused.variants,
            "kconvert_keeps_parts": keeps_parts,
        }

    def kconvert_project(self, packed: str, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All parts of a packed projection of `hidden` `[..., in]` in one GEMM, each `[..., rows of the part]`.

        `split` gives back one gradient of all parts, where `narrow` makes one of the whole for each; autograd lets nobody
        change its results in place.
        """
        if not self.kconvert_keeps_parts:
            return super().kconvert_project(packed, hidden)
        joined = call_linear(cast("nn.Module", self._modules[packed]), hidden)
        split: tuple[torch.Tensor, ...] = joined.split(self.kconvert_sizes(packed, joined.shape[-1]), dim=-1)
        return split


class RotatingKernel(JoinedKernel):
    """Base of kernels that norm and rotate q and k in a call of their own."""

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward takes and gives; hidden states are `[batch, tokens, hidden]`."""
        if torch.compiler.is_compiling():
            return JoinedKernel.forward(module, *args, **kwargs)
        patched = cast("Any", type(module))
        rotating = patched.kconvert_rope_forward
        if rotating is None:
            return JoinedKernel.forward(module, *args, **kwargs)
        if patched.kconvert_joined_from is not patched.kconvert_stock_class.forward:  # replaced after the choice
            return cast("Any", module).reference(*args, **kwargs)
        return rotating(module, *args, **kwargs)
