"""A stand-in for `torch_npu`: its operators under the schemas of a release, computed in plain torch, on any device.

torch's own dispatcher holds every call against the schema, so an unknown keyword, a wrong order or a wrong type raises as it would
there.  What the documentation demands of the tensors is asserted.  An operator without a gradient in that release raises where
one is asked for, and rows that a grouped product does not write are NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tests.npu.extract_schemas import SCHEMAS

__all__ = ["calls", "stand_in"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_NAMESPACE = "kconvert_stand_in"
calls: list[str] = []
"""The operators that were called, in order."""


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dtype == gamma.dtype
    assert x.dtype in _FLOATS
    assert 2 <= x.dim() <= 8
    assert x.numel()
    assert gamma.shape == x.shape[-gamma.dim() :]
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    return _norm(self, gamma, epsilon)


def npu_gemma_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    assert self.is_contiguous()
    assert self.dtype == gamma.dtype
    wide, rstd = _norm(self.float(), gamma.float() + 1.0, epsilon)
    return wide.to(self.dtype), rstd


def npu_add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype
    total = x1 + x2
    normed, rstd = _norm(total, gamma, epsilon)
    return normed, rstd, total


def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert self.dtype in _FLOATS
    gate, up = self.float().chunk(2, dim)
    return (F.silu(gate) * up).to(self.dtype)


def npu_geglu(self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> Any:
    assert self.dtype in _FLOATS
    left, right = self.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    acted = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (acted * up).to(self.dtype), acted.to(self.dtype)


def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    assert group_index is None
    assert dim in (-1, x.dim() - 1)
    assert x.dtype in _FLOATS
    assert x.is_contiguous()
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


def npu_rotary_mul(
    self: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    assert rotate is None
    assert self.dim() == r1.dim() == r2.dim() == 4
    assert self.dtype == r1.dtype == r2.dtype
    assert self.dtype in _FLOATS
    assert self.shape[-1] % 2 == 0
    assert self.shape[-1] < 896
    assert r1.shape == r2.shape
    assert all(one in (1, size) for one, size in zip(r1.shape, self.shape, strict=True))
    assert r1.shape[-1] == self.shape[-1]
    x = self.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * turned).to(self.dtype)


def _first_of_equal(values: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def npu_moe_gating_top_k_softmax(x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1) -> Any:
    assert finished is None
    assert x.dim() in (2, 3)
    assert x.dtype in _FLOATS
    assert 0 < k <= min(x.shape[-1], 1024)
    scores = x.float().softmax(-1)
    index = _first_of_equal(scores, k)
    rows = torch.arange(index.numel(), device=x.device).view(k, -1).t().reshape(index.shape)
    return scores.gather(-1, index).to(x.dtype), index.to(torch.int32), rows.to(torch.int32)


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **others: Any,
) -> Any:
    assert not any(value is not None for value in others.values())
    assert x.dim() == 2
    assert x.dtype in _FLOATS
    assert (renorm, norm_type, out_flag) == (0, 1, False)
    num_experts = x.shape[1]
    assert num_experts <= 2048
    assert num_experts % group_count == 0
    assert 1 <= k <= min(32, num_experts // group_count * k_group)
    scores = x.float().sigmoid()
    choice = scores
    if bias is not None:
        assert bias.dtype == x.dtype
        assert bias.shape == (num_experts,)
        choice = scores + bias
    if group_count > 1:
        grouped = choice.unflatten(1, (group_count, -1))
        good = grouped.topk(2, dim=-1).values.sum(-1) if group_select_mode else grouped.amax(-1)
        kept = torch.zeros_like(good, dtype=torch.bool).scatter_(1, _first_of_equal(good, k_group), value=True)
        choice = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    index = _first_of_equal(choice, k)
    weights = scores.gather(1, index)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), index.to(torch.int32), torch.empty(0, device=x.device)


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> Any:
    assert not padded_mode
    assert not num_out_tokens
    assert tokens.dim() == 2
    assert indices.dim() in (1, 2)
    assert indices.dtype in (torch.int32, torch.int64)
    assert tokens.dtype in _FLOATS
    assert int(indices.min()) >= 0
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.sort(indices.reshape(-1), stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return tokens[order // top_k], places.to(torch.int32)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    assert not padded_mode
    assert restore_shape is None
    assert sorted_indices.dtype == torch.int32
    assert permuted_tokens.dtype in _FLOATS
    rows = permuted_tokens[sorted_indices.long()].float()
    if probs is None:
        return rows.to(permuted_tokens.dtype)
    assert probs.dtype in _FLOATS
    shaped = rows.view(*probs.shape, -1) * probs.float()[..., None]
    return shaped.sum(1).to(permuted_tokens.dtype)


def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: Any,
) -> list[torch.Tensor]:
    assert not any(value for value in others.values())
    (rows,), (each,) = x, weight
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert (split_item in (2, 3), group_type, group_list_type) == (True, 0, 0)
    assert rows.dtype == each.dtype
    assert rows.dim() == 2
    assert each.dim() == 3
    assert rows.shape[1] == each.shape[1]
    assert len(group_list) == each.shape[0]
    made = rows.new_full((len(rows), each.shape[2]), float("nan"))
    start = 0
    for number, end in enumerate(group_list.tolist()):
        made[start:end] = (rows[start:end].float() @ each[number].float()).to(rows.dtype)
        start = end
    return [made]


@cache
def _library() -> tuple[torch.library.Library, ModuleType]:
    data = json.loads(SCHEMAS.read_text())
    library, module = torch.library.Library(_NAMESPACE, "DEF"), ModuleType("torch_npu")
    module.__version__ = data["version"]  # type: ignore[attr-defined]
    for name, schema in data["schemas"].items():
        library.define(schema)
        library.impl(name, _noted(name, globals()[name], name in data["with_gradient"]), "CompositeImplicitAutograd")
        setattr(module, name, getattr(getattr(torch.ops, _NAMESPACE), name))
    return library, module


def _noted(name: str, function: Callable[..., Any], has_gradient: bool) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not has_gradient:
            raise RuntimeError(f"derivative for {name} is not implemented")
        return function(*args, **kwargs)

    return run


def stand_in() -> ModuleType:
    """The module, which has the operators as functions."""
    return _library()[1]
