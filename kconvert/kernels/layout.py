"""Layouts as modules: how a stock module becomes a packed one, on one model only.

A patched module is an instance of a class made of the layout and the stock class, under the stock class's
name: what transformers decides by `isinstance` or by class name stays as it was.  The stock instance is
kept and changes class, so every attribute, hook and flag that its own `__init__` set is still there.  Its
forward picks a kernel by the device of its input at call time and otherwise runs the reference: the stock
forward, which finds every parameter that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.classes import become, derived_class
from kconvert.kernels.dispatch import Dispatch, attach, dispatched
from kconvert.transforms import LayoutSpec, Rule

__all__ = [
    "Layout",
    "has_hooks",
    "is_patched",
    "marked_view",
    "other_inputs",
    "patched_class",
    "stock_class_of",
    "stock_twin",
]


class Layout(nn.Module):
    """Base of the built-in layouts.

    Class attributes:
        spec: the declaration that everything else is read off.
        conversion_mapping: its rules.
    """

    spec: ClassVar[LayoutSpec]
    conversion_mapping: ClassVar[Sequence[Rule]] = ()
    takes_one_tensor: ClassVar[bool] = True
    """Whether the forward of every module that fits is a function of one hidden-state tensor."""
    kconvert_stock_class: ClassVar[type[nn.Module]]
    kconvert_dispatch: Dispatch

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "spec" in cls.__dict__:
            cls.conversion_mapping = cls.spec.rules

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """Why the structure of these modules (pair order) is not the layout's source structure, or None."""
        raise TypeError(f"{cls.__name__} does not say what fits it")

    @classmethod
    def patch(cls, modules: Sequence[nn.Module]) -> nn.Module:
        """Make the packed module out of stock ones; parameters are packed, or on meta as those of `modules` are.

        The first module changes class in place and is returned.
        """
        module = modules[0]
        become(module, patched_class(cls, type(module)))
        packed = cast("Layout", module)
        attach(packed, Dispatch())
        packed.pack_parameters()
        return module

    def pack_parameters(self) -> None:
        """Replace the members' parameters by the layout's.  Layouts that change none inherit this."""

    @classmethod
    def class_members(cls, stock: type[nn.Module]) -> dict[str, Any]:
        """Attributes that a patched class gets once, made from the stock class; the base adds none."""
        return {}

    def kconvert_parts(self) -> Mapping[str, type[Layout]]:
        """Children that are patched by layouts of their own, which choose their own kernels; the base has none."""
        return {}

    def kconvert_views(self) -> frozenset[str]:
        """The device types whose kernels read a weight of this module the other way round than it lies; the base has none."""
        return frozenset()

    @staticmethod
    def kconvert_in_order(result: Any) -> Any:
        """A result of the forward without what the layout leaves open, such as an order; the base leaves nothing open."""
        return result

    def facts(self) -> dict[str, Any]:
        """What is proven of this module and stored in the manifest, per class; empty where there is nothing."""
        return {}

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward over views of the packed parameters: bit-identical to stock in every dtype."""
        return type(self).kconvert_stock_class.forward(self, *args, **kwargs)


def _dispatching_forward(stock: type[nn.Module]) -> Callable[..., Any]:
    takes_one = len(signature(stock.forward).parameters) == 2

    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if takes_one and kwargs:  # stock classes do not agree on what the one input is called
            return dispatched(self, (*args, *kwargs.values()), {})
        return dispatched(self, args, kwargs)

    return forward


def patched_class(*bases: type) -> type[nn.Module]:
    """A module class that derives from `bases`, the stock class last, and picks a kernel in its forward."""

    def members() -> dict[str, Any]:
        made = {"forward": _dispatching_forward(bases[-1])}
        for base in bases[:-1]:
            made.update(base.class_members(bases[-1]) if issubclass(base, Layout) else {})
        return made

    return cast("type[nn.Module]", derived_class(patched_class, bases, members))


def is_patched(module: nn.Module) -> bool:
    """Whether `module` is a patched module."""
    return "kconvert_dispatch" in module.__dict__


def marked_view(view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`view`, marked as initialised where `tensor` is: a model's `_init_weights` must not fill it."""
    if getattr(tensor, "_is_hf_initialized", False):
        view._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own flag
    return view


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does something else than the forward of its class: hooks, or a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "_hf_hook" in module.__dict__
        or "forward" in module.__dict__
    )


def stock_class_of(module: nn.Module) -> type[nn.Module]:
    """The stock class of a module, patched or not."""
    return getattr(type(module), "kconvert_stock_class", type(module))


def other_inputs(module: nn.Module) -> str | None:
    """Why the stock forward is not a function of one tensor, or None.

    An optional second input (the gate of a gated norm) does not show when the forward is tried on one tensor.
    """
    _, *names = signature(stock_class_of(module).forward).parameters
    return None if len(names) == 1 else f"its forward takes {' and '.join(names) or 'nothing'}"


# An offloaded module holds its forward, bound to itself, as an attribute; a twin has that of its class.
_NOT_OF_THE_TWIN = ("kconvert_class", "kconvert_dispatch", "kconvert_traced", "forward", "_old_forward", "_hf_hook")


def stock_twin(
    module: nn.Module, parameters: Mapping[str, nn.Parameter | None], children: Mapping[str, nn.Module] | None = None
) -> nn.Module:
    """An instance of the module's stock class that shares all plain attributes but has its own parameters.

    Nothing of `module` is changed, so this is safe beside running threads.  Hooks are not carried over.
    """
    stock = stock_class_of(module)
    twin = stock.__new__(stock)
    nn.Module.__init__(twin)
    machinery = set(twin.__dict__)
    twin.__dict__.update({key: value for key, value in module.__dict__.items() if key not in machinery})
    for name in _NOT_OF_THE_TWIN:
        twin.__dict__.pop(name, None)
    twin._parameters.update(parameters)
    twin._buffers.update(module._buffers)
    twin._modules.update(module._modules if children is None else children)
    twin.training = module.training
    return twin
