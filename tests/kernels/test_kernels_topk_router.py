"""Routers: which variant each class in transformers computes, and that nothing else is taken for one.

The check has nothing in common with the proof: other sizes, weights and inputs, and a formula written expert by expert.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kconvert.kernels import apply_default_kernels
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.topk_router.cuda import CudaFusedRouter
from kconvert.kernels.ops.topk_router.layout import TopKRouterLayout
from kconvert.kernels.ops.topk_router.npu import NpuFusedRouter
from kconvert.kernels.ops.topk_router.proof import CHOICE_BIAS, find_router, is_given_bias
from kconvert.kernels.router_variant import Groups, RouterVariant
from tests.support import tiny_model

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


def config(**others: Any) -> Any:
    """What the constructors of routers ask for, whatever it is called there."""
    chosen = ("num_experts_per_tok", "moe_topk", "top_k", "moe_k", "num_experts_per_token")
    more = {
        "hidden_size": 24,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "router_scaling_factor": 1.5,
        "topk_method": "greedy",
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.01,
        "n_shared_experts": 1,
        "expert_selection_fn": "softmax",
        "scoring_func": "sigmoid",
        "use_expert_bias": True,
        "moe_router_logit_softcapping": 0.0,
        "router_logit_softcapping": 0.0,
        "route_scale": 2.0,
        "moe_jitter_eps": 0.01,
        "vocab_size": 50,
        "rms_norm_eps": 1e-6,
        "moe_norm_min": 1e-12,
        "expert_capacity": 4,
        "zero_expert_num": 2,
        "output_multiplier": 1.5,
        "router_bias": False,
        "router_dtype": "float32",
        "top_k_experts": 3,
        "num_hash_layers": 1,
        "norm_topk_prob_eps": 1e-9,
        "router_ignore_padding_tokens": False,
        "second_expert_policy": "all",
        "normalize_router_prob_before_dropping": False,
        "batch_prioritized_routing": False,
        "moe_eval_capacity_token_fraction": 1.0,
        "ffn_config": SimpleNamespace(moe_num_experts=16, moe_top_k=3),
    }
    return SimpleNamespace(**{**dict.fromkeys(COUNTS, 16), **dict.fromkeys(chosen, 3), **more, **others})


def routers() -> Iterator[tuple[str, str]]:
    """Module and name of every class that is called a router."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w*[Rr]outer\w*)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"transformers.models.{path.parent.name}.{path.stem}", name


