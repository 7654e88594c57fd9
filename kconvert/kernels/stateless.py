"""Kernels without a layout: a package's class that has only a forward, put on modules that keep their parameters.

That is the classic layer of the `kernels` library, and what it asks of one is asked here: an `nn.Module` without a
constructor, without attributes of its own but `has_backward` and `can_torch_compile`, and with a forward that takes
what the stock one takes.  The forward is swapped on this model only; the stock forward is the reference, and runs where
a gradient is needed and `has_backward` is False, or while a compiler traces and `can_torch_compile` is not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, getmembers, signature
from typing import ClassVar

from torch import nn

from kconvert.errors import KernelRefusedError, RecipeError
from kconvert.kernels.layout import Layout

__all__ = ["check_stateless", "signature_reason", "stateless_layout"]

_FLAGS = frozenset({"has_backward", "can_torch_compile"})


def check_stateless(kernel: type, where: str) -> None:
    """Refuse a class that could hold state of its own.

    Raises:
        RecipeError: saying what is wrong with it.
    """
    name = kernel.__name__
    stray = sorted({key for key, _ in getmembers(kernel)} - {key for key, _ in getmembers(nn.Module)} - _FLAGS)
    if not issubclass(kernel, nn.Module):
        reason = "it is no torch.nn.Module"
    elif kernel.__init__ is not nn.Module.__init__:
        reason = "it has its own __init__"
    elif stray:
        reason = f"it has {', '.join(stray)} beside its forward"
    else:
        return
    raise RecipeError(
        f"{where} has no torch.nn.Module class {name}Layout beside {name}, so {name} has to be stateless, and {reason}",
        fix=f"define class {name}Layout(nn.Module) in the same module, or leave only the forward in {name}",
    )


class StatelessLayout(Layout):
    """Base of the layouts that change nothing but the forward."""

    kernel: ClassVar[type[nn.Module]]

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """None: the signature is looked at when the module is patched, with or without a model check."""
        return None

    @classmethod
    def patch(cls, modules: Sequence[nn.Module]) -> nn.Module:
        """Swap the forward of the one module.

        Raises:
            KernelRefusedError: the kernel's forward does not take what the stock one takes.
        """
        reason = signature_reason(cls.kernel, type(modules[0]))
        if reason is not None:
            raise KernelRefusedError(
                f"the forward of kernel {cls.kernel.__name__} does not fit {type(modules[0]).__name__}: {reason}",
                fix="give it the parameters of the stock forward",
            )
        return super().patch(modules)


def signature_reason(kernel: type[nn.Module], stock: type[nn.Module]) -> str | None:
    """Why calls of the stock forward do not fit the kernel's, or None."""
    _, *own = signature(kernel.forward).parameters.values()
    _, *wanted = signature(stock.forward).parameters.values()
    if len(own) != len(wanted):
        return f"it takes {_listed(own)}, the stock forward {_listed(wanted)}"
    for mine, theirs in zip(own, wanted, strict=True):
        if mine.kind is not theirs.kind:
            return f"{mine} is {mine.kind.description}, {theirs} of the stock forward is {theirs.kind.description}"
        # one single input is always passed by position
        if mine.name != theirs.name and len(wanted) > 1 and mine.kind is Parameter.POSITIONAL_OR_KEYWORD:
            return f"its parameter {mine.name} is called {theirs.name} in the stock forward"
        if theirs.default is not Parameter.empty and mine.default is Parameter.empty:
            return f"its parameter {mine.name} has no default"
    return None


def _listed(parameters: Sequence[Parameter]) -> str:
    return f"({', '.join(map(str, parameters))})"


_LAYOUTS: dict[type[nn.Module], type[StatelessLayout]] = {}


def stateless_layout(kernel: type[nn.Module]) -> type[StatelessLayout]:
    """The layout that puts the forward of `kernel` on stock modules; the same one for the same class."""
    made = type("StatelessLayout", (StatelessLayout,), {"kernel": kernel, "__module__": __name__})
    return _LAYOUTS.setdefault(kernel, made)
