"""Layouts whose forward can be the stock one with the rotary embedding of q and k, and the norms before it, as one call.

What the call does is decided by what it is given, so that it is never guessed: a function that is not the proven one, tensors
of another kind than were tried, or norms that have hooks, are called as the stock forward calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kconvert.kernels.joined_layout import JoinedLayout
from kconvert.kernels.layout import has_hooks, stock_class_of
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, RMSNormVariant, prove_variant
from kconvert.kernels.ops.rope.variant import Part, RopeVariant, Table, is_as_made
from kconvert.kernels.rotation import HeadNorms, Rotation

__all__ = ["DeviceCode", "Norms", "RotatingLayout"]

Norms = tuple[str, str, bool]
"""The norms of q and of k, and whether heads and tokens are exchanged behind them."""

_Pair = tuple[torch.Tensor, torch.Tensor]
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class RotatingLayout(JoinedLayout):
    """Base of such layouts.

    Class attributes of a patched class:
        kconvert_ropes: the functions whose calls its changed forward hands to `kconvert_rope`, and what they compute.
    """

    kconvert_ropes: ClassVar[dict[Any, RopeVariant]] = {}

    def kconvert_rope(
        self,
        function: Callable[..., _Pair],
        norms: Norms | None,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int | None = None,
    ) -> _Pair:
        """`function(q, k, cos, sin)`, in one kernel with the norms before it.

        Args:
            function: what the stock forward calls.
            norms: the norms that the stock forward calls before it, None for none.
            q: `[batch, heads, tokens, dim]` or `[batch, tokens, heads, dim]`.
            k: as q, with a number of heads of its own.
            cos: `[batch or 1, tokens, n]`; see `RopeVariant`.
            sin: as cos.
            unsqueeze_dim: where cos and sin get a dimension for the heads; None where the stock forward does not say it.
        """
        variant = self.kconvert_ropes.get(function) if is_as_made(function) else None
        heads = None if norms is None or variant is None else _head_norms(self, norms, q, k)
        if norms is not None and heads is None:
            q, k = _normed(self, norms, q, k)
        axis = None if variant is None else _heads_axis(variant, q, k, cos, sin, unsqueeze_dim)
        rotation = None if variant is None or axis is None else _rotation(variant, q.shape[-1], cos.shape[-1])
        code = _device_code(q.device.type)
        if rotation is not None and code.takes is not None and not code.takes(q, k, cos, rotation, axis, heads):
            rotation = None
        if axis is None or rotation is None:
            if norms is not None and heads is not None:
                q, k = _normed(self, norms, q, k)
            told = {} if unsqueeze_dim is None else {"unsqueeze_dim": unsqueeze_dim}
            return function(q, k, cos, sin, **told)
        if cos.dim() == 2:
            cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
        if heads is None:
            return code.rope(q, k, cos, sin, rotation=rotation, heads_axis=axis)
        arithmetic, q_weight, k_weight = heads
        return code.rope(
            q,
            k,
            cos,
            sin,
            rotation=rotation,
            heads_axis=axis,
            norms=arithmetic,
            q_weight=q_weight,
            k_weight=k_weight,
        )


class DeviceCode(NamedTuple):
    """What turns q and k on a device, and whether it can for given tensors; None where it always can."""

    rope: Callable[..., _Pair]
    takes: Callable[..., bool] | None = None


@cache
def _device_code(device: str) -> DeviceCode:
    if device == "npu":
        from kconvert.kernels.ascend import rope as ascend

        return DeviceCode(ascend.rope, ascend.takes)
    from kconvert.kernels.triton.rope import rope

    return DeviceCode(rope)


@cache
def _rotation(variant: RopeVariant, dim: int, width: int) -> Rotation | None:
    """The rotation of heads of `dim` by cos and sin of `width`, or None where the variant was not tried on such."""
    size = variant.rotated(dim, width)
    if size is None:
        return None
    return Rotation(
        size=size,
        start=dim - size if variant.part is Part.LAST else 0,
        is_interleaved=variant.is_interleaved,
        writes_halves=variant.writes_halves,
        has_half_table=variant.table is not Table.FULL,
        is_wide=variant.is_wide,
        keeps_dtype=variant.keeps_dtype,
    )


def _heads_axis(
    variant: RopeVariant,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int | None,
) -> int | None:
    """The axis of the heads in q and k, or None where these are tensors that the variant was not tried on."""
    shape, other, table = q.shape, k.shape, cos.shape
    if len(shape) != 4 or len(other) != 4 or sin.shape != table:
        return None
    if variant.axis is None:
        axis = variant.default_axis if unsqueeze_dim is None else unsqueeze_dim
        is_known = len(table) == 3 and axis in (1, 2) and table[0] in (1, shape[0])
    else:
        axis = 2
        is_known = len(table) == 2
    if not is_known or table[-2] not in (1, shape[3 - axis]):
        return None
    if shape[0] != other[0] or shape[3] != other[3] or shape[3 - axis] != other[3 - axis]:
        return None
    dtype, table_dtype = q.dtype, cos.dtype
    if k.dtype != dtype or sin.dtype != table_dtype or dtype not in _DTYPES or table_dtype not in _DTYPES:
        return None
    if variant.is_wide and torch.float64 in (dtype, table_dtype):  # then it is narrower
        return None
    device = q.device
    if k.device != device or cos.device != device or sin.device != device:
        return None
    return None if cos.requires_grad or sin.requires_grad else axis


_VARIANTS: WeakKeyDictionary[nn.Module, tuple[Any, RMSNormVariant]] = WeakKeyDictionary()


def _variant_of(norm: nn.Module) -> RMSNormVariant:
    """The proven variant, found again where somebody has replaced the stock forward since."""
    forward = stock_class_of(norm).forward
    found = _VARIANTS.get(norm)
    if found is None or found[0] is not forward:
        # a thread of its own has none of the hooks on saved tensors that gradient checkpointing has put on this one
        with ThreadPoolExecutor(max_workers=1) as pool:
            found = _VARIANTS[norm] = (forward, pool.submit(prove_variant, norm).result())
    return found[1]


def _is_plain(norm: nn.Module | None) -> bool:
    """Whether calling it does what its stock forward does."""
    return (
        norm is not None
        and norm.__dict__.get("kconvert_layout") in (None, RMSNormLayout.spec.name)
        and not has_hooks(norm)
    )


def _head_norms(
    module: nn.Module, norms: Norms, q: torch.Tensor, k: torch.Tensor
) -> tuple[HeadNorms, torch.Tensor, torch.Tensor] | None:
    """The arithmetic of two norms and their weights, where both are the same RMSNorm over one head; else None."""
    q_norm, k_norm = module._modules.get(norms[0]), module._modules.get(norms[1])
    if not _is_plain(q_norm) or not _is_plain(k_norm):
        return None
    q_norm, k_norm = cast("nn.Module", q_norm), cast("nn.Module", k_norm)
    q_weight, k_weight = q_norm._parameters.get("weight"), k_norm._parameters.get("weight")
    size = q.shape[-1:]
    if q_weight is None or k_weight is None or q_weight.shape != size or k_weight.shape != size or k.shape[-1:] != size:
        return None
    if q_weight.dtype != k_weight.dtype or q_weight.device != q.device or k_weight.device != q.device:
        return None
    if not q_weight.is_contiguous() or not k_weight.is_contiguous():
        return None
    variant = _variant_of(q_norm)
    if variant.why_not is not None or variant != _variant_of(k_norm):
        return None
    if not variant.mixes and q_weight.dtype != q.dtype:
        return None
    return _arithmetic(variant), q_weight, k_weight


@cache
def _arithmetic(variant: RMSNormVariant) -> HeadNorms:
    return HeadNorms(variant.eps, variant.offset, variant.cast_first)


def _normed(module: nn.Module, norms: Norms, q: torch.Tensor, k: torch.Tensor) -> _Pair:
    """q and k as the stock forward norms them: the norm may look at more than the last dimension."""
    q_name, k_name, is_swapped = norms
    if is_swapped:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = getattr(module, q_name)(q), getattr(module, k_name)(k)
    return (q.transpose(1, 2), k.transpose(1, 2)) if is_swapped else (q, k)