def randomised(module: nn.Module, seed: int, scale: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.copy_(scale * torch.randn(each.shape, generator=generator))
    return module


def by_hand(
    module: Any, hidden: torch.Tensor, choice_bias: torch.Tensor | None, variant: RouterVariant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of all experts `[T, E]`, 0 where one is not chosen, in float64; and by how much the last choice was one."""
    weight, bias = module.weight.double(), getattr(module, "bias", None)
    logits = F.linear(hidden.double(), weight, None if bias is None else bias.double())
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "logits": logits}[variant.scores]
    choice = scores.clone()
    if variant.has_bias:
        assert choice_bias is not None
        choice += choice_bias.double()
    if variant.groups is not None:
        num_groups, num_kept, by_two, masks_with_zero = variant.groups
        for row in choice:
            parts = row.view(num_groups, -1)
            good = [float(part.sort().values[-2:].sum() if by_two else part.max()) for part in parts]
            for group in sorted(range(num_groups), key=lambda number: good[number])[: num_groups - num_kept]:
                parts[group] = 0.0 if masks_with_zero else -torch.inf
    found, margins = torch.zeros_like(scores), []
    for row, own, kept in zip(choice, scores, found, strict=True):
        order = row.argsort(descending=True)
        chosen = order[: variant.top_k]
        margins.append(float(row[order[variant.top_k - 1]] - row[order[variant.top_k]]))
        weights = own[chosen].softmax(-1) if variant.scores == "logits" else own[chosen]
        if variant.eps is not None:
            weights = weights / (weights.sum() + variant.eps)
        kept[chosen] = weights * variant.factor
    return found, torch.tensor(margins)


FOUND = sorted(set(routers()))
KNOWN = {
    "Qwen3MoeTopKRouter": RouterVariant(3, eps=0.0),
    "MixtralTopKRouter": RouterVariant(3, eps=0.0, casts=False),
    "JambaTopKRouter": RouterVariant(3, flattens=False),
    "GptOssTopKRouter": RouterVariant(3, "logits", flattens=False),
    "GraniteMoeTopKRouter": RouterVariant(3, "logits", "cast", flattens=False),
    "MiniMaxM3VLTopKRouter": RouterVariant(3, "sigmoid", eps=0.0, casts=False, has_bias=True, is_sorted=False),
    "MiniMaxM2TopKRouter": RouterVariant(3, "sigmoid", eps=0.0, casts=False, has_bias=True, is_sorted=False),
    "HYV3TopKRouter": RouterVariant(3, "sigmoid", "wide", 1e-20, 1.5, casts=False, has_bias=True, is_sorted=False),
    "DeepseekV2TopkRouter": RouterVariant(3, "softmax", "wide", None, 2.5, casts=False, is_sorted=False),
    "DeepseekV3TopkRouter": RouterVariant(
        3, "sigmoid", "wide", 1e-20, 2.5, False, True, Groups(4, 2, True, False), is_sorted=False
    ),
    "AXK2TopkRouter": RouterVariant(
        3, "sigmoid", "wide", 1e-20, 2.5, False, True, Groups(4, 2, True, True), is_sorted=False
    ),
}


@pytest.mark.parametrize(("module", "name"), FOUND, ids=[name for _, name in FOUND])
def test_every_router_is_known_or_refused(module: str, name: str) -> None:
    """Whatever is accepted gives the stock weights on other sizes; the rest has a reason."""
    try:
        cls = getattr(importlib.import_module(module), name)
        first = cls(config())
        other = cls(config(hidden_size=40, **dict.fromkeys(COUNTS, 32)))
    except (AttributeError, TypeError, ValueError, KeyError):  # asks for a config of its own
        assert name not in KNOWN
        pytest.skip("not built from a plain config")
    if TopKRouterLayout.unfit([first]) is not None:
        assert name not in KNOWN
        return
    variant = find_router(first)
    if name in KNOWN:
        assert variant == KNOWN[name]
    if isinstance(variant, str):
        assert variant
        return
    seen = 0
    for seed, scale in ((11, 0.3), (12, 2.0), (13, 0.01)):
        randomised(other, seed, scale)
        generator = torch.Generator().manual_seed(seed)
        hidden, given = torch.randn(50, 40, generator=generator), 0.3 * torch.randn(32, generator=generator)
        inputs = (hidden, given) if is_given_bias(other) else (hidden,)
        for training in (False, True):
            with torch.no_grad():
                logits, weights, index = other.train(training)(*inputs)
                expected, margins = by_hand(other, hidden, getattr(other, CHOICE_BIAS, given), variant)
            clear = margins > 1e-5
            seen += int(clear.sum())
            assert logits.shape == (50, 32)
            dense = torch.zeros(50, 32, dtype=torch.float64).scatter_(1, index, weights.double())
            torch.testing.assert_close(dense[clear], expected[clear], rtol=1e-4, atol=1e-6)
    assert seen > 150


def test_most_of_them_are_known() -> None:
    assert len(FOUND) > 60
    assert {name for _, name in FOUND} >= KNOWN.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_proof_asks_nothing_of_the_model(dtype: torch.dtype) -> None:
    """Neither weights nor a device are looked at, the module is left alone, and nobody's random state is used up."""
    module = randomised(DeepseekV3TopkRouter(config()), 3, 1.0).to(dtype)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.random.get_rng_state()
    expected = find_router(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    with torch.device("meta"):
        assert find_router(DeepseekV3TopkRouter(config())) == expected == KNOWN["DeepseekV3TopkRouter"]


# --- what is not taken for a router -----------------------------------------------------------------


def qwen(forward: Any) -> nn.Module:
    """A router with a forward of its own."""
    made: Any = type("Other", (Qwen3MoeTopKRouter,), {"forward": forward})
    return made(config())  # type: ignore[no-any-return]


def _temperature(self: Any, hidden_states: torch.Tensor) -> Any:
    logits, _, _ = Qwen3MoeTopKRouter.forward(self, hidden_states)
    weights, index = (logits.float() / 1.5).softmax(-1).topk(self.top_k)
    return logits, weights.to(logits.dtype), index


def _jitter_in_training(self: Any, hidden_states: torch.Tensor) -> Any:
    if self.training:
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.99, 1.01)
    return Qwen3MoeTopKRouter.forward(self, hidden_states)


def _eps(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = F.linear(hidden_states, self.weight)
    weights, index = logits.sigmoid().topk(self.top_k)
    return logits, (weights / (weights.sum(-1, keepdim=True) + 1e-9)).to(logits.dtype), index


def _capped(self: Any, hidden_states: torch.Tensor) -> Any:
    logits, weights, index = Qwen3MoeTopKRouter.forward(self, hidden_states)
    return logits.clamp(max=30.0), weights, index


def _without_gradient(self: Any, hidden_states: torch.Tensor) -> Any:
    logits, weights, index = Qwen3MoeTopKRouter.forward(self, hidden_states)
    return logits, weights.detach(), index


def _least(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = F.linear(hidden_states, self.weight)
    weights, index = logits.float().softmax(-1).topk(self.top_k, largest=False)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index


def _two_results(self: Any, hidden_states: torch.Tensor) -> Any:
    return Qwen3MoeTopKRouter.forward(self, hidden_states)[1:]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_temperature, "its forward is no known router variant"),
        (_jitter_in_training, "its forward is no known router variant"),
        (_eps, "its forward is no known router variant"),
        (_capped, "its forward is no known router variant"),
        (_least, "its forward is no known router variant"),
        (_without_gradient, "its gradients are not those of its forward"),
        (_two_results, "its forward does not give logits, weights and indices of rows (ValueError)"),
    ],
)
def test_another_forward_is_refused(forward: Any, reason: str) -> None:
    module = qwen(forward)
    assert TopKRouterLayout.unfit([module]) is None
    assert find_router(module) == reason
    packed = TopKRouterLayout.patch([module])
    assert CudaFusedRouter.supports(packed) == reason
    assert packed.facts() == {"unknown": reason}  # type: ignore[operator]


def test_scores_that_are_masked_themselves_are_refused() -> None:
    """A choice from the other groups has weight 0 there, not its own."""
    module = DeepseekV2TopkRouter(config(topk_method="group_limited_greedy"))
    assert find_router(module) == "its forward is no known router variant"


def _with(name: str, value: Any) -> nn.Module:
    module = Qwen3MoeTopKRouter(config())
    setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(4, 4), "has no top_k"),
        (_with("norm", nn.LayerNorm(24)), "has other parameters than a router"),
        (_with("scale", nn.Parameter(torch.ones(1))), "has other parameters than a router"),
        (_with("weight", nn.Parameter(torch.ones(3))), "has no weight of two dimensions"),
        (_with("top_k", 2.0), "has no top_k"),
    ],
)
def test_what_does_not_fit(module: nn.Module, reason: str) -> None:
    assert TopKRouterLayout.unfit([module]) == reason


