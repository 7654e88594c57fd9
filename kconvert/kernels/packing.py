"""Packing in memory: from stock names to packed ones and back, for state dicts.

A `Packing` says of packed tensors which stock tensors lie in them.  It is read off the manifest, or off
the bound rules of a live model; both directions below follow it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.kernels.rearrange import copy_pieces, rearrange
from kconvert.names import parents
from kconvert.transforms import Arrangement, Piece, invert

__all__ = ["Packing", "pack_on_load", "pack_state", "packings_of_targets", "unpack_for_outer", "unpack_state"]


@dataclass(frozen=True)
class Packing:
    """Packed tensors and the stock tensors that lie in them: the least groups that can be told apart.

    `targets` are the packed tensors, out of stock ones; `sources` the stock tensors, out of packed ones.
    """

    targets: Mapping[str, Arrangement]
    sources: Mapping[str, Arrangement]

    def below(self, prefix: str) -> Packing:
        """The same with names relative to the module at `prefix` (empty, or ending in a dot)."""
        return Packing(
            {name.removeprefix(prefix): _renamed(made, remove=prefix) for name, made in self.targets.items()},
            {name.removeprefix(prefix): _renamed(made, remove=prefix) for name, made in self.sources.items()},
        )

    def above(self, prefix: str) -> Packing:
        """The same with names seen from a module that has this one at `prefix`."""
        return Packing(
            {f"{prefix}{name}": _renamed(made, add=prefix) for name, made in self.targets.items()},
            {f"{prefix}{name}": _renamed(made, add=prefix) for name, made in self.sources.items()},
        )

    def is_in(self, path: str) -> bool:
        """Whether a packed tensor of it lies in the module at `path`."""
        return any(name.startswith(f"{path}.") for name in self.targets)

    @property
    def is_rename(self) -> bool:
        """Whether nothing is changed but the name."""
        (first, *others), (source, *_) = self.targets.values(), self.sources.values()
        return not others and first.is_whole(source.shape)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed, not even the name."""
        return self.is_rename and self.targets.keys() == self.sources.keys()


def _renamed(made: Arrangement, *, remove: str = "", add: str = "") -> Arrangement:
    def moved(piece: Piece) -> Piece:
        return replace(piece, source=f"{add}{piece.source.removeprefix(remove)}")

    return replace(made, pieces=tuple(map(moved, made.pieces)))


def packings_of_targets(made: Mapping[str, Arrangement], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Packing, ...]:
    """The packings of packed tensors.

    Args:
        made: packed name to its arrangement out of stock tensors.
        shapes: the shape of each stock tensor.

    Raises:
        ValueError: a stock tensor is not whole in the packed ones, or more than once.
    """
    inverse = invert(made, shapes)
    if inverse is None or not all(each.pieces for each in made.values()):
        raise ValueError("the packed tensors do not hold each element of their sources once")
    found = []
    target_place, source_place = ({name: place for place, name in enumerate(names)} for names in (made, inverse))
    left = dict(made)
    while left:
        targets, sources = {next(iter(left))}, set[str]()
        while True:
            sources = {name for target in targets for name in made[target].sources}
            wider = {target for name in sources for target in inverse[name].sources}
            if wider == targets:
                break
            targets = wider
        found.append(
            Packing(
                {name: left.pop(name) for name in sorted(targets, key=target_place.__getitem__)},
                {name: inverse[name] for name in sorted(sources, key=source_place.__getitem__)},
            )
        )
    return tuple(found)


def _check_shapes(made: Mapping[str, Arrangement], tensors: Mapping[str, torch.Tensor], fix: str) -> None:
    """Refuse tensors of other shapes than they are known to have: their elements would be taken from wrong places.

    Raises:
        UsageError: naming one.
    """
    for name, tensor in tensors.items():
        if tensor.shape != made[name].shape:
            raise UsageError(
                f"size mismatch: {name!r} is {list(tensor.shape)}, the model has {list(made[name].shape)}", fix=fix
            )


