"""Attention with the rotary embedding of q and k as one call, and its projections as they are.

    q, k = rope( norm(q), norm(k) )            with the norms where the model has one for each head

For attention whose projections stay apart; `qkv_proj` has this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from torch import nn

from kconvert.kernels.layout import stock_class_of
from kconvert.kernels.ops.rope.fused import RotatingLayout
from kconvert.kernels.ops.rope.spec import SPEC
from kconvert.kernels.rope_calls import NotJoinableError, RopeForward, fuse_rope

__all__ = ["RopeLayout"]


class RopeLayout(RotatingLayout):
    """Attention with its parameters as they are."""

    spec = SPEC

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose forward calls a rotary embedding of q and k that is known."""
        stock = stock_class_of(modules[0])
        made = _fused(cast("Any", stock), stock.forward)
        return made if isinstance(made, str) else None

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """The forward with that call as ours."""
        made = _fused(cast("Any", stock), stock.forward)
        fused, why_not = (None, made) if isinstance(made, str) else (made, None)
        return {
            "kconvert_joined_forward": fused and fused.forward,
            "kconvert_joined_from": stock.forward,
            "kconvert_not_joined": why_not,
            "kconvert_ropes": {} if fused is None else fused.variants,
        }


@cache
def _fused(stock: Any, forward: object) -> RopeForward | str:
    """The changed forward of a class, or why there is none; `forward` is its own, which somebody may replace."""
    del forward
    try:
        return fuse_rope(stock)
    except NotJoinableError as error:
        return str(error)