def test_another_instance_of_a_class_is_looked_at_for_itself() -> None:
    assert find_router(Qwen3MoeTopKRouter(config())) == RouterVariant(3, eps=0.0)
    assert find_router(Qwen3MoeTopKRouter(config(norm_topk_prob=False))) == RouterVariant(3)
    assert find_router(Qwen3MoeTopKRouter(config(num_experts_per_tok=5))) == RouterVariant(5, eps=0.0)


@pytest.mark.parametrize(
    ("change", "cuda", "npu"),
    [
        ({}, None, None),
        ({"n_group": 2, "topk_group": 1}, None, None),
        ({"n_group": 3, "num_local_experts": 24}, "its 3 groups of 24 experts are no powers of two", None),
        ({"norm_topk_prob": False}, None, "the operator divides weights by their sum"),
        ({"num_experts_per_tok": 40, "num_local_experts": 128}, "40 of 128 experts are more than 32 of 4096", None),
    ],
)
def test_what_a_device_does_not_compute(change: dict[str, Any], cuda: str | None, npu: str | None) -> None:
    packed = TopKRouterLayout.patch([DeepseekV3TopkRouter(config(**change))])
    assert CudaFusedRouter.supports(packed) == cuda
    assert NpuFusedRouter.supports(packed) == npu


# --- in models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_model_with_the_cpu_kernel_is_the_stock_model(name: Any) -> None:
    stock, model = tiny_model(name), tiny_model(name)
    apply_default_kernels(model, "cpu_fused_router")
    patched = [module for module in model.modules() if is_patched(module)]
    assert patched
    assert model.kconvert_report.to_dict()["kernels"] == {"cpu_fused_router": len(patched)}
    ids = torch.arange(1, 9)[None]
    results = [each(ids, labels=ids, output_router_logits=name != "deepseek_v3") for each in (stock, model)]
    assert torch.equal(results[0].logits, results[1].logits)
    if name != "deepseek_v3":
        for one, other in zip(results[0].router_logits, results[1].router_logits, strict=True):
            assert torch.equal(one, other)
    for result in results:
        result.loss.backward()
    for (path, one), (_, other) in zip(stock.named_parameters(), model.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), path
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
