"""Experts on stacked weights: routing, forward and every gradient against a loop over experts in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kconvert.kernels.expert_weights import ExpertWeights
from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.triton import expert_gemm, expert_grads, expert_routing, expert_rows, gated_act
from kconvert.kernels.triton.expert_routing import route
from kconvert.kernels.triton.experts import Way, choose_way, experts, torch_way_reason
from tests.triton.expert_checks import (
    Poisoned,
    loop_over_experts,
    moved,
    multiply_as_on_devices,
    random_choices,
    random_params,
)
from tests.triton.norm_checks import assert_near, round_as_on_devices

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value.  Two products lie one behind the other, with a rounding between them in the narrow types."""

SILU = GatedVariant()
GPT_OSS = GatedVariant("swiglu_oai", limit=0.9, alpha=1.702, is_interleaved=True)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_on_devices(monkeypatch)
    multiply_as_on_devices(monkeypatch)
    for module in (expert_routing, expert_gemm, expert_grads, expert_rows, gated_act):
        monkeypatch.setattr(module, "torch", Poisoned())


def check(
    device: str,
    dtype: torch.dtype,
    ids: torch.Tensor,
    params: ExpertWeights,
    variant: GatedVariant = SILU,
    *,
    is_transposed: bool = False,
    way: Way = "triton",
    weights_dtype: torch.dtype | None = None,
    backward: bool = True,
) -> None:
    """Forward and all gradients against the loop in float64, from the same rounded inputs."""
    generator = torch.Generator().manual_seed(1)
    hidden = params.gate_up.shape[1 if is_transposed else 2]
    x = torch.randn(ids.shape[0], hidden, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    dy = torch.randn(ids.shape[0], hidden, generator=generator).to(dtype)
    leaves: list[torch.Tensor | None] = [
        x.to(device, dtype),
        weights.to(device, weights_dtype or dtype),
        *(None if tensor is None else tensor.to(device, dtype) for tensor in params),
    ]
    wide = [None if leaf is None else leaf.detach().cpu().double() for leaf in leaves]
    for leaf in (*leaves, *wide):
        if leaf is not None:
            leaf.requires_grad_()
    ids_there = ids.to(device)

    with torch.set_grad_enabled(backward):
        found = experts(
            leaves[0],  # type: ignore[arg-type]
            ids_there,
            leaves[1],  # type: ignore[arg-type]
            ExpertWeights(*leaves[2:]),  # type: ignore[arg-type]
            variant,
            is_transposed=is_transposed,
            way=way,
        )
    expected = loop_over_experts(
        wide[0],  # type: ignore[arg-type]
        ids,
        wide[1],  # type: ignore[arg-type]
        ExpertWeights(*wide[2:]),  # type: ignore[arg-type]
        variant,
        is_transposed=is_transposed,
    )
    assert found.dtype == dtype
    assert_near(found.cpu(), expected, TOLERANCES[dtype])
    if not backward:
        return
    grads = torch.autograd.grad(found, [leaf for leaf in leaves if leaf is not None], dy.to(device))
    wide_grads = torch.autograd.grad(expected, [leaf for leaf in wide if leaf is not None], dy.double())
    for leaf, grad, wide_grad in zip((leaf for leaf in leaves if leaf is not None), grads, wide_grads, strict=True):
        assert grad.dtype == leaf.dtype
        assert_near(grad.cpu(), wide_grad, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("variant", "is_transposed", "has_bias"), [(SILU, False, False), (GPT_OSS, True, True)], ids=["silu", "gpt-oss"]
)
def test_experts_compute_the_formula_and_its_gradients_in_every_dtype(
    device: str, dtype: torch.dtype, variant: GatedVariant, *, is_transposed: bool, has_bias: bool
) -> None:
    params = random_params(3, 36, 20, is_transposed=is_transposed, has_bias=has_bias)
    check(device, dtype, random_choices(7, 2, 3), params, variant, is_transposed=is_transposed)


@pytest.mark.parametrize(
    "variant",
    [
        GatedVariant("gelu"),
        GatedVariant("gelu_tanh", is_up_first=True),
        GatedVariant("silu", limit=0.5),
        GatedVariant("silu", is_interleaved=True, is_up_first=True),
        GatedVariant("swiglu_oai", alpha=1.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_every_gate_and_either_order_of_the_weights(device: str, variant: GatedVariant, *, is_transposed: bool) -> None:
    params = random_params(2, 17, 5, is_transposed=is_transposed)
    check(device, torch.float64, random_choices(4, 1, 2), params, variant, is_transposed=is_transposed)


@pytest.mark.parametrize("has_bias", [(True, False), (False, True)], ids=["gate_up", "down"])
def test_one_bias_of_two(device: str, has_bias: tuple[bool, bool]) -> None:
    params = random_params(2, 16, 8, has_bias=True)
    some = ExpertWeights(
        params.gate_up,
        params.down,
        params.gate_up_bias if has_bias[0] else None,
        params.down_bias if has_bias[1] else None,
    )
    check(device, torch.float64, random_choices(3, 2, 2), some)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(1, 1, 1), (1, 8, 8), (5, 8, 24), (19, 4, 5)],
)
def test_few_and_many_experts_and_choices(device: str, num_tokens: int, top_k: int, num_experts: int) -> None:
    check(device, torch.float32, random_choices(num_tokens, top_k, num_experts), random_params(num_experts, 20, 12))


@pytest.mark.parametrize("num_tokens", [3, 40, 100, 210])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_all_sizes_of_tiles(device: str, num_tokens: int, *, is_interleaved: bool) -> None:
    params = random_params(2, 136, 140)
    variant = GatedVariant(is_interleaved=is_interleaved)
    check(device, torch.bfloat16, random_choices(num_tokens, 1, 2), params, variant, backward=False)


@pytest.mark.parametrize("way", ["triton", "torch"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_both_ways_and_experts_without_tokens(device: str, way: Way, *, is_transposed: bool) -> None:
    """All tokens are on one expert: the others get gradients that are 0, not what was in memory."""
    ids = torch.full((6, 1), 2)
    params = random_params(4, 32, 16, is_transposed=is_transposed)
    check(device, torch.bfloat16, ids, params, is_transposed=is_transposed, way=way)
    check(device, torch.bfloat16, random_choices(9, 3, 4), params, is_transposed=is_transposed, way=way)


@pytest.mark.parametrize("way", ["triton", "torch"])
def test_a_choice_that_names_no_expert_adds_nothing(device: str, way: Way) -> None:
    ids = torch.tensor([[0, 3], [3, 3], [2, 1], [-1, 2]])
    check(device, torch.bfloat16, ids, random_params(3, 32, 16), way=way)


def test_weights_of_the_router_may_be_wider(device: str) -> None:
    check(device, torch.bfloat16, random_choices(4, 2, 3), random_params(3, 32, 16), weights_dtype=torch.float32)


def test_no_tokens(device: str) -> None:
    dtype = torch.bfloat16
    params = moved(random_params(3, 32, 16), device, dtype)
    params.gate_up.requires_grad_()
    x = torch.zeros(0, 32, device=device, dtype=dtype, requires_grad=True)
    ids, weights = torch.zeros(0, 2, device=device, dtype=torch.int64), torch.zeros(0, 2, device=device, dtype=dtype)
    found = experts(x, ids, weights, params, SILU, is_transposed=False)
    assert found.shape == (0, 32)
    found.sum().backward()
    assert x.grad is not None
    assert params.gate_up.grad is not None
    assert torch.count_nonzero(params.gate_up.grad) == 0
    with torch.no_grad():
        assert experts(x, ids, weights, params, SILU, is_transposed=False).shape == (0, 32)


def test_tensors_that_are_not_contiguous_are_read_where_they_are(device: str) -> None:
    """Tokens as columns of something wider, and parameters that are views; only the tokens may ever be copied."""
    params = random_params(3, 20, 8)
    x = torch.randn(5, 60, dtype=torch.float64)
    ids, weights = random_choices(5, 2, 3), torch.rand(2, 5, dtype=torch.float64).T
    expected = loop_over_experts(x[:, 20:40], ids, weights, params, SILU, is_transposed=False)
    permuted = ExpertWeights(
        params.gate_up.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        params.down.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    )
    for hidden in (x.to(device)[:, 20:40], x.to(device)[:, 20:40].T.contiguous().T):
        there = moved(permuted, device)
        found = experts(hidden, ids.to(device), weights.to(device), there, SILU, is_transposed=False, way="triton")
        assert_near(found.cpu(), expected, 1e-12)


def test_a_gradient_is_made_only_of_what_asks_for_one(device: str) -> None:
    params = moved(random_params(2, 16, 8, has_bias=True), device)
    params.down.requires_grad_()
    x = torch.randn(3, 16, dtype=torch.float64, device=device)
    ids, weights = random_choices(3, 1, 2).to(device), torch.rand(3, 1, dtype=torch.float64, device=device)
    found = experts(x, ids, weights, params, SILU, is_transposed=False)
    found.sum().backward()
    assert params.down.grad is not None
    assert params.down.grad.stride() == params.down.stride()
    others = (x, weights, params.gate_up, params.gate_up_bias, params.down_bias)
    assert all(tensor is not None and tensor.grad is None for tensor in others)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_with_their_token(device: str, bad: float) -> None:
    params = random_params(3, 16, 8)
    x = torch.randn(4, 16, dtype=torch.float64)
    x[2, 5] = bad
    ids, weights = random_choices(4, 2, 3), torch.rand(4, 2, dtype=torch.float64)
    expected = loop_over_experts(x, ids, weights, params, SILU, is_transposed=False)
    there = moved(params, device)
    found = experts(x.to(device), ids.to(device), weights.to(device), there, SILU, is_transposed=False).cpu()
    assert not found[2].isfinite().any()
    assert_near(found, expected, 1e-12)


def test_nan_passes_the_clamp(device: str) -> None:
    params = random_params(1, 16, 8, has_bias=True, is_transposed=True)
    assert params.gate_up_bias is not None
    params.gate_up_bias[0, 3] = float("nan")
    there = moved(params, device)
    x, ids = torch.randn(1, 16, dtype=torch.float64, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    found = experts(x, ids, torch.ones_like(x[:, :1]), there, GPT_OSS, is_transposed=True)
    assert found.isnan().all()


def test_gradcheck(device: str) -> None:
    params = random_params(2, 6, 4, is_transposed=True, has_bias=True)
    ids = torch.tensor([[0, 1], [1, 2]], device=device)
    x = torch.randn(2, 6, dtype=torch.float64)
    weights = torch.rand(2, 2, dtype=torch.float64)
    leaves = [tensor.to(device).requires_grad_() for tensor in (x, weights, *params) if tensor is not None]

    def run(x: torch.Tensor, weights: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return experts(x, ids, weights, ExpertWeights(*params), GPT_OSS, is_transposed=True)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(0, 3), (1, 1), (200, 7), (1500, 128), (1030, 300)])
def test_rows_are_sorted_stably_and_the_table_covers_them(device: str, num_rows: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (num_rows, 1), generator=generator)
    routing = route(ids.to(device), num_experts=num_experts, block_rows=16)
    order, places, ends, blocks = (tensor.cpu() for tensor in routing[:4])
    flat = ids.flatten()
    is_one = (flat >= 0) & (flat < num_experts)
    counts = torch.bincount(flat[is_one], minlength=num_experts)
    assert torch.equal(ends.long(), counts.cumsum(0))
    kept = torch.arange(num_rows)[is_one]
    expected = kept[flat[is_one].argsort(stable=True)]
    assert torch.equal(order[: len(expected)].long(), expected)
    assert torch.equal(places[expected].long(), torch.arange(len(expected)))
    assert (places[~is_one] == num_rows).all()
    covered = []
    for expert, first in blocks.T.tolist():
        if expert >= 0:
            covered += [(expert, row) for row in range(first, min(first + 16, int(ends[expert])))]
    assert covered == [(int(flat[row]), place) for place, row in enumerate(expected.tolist())]


class _NothingToTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["triton", "torch"])
def test_no_number_is_read_from_the_device(device: str, way: Way) -> None:
    dtype = torch.bfloat16
    params = moved(random_params(3, 32, 16), device, dtype)
    assert torch_way_reason(torch.zeros(1, 32, dtype=dtype, device=device), params) is None
    x = torch.randn(4, 32, device=device, dtype=dtype, requires_grad=True)
    ids, weights = random_choices(4, 2, 3).to(device), torch.rand(4, 2, device=device, dtype=dtype)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), _NothingToTheHost():  # type: ignore[no-untyped-call]
            found = experts(x, ids, weights, params, SILU, is_transposed=False, way=way)
        assert found.shape == x.shape
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(x, ids, weights, params, SILU, is_transposed=False, way=way).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "has_bias", "half", "reason"),
    [
        (torch.float32, False, 16, "bfloat16 only"),
        (torch.bfloat16, True, 16, "biases"),
        (torch.bfloat16, False, 12, "multiples of 16 bytes"),
    ],
)
def test_what_torch_cannot_do_is_told(*, dtype: torch.dtype, has_bias: bool, half: int, reason: str) -> None:
    params = random_params(2, 16, half, has_bias=has_bias)
    there = moved(params, dtype)
    found = torch_way_reason(torch.zeros(1, 16, dtype=dtype), there)
    assert found is not None
    assert reason in found


def test_the_way_is_chosen_by_how_many_rows_an_expert_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from kconvert.kernels.triton import experts as module

    monkeypatch.setattr(module, "_TORCH_FROM_ROWS", 64)
    plain = moved(random_params(3, 32, 16), torch.bfloat16)
    with_bias = moved(random_params(3, 32, 16, has_bias=True), torch.bfloat16)
    hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
    assert choose_way(hidden, 3 * 64, plain, needs_grad=True) == "torch"
    assert choose_way(hidden, 3 * 64, plain, needs_grad=False) == "triton"
    assert choose_way(hidden, 3 * 64 - 1, plain, needs_grad=True) == "triton"
    assert choose_way(hidden, 3 * 64, with_bias, needs_grad=True) == "triton"


@pytest.mark.parametrize(("shared_bytes", "stages"), [(227 * 1024, 3), (163 * 1024, 3), (99 * 1024, 2), (1, 1)])
def test_tiles_fit_into_shared_memory(shared_bytes: int, stages: int) -> None:
    tiles = expert_gemm.tiles_for(torch.bfloat16, torch.device("cpu"), num_rows=32768, num_experts=128)
    assert expert_gemm._fitted(tiles, torch.bfloat16, shared_bytes) == tiles._replace(stages=stages)
