"""Modules of a two-class package in a model: built, patched in, and with a reference of their own.

The reference is the stock forward of the replaced modules, whose parameters are views of the layout's
tensors.  It needs nothing from the package's author and serves every mapping that has an exact inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import patched_class, stock_twin
from kconvert.kernels.packing import Packing

__all__ = ["Members", "PackageModule", "build_package_module"]


@dataclass(frozen=True)
class Members:
    """The replaced stock modules, kept out of the module tree, and which rows of which tensor they read.

    `views` maps (member, parameter name) to (layout parameter name, axis, start, rows).
    """

    modules: tuple[nn.Module, ...]
    views: dict[tuple[int, str], tuple[str, int, int, int]]


class PackageModule:
    """Mixin put before a package's layout class."""

    kconvert_members: Members

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forwards, one after the other; the first takes the arguments, the next ones its result."""
        owner = cast("nn.Module", self)
        result: Any = None
        for number, member in enumerate(self.kconvert_members.modules):
            values = {
                name: owner.get_parameter(target).narrow(axis, start, rows)
                for (index, name), (target, axis, start, rows) in self.kconvert_members.views.items()
                if index == number
            }
            twin = _bound_twin(member, "", values)
            twin.train(owner.training)  # the members are outside the module tree, where train() and eval() do not reach
            result = twin(*args, **kwargs) if number == 0 else twin(result)
        return result


def _bound_twin(module: nn.Module, prefix: str, values: Mapping[str, torch.Tensor]) -> nn.Module:
    children = {name: _bound_twin(child, f"{prefix}{name}.", values) for name, child in module.named_children()}
    parameters = {name: values.get(f"{prefix}{name}") for name in module._parameters}
    return stock_twin(module, cast("Mapping[str, nn.Parameter | None]", parameters), children)


def build_package_module(
    layout: type[nn.Module],
    modules: Sequence[nn.Module],
    paths: Sequence[str],
    packings: Sequence[Packing],
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> nn.Module:
    """A layout instance in place of `modules`.

    Args:
        layout: the package's `{Name}Layout`.
        modules: the stock modules, in pair order.
        paths: their paths in the model.
        packings: the layout's tensors, with full names.
        arguments: what the model itself passed to the replaced class; None for a fusion, whose layout gets
            the modules.
    """
    if arguments is None:
        made = layout(*modules)
        bases: tuple[type, ...] = (PackageModule, layout)
    else:
        args, kwargs = arguments
        made = layout(*args, **kwargs)
        bases = (PackageModule, layout, type(modules[0]))
    made.__class__ = patched_class(*bases)
    patched = cast("Any", made)
    patched.kconvert_dispatch = Dispatch()
    views: dict[tuple[int, str], tuple[str, int, int, int]] = {}
    for packing in packings:
        target, start = packing.target.removeprefix(f"{paths[0]}."), 0
        for source, rows in packing.parts:
            number = next(index for index, path in enumerate(paths) if source.startswith(f"{path}."))
            views[number, source.removeprefix(f"{paths[number]}.")] = (target, packing.axis, start, rows)
            start += rows
    patched.__dict__["kconvert_members"] = Members(tuple(modules), views)
    _match_parameters(made, modules, views)
    made.train(modules[0].training)
    return made


def _match_parameters(
    made: nn.Module, modules: Sequence[nn.Module], views: Mapping[tuple[int, str], tuple[str, int, int, int]]
) -> None:
    """Give each layout parameter the dtype of its stock source: the loader follows what it finds here."""
    dtypes = {target: modules[number].get_parameter(name).dtype for (number, name), (target, *_) in views.items()}
    for name, parameter in list(made.named_parameters()):
        wanted = dtypes.get(name, parameter.dtype)
        if parameter.dtype != wanted and parameter.dtype.is_floating_point:
            owner = made.get_submodule(name.rpartition(".")[0])
            changed = nn.Parameter(parameter.detach().to(wanted), requires_grad=parameter.requires_grad)
            setattr(owner, name.rpartition(".")[2], changed)
