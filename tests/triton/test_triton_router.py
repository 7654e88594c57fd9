"""The router's kernel against float64, expert by expert: forward, backward, every variant, ties and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kconvert.kernels.router_variant import Groups, RouterVariant
from kconvert.kernels.triton import router as module
from kconvert.kernels.triton.router import choose_experts
from tests.triton.expert_checks import Poisoned
from tests.triton.norm_checks import assert_near, round_as_on_devices

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)
VARIANTS = {
    "qwen3_moe": RouterVariant(8, eps=0.0),
    "not divided": RouterVariant(3),
    "mixtral": RouterVariant(2, eps=0.0, casts=False),
    "one choice": RouterVariant(1, "sigmoid", "cast", 0.0, 1.5),
    "sigmoid with a bias": RouterVariant(6, "sigmoid", "cast", 1e-20, 2.5, casts=False, has_bias=True),
    "gpt-oss": RouterVariant(4, "logits"),
    "granite": RouterVariant(4, "logits", "cast"),
    "softmax of the chosen, divided again": RouterVariant(4, "logits", eps=0.5, factor=3.0),
    "deepseek_v3": RouterVariant(8, "sigmoid", "wide", 1e-20, 2.5, False, True, Groups(8, 4, True, False)),
    "masked with zero": RouterVariant(4, "softmax", "wide", 0.0, 2.5, False, True, Groups(4, 2, True, True)),
    "best of a group": RouterVariant(4, "softmax", "wide", None, 2.5, False, False, Groups(4, 1, False, False)),
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", Poisoned())
    round_as_on_devices(monkeypatch)


def _logits(num_tokens: int, num_experts: int, dtype: torch.dtype, device: str, *, seed: int = 0) -> torch.Tensor:
    """Different for all experts of a token, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    return ((places - num_experts // 2) / 32).to(dtype).to(device)


def _bias(variant: RouterVariant, num_experts: int, device: str) -> torch.Tensor | None:
    if not variant.has_bias:
        return None
    return 0.3 * torch.randn(num_experts, generator=torch.Generator().manual_seed(5)).to(device)


def _scores(logits: torch.Tensor, variant: RouterVariant) -> torch.Tensor:
    if variant.scores == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if variant.scores == "sigmoid" else logits


def _chosen(scores: list[float], bias: list[float], variant: RouterVariant) -> list[int]:
    """The experts of one token, one after another."""
    choice = [score + more for score, more in zip(scores, bias, strict=True)]
    if variant.groups is not None:
        num_groups, num_kept, by_two, masks_with_zero = variant.groups
        size = len(choice) // num_groups
        parts = [choice[first : first + size] for first in range(0, len(choice), size)]
        good = [sum(sorted(part)[-2:]) if by_two else max(part) for part in parts]
        kept = sorted(range(num_groups), key=lambda group: -good[group])[:num_kept]
        masked = 0.0 if masks_with_zero else -math.inf
        choice = [value if place // size in kept else masked for place, value in enumerate(choice)]
    return sorted(range(len(choice)), key=lambda expert: -choice[expert])[: variant.top_k]


def _weights(logits: torch.Tensor, index: torch.Tensor, variant: RouterVariant) -> torch.Tensor:
    """In float64, with gradients."""
    weights = _scores(logits, variant).gather(1, index)
    if variant.scores == "logits":
        weights = weights.softmax(dim=-1)
    if variant.eps is not None:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + variant.eps)
    return weights * variant.factor


def _check(logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype) -> None:
    wide = logits.detach().double().cpu().requires_grad_()
    biases = [0.0] * logits.shape[1] if bias is None else bias.double().cpu().tolist()
    rows = _scores(wide.detach(), variant).tolist()
    expected = torch.tensor([_chosen(row, biases, variant) for row in rows])
    leaf = logits.detach().requires_grad_()
    with torch.no_grad():
        weights, index = choose_experts(leaf, bias, variant, dtype)
    scored = logits.dtype if variant.scores == "logits" else torch.float32
    assert weights.dtype == (dtype if variant.casts else scored)
    assert torch.equal(index.cpu(), expected)
    exact = _weights(wide, expected, variant)
    assert_near(weights.cpu(), exact, TOLERANCES[weights.dtype])

    again, index = choose_experts(leaf, bias, variant, dtype)
    assert torch.equal(again.detach(), weights)
    assert torch.equal(index.cpu(), expected)
    assert not index.requires_grad
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(7)).to(weights.dtype)
    again.backward(upstream.to(again.device))
    exact.backward(upstream.double())
    assert leaf.grad is not None
    assert leaf.grad.dtype == logits.dtype
    assert_near(leaf.grad.cpu(), wide.grad, 2 * TOLERANCES[logits.dtype], scale=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant(name: str, dtype: torch.dtype, device: str) -> None:
    variant = VARIANTS[name]
    num_experts = 64
    _check(_logits(13, num_experts, dtype, device), _bias(variant, num_experts, device), variant, dtype)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "logits"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (1, 1, 1), (3, 60, 4), (33, 5, 5), (2, 160, 6), (2, 257, 32)]
)
def test_odd_sizes(num_tokens: int, num_experts: int, top_k: int, scores: Any, device: str) -> None:
    variant = RouterVariant(top_k, scores, "cast", 0.0, has_bias=True)
    logits = _logits(num_tokens, num_experts, torch.float32, device, seed=3)
    _check(logits, _bias(variant, num_experts, device), variant, torch.bfloat16)


