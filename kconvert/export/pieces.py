"""What exported packages need beside their classes; the definitions here go into them word for word.

    stock files:   gate_proj, up_proj  --load-->  gate_up_proj  --save_pretrained-->  gate_proj, up_proj
    packed files:                gate_up_proj  --load-->  gate_up_proj  --save_pretrained-->  gate_proj, up_proj

Nothing here may use anything but torch, transformers, the standard library, and other definitions that are exported.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming

from kconvert.kernels.packed_linear import join_linears

__all__ = ["CutRows", "JoinRows", "Packing", "Renaming", "check_stock", "pack_children", "source_digest", "split_rows"]


def source_digest(stock: type[nn.Module]) -> str:
    """A digest of the source of a class's forward."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(stock.forward)).encode()).hexdigest()[:16]


def check_stock(stock: type[nn.Module], digest: str) -> None:
    """Refuse a class whose forward is not the one that this package was made from."""
    found = source_digest(stock)
    if found != digest:
        raise ImportError(
            f"{stock.__module__}.{stock.__qualname__} computes something else than the class that this package was "
            f"made from ({found} instead of {digest}); export the package again with this transformers"
        )


def pack_children(module: nn.Module, packed: str, parts: Sequence[str]) -> None:
    """Put one linear child with the rows of `parts` in their place; `{packed}_rows` keeps how many each has."""
    linears: list[Any] = [getattr(module, part) for part in parts]
    for part in parts:
        delattr(module, part)
    setattr(module, packed, join_linears(linears))
    setattr(module, f"{packed}_rows", tuple(linear.out_features for linear in linears))


def split_rows(joined: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The parts of a packed projection's result, along its last dimension."""
    # not `split`: autograd forbids to change one of several views in place, which stock code may do
    return tuple(joined.narrow(-1, sum(rows[:number]), size) for number, size in enumerate(rows))


class Renaming(WeightRenaming):
    """Counts as used by packed files too, so that `save_pretrained` always writes the stock names."""

    __slots__ = ()

    def was_used(self) -> bool:
        """Whether `save_pretrained` reverses it."""
        return True


class Packing(WeightConverter):
    """Counts as used by packed files too, so that `save_pretrained` always writes the stock names."""

    __slots__ = ()

    def was_used(self) -> bool:
        """Whether `save_pretrained` reverses it."""
        return True


class JoinRows(Concatenate):
    """Packs parts of any number of rows; the plain reverse of `Concatenate` would cut them into equal ones."""

    def __init__(self, child: str) -> None:
        super().__init__(dim=0)
        self.child = child

    @property
    def reverse_op(self) -> ConversionOps:
        """The op that `save_pretrained` runs."""
        return CutRows(self.child)


class CutRows(ConversionOps):
    """Cuts a packed tensor into the rows that `pack_children` has put together."""

    def __init__(self, child: str) -> None:
        self.child = child

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """`input_dict` holds the one packed tensor, `kwargs` the model and the name of the first target."""
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        first = target_patterns[0]
        owner = kwargs["full_layer_name"].removesuffix(first) + first.rpartition(".")[0].rpartition(".")[0]
        rows = getattr(kwargs["model"].get_submodule(owner), f"{self.child}_rows")
        parts = torch.split(tensor, rows, dim=0)
        return {target: part.contiguous() for target, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The op that packs."""
        return JoinRows(self.child)
