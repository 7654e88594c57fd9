"""Attention with q, k and v in one projection: `qkv_proj`, q rows first, then k, then v.

    q, k, v = split( qkv(x) )

Whatever the attention class does with them is its own: norms, rotary embedding, caches, masks, and `o_proj`.
The three parts may have any number of rows, so grouped and multi-query attention are the same case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from kconvert.kernels.joined_calls import NotJoinableError, join_calls
from kconvert.kernels.ops.qkv_proj.spec import SPEC
from kconvert.kernels.packed_linear import PackedLinearLayout

__all__ = ["QKVProjLayout"]


class QKVProjLayout(PackedLinearLayout):
    """`qkv_proj.weight` `[q + k + v rows, hidden]`, `qkv_proj.bias` `[q + k + v rows]` where the parts have one.

    Class attributes of a patched class, plain functions because a compiler has to see through them:
        kconvert_joined_forward: the stock forward with one projection, or None.
        kconvert_joined_from: the stock forward that it was made from.
        kconvert_not_joined: why there is none.
    """

    spec = SPEC
    takes_one_tensor = False
    qkv_proj: nn.Linear
    kconvert_joined_forward: ClassVar[Callable[..., Any] | None] = None
    kconvert_joined_from: ClassVar[Callable[..., Any] | None] = None
    kconvert_not_joined: ClassVar[str | None] = None

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """The joined forward."""
        ((packed, parts),) = cls.kconvert_joined.items()
        forward, joined, why_not = stock.forward, None, None
        try:
            joined = join_calls(stock, packed, parts)
        except NotJoinableError as error:
            why_not = str(error)
        return {
            "kconvert_joined_forward": joined,
            "kconvert_joined_from": forward,
            "kconvert_not_joined": why_not,
        }

    @classmethod
    def why_not_joined(cls) -> str | None:
        """Of a patched class; looked at again where somebody has replaced the stock forward since."""
        stock = cls.kconvert_stock_class
        if cls.kconvert_joined_from is not stock.forward:
            for name, value in cls.class_members(stock).items():
                setattr(cls, name, value)
        return cls.kconvert_not_joined