def test_rows_that_lie_apart(device: str) -> None:
    """Logits and the gradient of the weights, both a part of something larger."""
    variant = RouterVariant(3, eps=0.0)
    logits = _logits(9, 40, torch.float32, device)
    apart = torch.zeros(9, 100, device=device)
    apart[:, 7:47] = logits
    leaf = apart.requires_grad_()
    weights, index = choose_experts(leaf[:, 7:47], None, variant, torch.float32)
    expected, same = choose_experts(logits, None, variant, torch.float32)
    assert torch.equal(weights, expected)
    assert torch.equal(index, same)
    weights.sum(dim=0, keepdim=True).expand(9, 3).backward(torch.ones(9, 3, device=device))
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


def test_no_tokens(device: str) -> None:
    variant = RouterVariant(2, eps=0.0)
    leaf = torch.empty(0, 8, device=device, requires_grad=True)
    weights, index = choose_experts(leaf, None, variant, torch.bfloat16)
    assert (weights.shape, weights.dtype, index.shape) == ((0, 2), torch.bfloat16, (0, 2))
    weights.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == (0, 8)


def test_of_equal_experts_the_first_are_chosen(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5, [-math.inf] * 4 + [0.0]], device=device)
    _, index = choose_experts(logits, None, RouterVariant(3, eps=0.0), torch.float32)
    assert index.tolist() == [[1, 3, 0], [0, 1, 2], [4, 0, 1]]


def test_of_equal_groups_the_first_are_kept(device: str) -> None:
    variant = RouterVariant(3, "sigmoid", groups=Groups(4, 2, True, False))
    _, index = choose_experts(torch.zeros(1, 16, device=device), None, variant, torch.float32)
    assert index.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "logits"])
def test_what_is_not_finite_stays_with_its_token(scores: Any, device: str) -> None:
    """Indices are those of experts whatever comes, and different ones: the next kernel reads rows there."""
    logits = _logits(6, 12, torch.float32, device)
    expected, same = choose_experts(logits, None, RouterVariant(4, scores, eps=0.0), torch.float32)
    logits[1, 5] = math.nan
    logits[2, :] = math.nan
    logits[3, :] = -math.inf
    logits[4, 7] = math.inf
    weights, index = choose_experts(logits, None, RouterVariant(4, scores, eps=0.0), torch.float32)
    for clean in (0, 5):
        assert torch.equal(weights[clean], expected[clean])
        assert torch.equal(index[clean], same[clean])
    assert weights[2].isnan().all()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in index.tolist())
    if scores == "softmax":  # of which one such logit is in every score
        assert weights[1].isnan().all()
        assert weights[4].isnan().all()
    else:
        assert weights[1].isnan().any()
        assert index[1, 0] == 5
        assert index[4, 0] == 7
