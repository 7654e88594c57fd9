"""Packing in memory: from stock names to packed ones and back, for state dicts.

A `Packing` says of one packed tensor which stock tensors lie in it.  It is read off the manifest, or off
the bound rules of a live model; both directions below follow it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

__all__ = ["Packing", "pack_on_load", "unpack_state"]


@dataclass(frozen=True)
class Packing:
    """A packed tensor: its name, the axis along which its parts lie, and (stock name, rows) in order."""

    target: str
    axis: int
    parts: tuple[tuple[str, int], ...]

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
        start = 0
        for name, rows in packing.parts:
            unpacked[name] = tensor.narrow(packing.axis, start, rows).clone()
            start += rows
    return unpacked


def pack_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """`load_state_dict` pre-hook of a converted model: accept stock names beside packed ones.

    A group that is only partly there (one shard of a Trainer checkpoint) is copied into its rows at once.
    """
    packings = cast("tuple[Packing, ...]", module.kconvert_packings)
    for packing in packings:
        names = [f"{prefix}{name}" for name, _ in packing.parts]
        present = [name for name in names if name in state]
        target = f"{prefix}{packing.target}"
        if packing.is_identity or not present or target in state:
            continue
        if len(present) == len(names):
            tensors = [state.pop(name) for name in names]
            state[target] = tensors[0] if len(tensors) == 1 else torch.cat(tensors, packing.axis)
            continue
        parameter = module.get_parameter(packing.target)
        start = 0
        for name, (_, rows) in zip(names, packing.parts, strict=True):
            if name in state:
                with torch.no_grad():
                    parameter.narrow(packing.axis, start, rows).copy_(state.pop(name))
            start += rows
