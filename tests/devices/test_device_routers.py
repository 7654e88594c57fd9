"""Routers of every device beside the stock ones: the same experts, weights and gradients, and where the reference runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kconvert.kernels.assign import layout_kernels
from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.ops.topk_router.layout import TopKRouterLayout
from tests.triton.norm_checks import assert_near

HIDDEN, EXPERTS = 40, 32
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3}


def config(**others: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 4}
    more = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
    return SimpleNamespace(**{**sizes, **more, **others})


STOCK: dict[str, Callable[[], nn.Module]] = {
    "qwen3_moe": lambda: Qwen3MoeTopKRouter(config()),
    "qwen2_moe, not divided": lambda: Qwen2MoeTopKRouter(config(norm_topk_prob=False)),
    "mixtral": lambda: MixtralTopKRouter(config()),
    "gpt_oss": lambda: GptOssTopKRouter(config()),
    "granitemoe": lambda: GraniteMoeTopKRouter(config()),
    "deepseek_v3": lambda: DeepseekV3TopkRouter(config()),
    "minimax_m2, given the bias": lambda: MiniMaxM2TopKRouter(config()),
    "deepseek_v3, one group": lambda: DeepseekV3TopkRouter(config(n_group=1, topk_group=1)),
}


def kernel_of(family: str) -> type[LayoutKernel]:
    return layout_kernels(TopKRouterLayout)[f"{family}_fused_router"]


def pair(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Any]:
    """A stock router, and a patched one with the same weights."""
    stock, other = STOCK[name](), STOCK[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in (*stock.parameters(), *stock.buffers()):
            each.copy_(torch.randn(each.shape, generator=generator) * 0.3)
    other.load_state_dict(stock.state_dict())
    # transformers keeps the bias of the choice in float32
    for router in (stock, other):
        for weight in router.parameters():
            weight.data = weight.data.to(dtype)
    return stock.to(device), TopKRouterLayout.patch([other.to(device)])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", list(STOCK))
def test_the_same_experts_and_gradients(family: str, device: str, name: str, dtype: torch.dtype) -> None:
    """The experts of a token in any order: some stock routers ask for none."""
    stock, packed = pair(name, dtype, device)
    kernel = kernel_of(family)
    assert kernel.supports(packed) is None
    hidden = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    bias = 0.3 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)).to(device)
    given_bias = (bias,) if name == "minimax_m2, given the bias" else ()
    results: list[tuple[Any, ...]] = []
    for router in (stock, packed):
        given = hidden.clone().requires_grad_(kernel.has_backward)
        with torch.set_grad_enabled(kernel.has_backward):
            call = stock if router is stock else partial(kernel.forward, packed)
            logits, weights, index = call(given, *given_bias)
        order = index.argsort(dim=1)
        weights, index = weights.gather(1, order), index.gather(1, order)
        if kernel.has_backward:
            (weights.float().pow(2).sum() + logits.float().square().mean()).backward()
            results.append((logits, weights, index, given.grad, router.get_parameter("weight").grad))
        else:
            results.append((logits, weights, index))
    (stock_logits, stock_weights, stock_index, *expected), (logits, weights, index, *gradients) = results
    assert torch.equal(logits, stock_logits)
    assert torch.equal(index, stock_index)
    assert (weights.dtype, index.dtype) == (stock_weights.dtype, torch.int64)
    assert_near(weights, stock_weights, TOLERANCES[dtype])
    for found, other in zip(gradients, expected, strict=True):
        assert_near(found, other, 5 * TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_more_dimensions_are_rows(family: str, device: str, name: str) -> None:
    stock, packed = pair(name, torch.float32, device)
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        logits, weights, index = kernel_of(family).forward(packed, hidden)
        expected = stock(hidden)[0]
    assert torch.equal(logits, expected)
    assert weights.shape == index.shape == (10, 4)


def test_what_the_proof_does_not_cover_runs_the_reference(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in more dimensions that stock does not flatten, and autocast."""
    _, packed = pair("gpt_oss", torch.float32, device)
    kernel = kernel_of(family)
    hidden = torch.randn(2, 3, HIDDEN).to(device)
    ran: list[bool] = []
    reference = type(packed).reference

    def noting(self: Any, *args: Any) -> Any:
        ran.append(True)
        return reference(self, *args)

    monkeypatch.setattr(type(packed), "reference", noting)
    with torch.no_grad():
        kernel.forward(packed, hidden[0])
        assert not ran
        kernel.forward(packed, hidden)
        with torch.autocast(device, dtype=torch.bfloat16):
            kernel.forward(packed, hidden[0])
    assert len(ran) == 2


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("norm_topk_prob", False)])
def test_what_somebody_sets_later_counts(family: str, device: str, name: str, value: Any) -> None:
    """A stock forward reads it at every call."""
    stock, packed = pair("qwen3_moe", torch.float32, device)
    kernel = kernel_of(family)
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        before = kernel.forward(packed, hidden)[1]
        for router in (stock, packed):
            setattr(router, name, value)
        found, expected = kernel.forward(packed, hidden), stock(hidden)
    assert found[1].shape != before.shape or not torch.equal(found[1], before)
    assert_near(found[1], expected[1], 5e-6)
    assert torch.equal(found[2], expected[2])


def test_a_bias_that_the_model_hands_over_may_have_a_name(family: str, device: str) -> None:
    _, packed = pair("minimax_m2, given the bias", torch.float32, device)
    hidden, bias = torch.randn(3, HIDDEN).to(device), torch.zeros(EXPERTS).to(device)
    bias[[5, 7, 11, 13]] = 10.0
    with torch.no_grad():
        _, _, index = kernel_of(family).forward(packed, hidden, e_score_correction_bias=bias)
    assert index.sort().values.tolist() == [[5, 7, 11, 13]] * 3
