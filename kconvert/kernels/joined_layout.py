"""Layouts whose kernels run a changed copy of the stock forward, made once per patched class.

Plain functions on the class, because a compiler has to see through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import nn

from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.classes import DERIVED
from kconvert.kernels.joined_calls import NotJoinableError
from kconvert.kernels.layout import Layout

__all__ = ["JoinedKernel", "JoinedLayout"]


class JoinedLayout(Layout):
    """Base of such layouts.

    Class attributes of a patched class:
        kconvert_joined_forward: the changed copy, or None.
        kconvert_joined_from: the stock forward that it was made from.
        kconvert_not_joined: why there is none.
    """

    takes_one_tensor = False
    kconvert_joined_forward: ClassVar[Callable[..., Any] | None] = None
    kconvert_joined_from: ClassVar[Callable[..., Any] | None] = None
    kconvert_not_joined: ClassVar[str | None] = None

    @classmethod
    def join(cls, stock: type[nn.Module]) -> Callable[..., Any]:
        """The changed copy of the forward of `stock`.

        Raises:
            NotJoinableError: it cannot be made; the text says why.
        """
        raise TypeError(f"{cls.__name__} does not say how it joins")

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """The joined forward."""
        forward, joined, why_not = stock.forward, None, None
        try:
            joined = cls.join(stock)
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


class JoinedKernel(LayoutKernel):
    """Base of their kernels: the joined forward, on whatever device."""

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward takes and gives; hidden states are `[batch, tokens, hidden]`."""
        patched = cast("Any", DERIVED[cast("Any", module).kconvert_class])
        if patched.kconvert_joined_from is not patched.kconvert_stock_class.forward:  # replaced after the choice
            return cast("Any", module).reference(*args, **kwargs)
        return patched.kconvert_joined_forward(module, *args, **kwargs)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward could be joined."""
        return cast("type[JoinedLayout]", type(module)).why_not_joined()