def unpack_state(packings: Iterable[Packing], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with every packed tensor replaced by its stock tensors.

    Parts of a joined tensor are copies: safetensors refuses tensors that share storage.

    Raises:
        UsageError: a packed tensor has another shape than its stock tensors make.
    """
    unpacked = dict(state)
    for packing in packings:
        if packing.is_identity or any(name not in unpacked for name in packing.targets):
            continue
        tensors = {name: unpacked.pop(name) for name in packing.targets}
        if packing.is_rename:  # of any size: embeddings may have been resized since
            unpacked[next(iter(packing.sources))] = next(iter(tensors.values()))
            continue
        _check_shapes(packing.targets, tensors, "change sizes in the stock model, and convert that")
        for name, made in packing.sources.items():
            unpacked[name] = rearrange(made, tensors).clone(memory_format=torch.contiguous_format)
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
    known = {f"{prefix}{name}" for packing in packings for name in packing.sources if not packing.is_identity}
    here = {path for packing in packings for name in packing.targets for path in parents(f"{prefix}{name}")}
    modules = {name.rpartition(".")[0] for name in known} - here
    for key in state.keys() - known:
        for above in parents(key):
            if above in modules:
                raise UsageError(
                    f"{key!r} is for {above!r}, which is packed in this model",
                    fix="merge the adapter into the stock model first, and convert the result",
                )


def pack_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """`load_state_dict` pre-hook of a converted model: accept stock names, and those of the source's files, beside packed ones.

    A group that is only partly there (one shard of a Trainer checkpoint) is copied into its places at once.

    Raises:
        UsageError: the state holds an adapter's weights for a projection that is packed, another shape, or a part of
            what would have to be stacked and packed.
    """
    packings = cast("tuple[Packing, ...]", module.kconvert_packings)
    _refuse_adapters(packings, state, prefix)
    for packing in (*cast("tuple[Packing, ...]", module.kconvert_file_packings), *packings):
        _pack_group(packing, module, state, prefix)


def _pack_group(packing: Packing, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    names = {f"{prefix}{name}": made for name, made in packing.sources.items()}
    present = [name for name in names if name in state]
    if packing.is_identity or not present or any(f"{prefix}{name}" in state for name in packing.targets):
        return
    if not packing.is_rename:  # of any size: torch says it where it does not fit
        _check_shapes(names, {name: state[name] for name in present}, "load the state of a model of this config")
    tensors = {name.removeprefix(prefix): state.pop(name) for name in present}
    if len(present) == len(names):
        state.update({f"{prefix}{target}": _joined(packing, made, tensors) for target, made in packing.targets.items()})
        return
    parameters = dict(module.named_parameters())
    if not packing.targets.keys() <= parameters.keys():
        raise UsageError(
            f"the state has {present[0]!r}, and of what has to be packed with it only {len(present)} of {len(names)}",
            fix="pass the whole state dict at once",
        )
    for target, made in packing.targets.items():
        with torch.no_grad():
            pieces = [piece for piece in made.pieces if piece.source in tensors]
            copy_pieces(pieces, tensors, parameters[target])


def pack_state(packings: Iterable[Packing], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with stock names packed; the inverse of `unpack_state`.

    Raises:
        UsageError: a group is there in part, or a tensor has another shape.
    """
    packed = dict(state)
    for packing in packings:
        present = [name for name in packing.sources if name in packed]
        if packing.is_identity or not present or any(name in packed for name in packing.targets):
            continue
        if len(present) < len(packing.sources):
            names = list(packing.sources)
            raise UsageError(f"the state has {present[0]!r} and not all of {names}", fix="pass the whole state dict")
        tensors = {name: packed.pop(name) for name in present}
        if not packing.is_rename:  # of any size, as above
            _check_shapes(packing.sources, tensors, "pass the state of a model of this config")
        packed.update({name: _joined(packing, made, tensors) for name, made in packing.targets.items()})
    return packed


def _joined(packing: Packing, made: Arrangement, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A packed tensor; one that is a stock tensor under another name is that tensor."""
    return tensors[made.sources[0]] if packing.is_rename else rearrange(made, tensors).contiguous()
