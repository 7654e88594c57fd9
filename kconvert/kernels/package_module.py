"""Modules of a two-class package in a model: built, patched in, and with a reference of their own.

The reference is the stock forward of the replaced modules, whose parameters are those of the layout in stock order:
views of rows, and copies where a mapping moves elements inside of them.  It needs nothing from the package's author and serves every mapping that has an exact inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from kconvert.errors import KernelUnavailableError
from kconvert.kernels.classes import become
from kconvert.kernels.dispatch import Dispatch, attach
from kconvert.kernels.layout import patched_class, stock_twin
from kconvert.kernels.packing import Packing
from kconvert.kernels.rearrange import rearrange
from kconvert.transforms import Arrangement

__all__ = ["Members", "PackageModule", "build_package_module"]


@dataclass(frozen=True)
class Members:
    """The replaced stock modules, kept out of the module tree, and what each of their parameters is in the layout.

    `views` maps (member, parameter name) to its arrangement out of the layout's parameters.
    """

    modules: tuple[nn.Module, ...]
    views: dict[tuple[int, str], Arrangement]


class PackageModule:
    """Mixin put before a package's layout class."""

    kconvert_members: Members

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forwards, one after the other; the first takes the arguments, the next ones its result."""
        owner = cast("nn.Module", self)
        result: Any = None
        for number, member in enumerate(self.kconvert_members.modules):
            values = {  # contiguous, as the stock parameters are: on other strides some functions round otherwise, or fail
                name: rearrange(made, {target: owner.get_parameter(target) for target in made.sources}).contiguous()
                for (index, name), made in self.kconvert_members.views.items()
                if index == number
            }
            lacking = [name for name, _ in member.named_parameters() if name not in values]
            if lacking:
                raise KernelUnavailableError(
                    f"{lacking[0]!r} of {type(member).__name__} was computed into the layout, so its reference cannot run",
                    fix="run the package's kernel",
                )
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
    become(made, patched_class(*bases))
    patched = cast("Any", made)
    attach(patched, Dispatch())
    views: dict[tuple[int, str], Arrangement] = {}
    for packing in (packing.below(f"{paths[0]}.") for packing in packings):
        for source, made_of in packing.sources.items():
            # a name below the first path has lost it; any other is that of a sibling
            number = next((index for index, path in enumerate(paths) if source.startswith(f"{path}.")), 0)
            views[number, source.removeprefix(f"{paths[number]}.")] = made_of
    patched.__dict__["kconvert_members"] = Members(tuple(modules), views)
    _match_parameters(made, modules, views)
    made.train(modules[0].training)
    return made


def _match_parameters(
    made: nn.Module, modules: Sequence[nn.Module], views: Mapping[tuple[int, str], Arrangement]
) -> None:
    """Give each layout parameter the dtype of its stock source: the loader follows what it finds here."""
    dtypes = {
        target: modules[number].get_parameter(name).dtype
        for (number, name), made_of in views.items()
        for target in made_of.sources
    }
    for name, parameter in list(made.named_parameters()):
        wanted = dtypes.get(name, parameter.dtype)
        if parameter.dtype != wanted and parameter.dtype.is_floating_point:
            owner = made.get_submodule(name.rpartition(".")[0])
            changed = nn.Parameter(parameter.detach().to(wanted), requires_grad=parameter.requires_grad)
            setattr(owner, name.rpartition(".")[2], changed)
