"""Packing in memory: from stock names to packed ones and back, for state dicts.

A `Packing` says of one packed tensor which stock tensors lie in it.  It is read off the manifest, or off
the bound rules of a live model; both directions below follow it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.names import parents

__all__ = ["Packing", "pack_on_load", "pack_state", "unpack_for_outer", "unpack_state"]


@dataclass(frozen=True)
class Packing:
    """A packed tensor: its name, the axis along which its parts lie, and (stock name, rows) in order."""

    target: str
    axis: int
    parts: tuple[tuple[str, int], ...]

    def below(self, prefix: str) -> Packing:
        """The same with names relative to the module at `prefix` (empty, or ending in a dot)."""
        parts = tuple((name.removeprefix(prefix), rows) for name, rows in self.parts)
        return Packing(self.target.removeprefix(prefix), self.axis, parts)

    def above(self, prefix: str) -> Packing:
        """The same with names seen from a module that has this one at `prefix`."""
        parts = tuple((f"{prefix}{name}", rows) for name, rows in self.parts)
        return Packing(f"{prefix}{self.target}", self.axis, parts)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed, not even the name."""
        return len(self.parts) == 1 and self.parts[0][0] == self.target


def unpack_state(packings: Iterable[Packing], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with every packed tensor replaced by its stock tensors.

    Parts of a joined tensor are copies: safetensors refuses tensors that share storage.
    """
    unpacked = dict(state)
    for packing in packings:
        if packing.is_identity or packing.target not in unpacked:
            continue
        tensor = unpacked.pop(packing.target)
        if len(packing.parts) == 1:
            unpacked[packing.parts[0][0]] = tensor
            continue
        for (name, _), place in zip(packing.parts, _places(packing), strict=True):
            unpacked[name] = tensor.narrow(packing.axis, *place).clone()
    return unpacked


def unpack_for_outer(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """`state_dict` hook of a converted model: what stands around it and knows nothing of packing sees stock names.

    Its own `state_dict()` (no prefix), and what a converted model around it asks for, keep the packed names.
    """
    if not prefix or module.__dict__.get("kconvert_is_inner", False):
        return
    packings = cast("tuple[Packing, ...]", module.kconvert_packings)
    unpacked = unpack_state([packing.above(prefix) for packing in packings], state)
    state.clear()
    state.update(unpacked)


def _refuse_adapters(packings: Iterable[Packing], state: Mapping[str, Any], prefix: str) -> None:
    """Refuse weights that an adapter library means for a projection that is packed here.

    It finds no module of that name, says nothing, and would apply the rest of the adapter.

    Raises:
        UsageError: naming the projection.
    """
    known = {f"{prefix}{name}" for packing in packings for name, _ in packing.parts if not packing.is_identity}
    here = {path for packing in packings for path in parents(f"{prefix}{packing.target}")}
    modules = {name.rpartition(".")[0] for name in known} - here
    for key in state.keys() - known:
        for above in parents(key):
            if above in modules:
                raise UsageError(
                    f"{key!r} is for {above!r}, which is packed in this model",
                    fix="merge the adapter into the stock model first, and convert the result",
                )


def pack_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """`load_state_dict` pre-hook of a converted model: accept stock names beside packed ones.

    A group that is only partly there (one shard of a Trainer checkpoint) is copied into its rows at once.

    Raises:
        UsageError: the state holds an adapter's weights for a projection that is packed, or another shape.
    """
    packings = cast("tuple[Packing, ...]", module.kconvert_packings)
    _refuse_adapters(packings, state, prefix)
    for packing in packings:
        names = [f"{prefix}{name}" for name, _ in packing.parts]
        target = f"{prefix}{packing.target}"
        present = [name for name in names if name in state]
        if packing.is_identity or not present or target in state:
            continue
        parameter = module.get_parameter(packing.target)
        places = dict(zip(names, _places(packing), strict=True))
        for name in present:
            expected = _part_shape(parameter, packing.axis, places[name][1])
            if state[name].shape != expected:
                raise UsageError(
                    f"size mismatch: {name!r} is {list(state[name].shape)}, the model has {list(expected)}",
                    fix="load the state of a model of this config",
                )
        if len(present) == len(names):
            state[target] = _join([state.pop(name) for name in names], packing.axis)
            continue
        for name in present:
            with torch.no_grad():
                parameter.narrow(packing.axis, *places[name]).copy_(state.pop(name))


def pack_state(packings: Iterable[Packing], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with stock names packed; the inverse of `unpack_state`.

    Raises:
        UsageError: a group is there in part.
    """
    packed = dict(state)
    for packing in packings:
        names = [name for name, _ in packing.parts]
        present = [name for name in names if name in packed]
        if packing.is_identity or not present or packing.target in packed:
            continue
        if len(present) < len(names):
            raise UsageError(f"the state has {present[0]!r} and not all of {names}", fix="pass the whole state dict")
        packed[packing.target] = _join([packed.pop(name) for name in names], packing.axis)
    return packed


def _join(tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis)


def _places(packing: Packing) -> list[tuple[int, int]]:
    """(start, rows) of each part."""
    starts = accumulate((rows for _, rows in packing.parts), initial=0)
    return [(start, rows) for start, (_, rows) in zip(starts, packing.parts, strict=False)]


def _part_shape(tensor: torch.Tensor, axis: int, rows: int) -> torch.Size:
    shape = list(tensor.shape)
    if shape:
        shape[axis] = rows
    return torch.Size(shape)
