"""Inputs for one module: a call that its model really makes, with the hidden states replaced by random values.

Positions, masks and caches stay as the model gave them; the hidden states are random, so that a fault in one module
does not depend on what the modules before it did.  The second half of the sequences is 2**-10 as large: there an
eps decides the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kconvert.kernels.probe import Call, forked_random_state

__all__ = ["ModuleInput", "cast_module", "run_chain"]

_SMALL = 2.0**-10


@dataclass(frozen=True)
class ModuleInput:
    """A call without its hidden states, on the CPU.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        place: where the hidden states go: an index of `args`, a name in `kwargs`, or None where there are none.
        shape: of the hidden states.
        dtype: of the hidden states.
        seed: of their values.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    @classmethod
    def from_call(cls, module: nn.Module, call: Call, *, seed: int) -> ModuleInput:
        """What to keep of a call of a stock module."""
        place = _hidden_place(module, call)
        values = dict(_values(call))
        hidden = values[place] if place is not None else torch.empty(0)
        args = tuple(None if place == number else _to_cpu(value) for number, value in enumerate(call.args))
        kwargs = {name: None if place == name else _to_cpu(value) for name, value in call.kwargs.items()}
        return cls(args, kwargs, place, tuple(hidden.shape), hidden.dtype, seed)

    def build(self, device: str, dtype: torch.dtype | None) -> Call:
        """The call on `device`; every float tensor in `dtype`, or as the model gave it."""

        def prepare(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)  # a forward may write into a cache
            moved = _cast(value, dtype) if dtype is not None and value.is_floating_point() else value.clone()
            return moved.to(device)

        args, kwargs = tree_map(prepare, self.args), tree_map(prepare, dict(self.kwargs))
        if self.place is None:
            return Call(args, kwargs, None)
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.shape and self.shape[0] > 1:
            values[self.shape[0] // 2 :] *= _SMALL
        hidden = values.to(dtype or self.dtype).to(device)
        if isinstance(self.place, int):
            return replace(Call(args, kwargs, None), args=(*args[: self.place], hidden, *args[self.place + 1 :]))
        return Call(args, {**kwargs, self.place: hidden}, None)


def _hidden_place(module: nn.Module, call: Call) -> int | str | None:
    """The first parameter of the forward where that is a float tensor, else the first float tensor of a matrix or more."""
    first = next(iter(signature(module.forward).parameters), "")
    candidates = _values(call)
    if not call.args and first in call.kwargs:
        candidates.insert(0, (first, call.kwargs[first]))
    return next((place for place, value in candidates if _is_hidden(value)), None)


def _values(call: Call) -> list[tuple[int | str, Any]]:
    return [*enumerate(call.args), *call.kwargs.items()]


def _is_hidden(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _to_cpu(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`; what is finite stays so, because a mask may hold the lowest number of its dtype."""
    wide = tensor.double()
    limits = torch.finfo(dtype)
    return torch.where(wide.isfinite(), wide.clamp(limits.min, limits.max), wide).to(dtype)


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with every float tensor in `dtype`; tensors that have it already are shared, nothing is held twice."""
    memo: dict[int, Any] = {}
    plain = (value for owner in module.modules() for value in vars(owner).values() if isinstance(value, torch.Tensor))
    for tensor in (*module.parameters(), *module.buffers(), *plain):
        if tensor.is_floating_point():
            cast = tensor.detach().to(dtype)
            memo[id(tensor)] = nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast
    return copy.deepcopy(module, memo)


def run_chain(modules: tuple[nn.Module, ...], call: Call, device: str) -> Any:
    """The result of the last module; the first takes the call, each other what the one before it gave."""
    with torch.no_grad(), forked_random_state(torch.device(device)):
        result: Any = modules[0](*call.args, **call.kwargs)
        for module in modules[1:]:
            result = module(result)
    return result
