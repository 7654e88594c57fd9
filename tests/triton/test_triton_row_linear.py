"""A linear layer of one row in Triton, against float64; and on a GPU, that a compiler takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kconvert.kernels.packed_linear import call_linear
from kconvert.kernels.row_linear import takes_row
from kconvert.kernels.triton import row_linear as module
from kconvert.kernels.triton.row_linear import launch_row_linear, row_linear, row_product
from tests.triton.norm_checks import Poisoned, assert_near, round_as_on_devices

DTYPES = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest value: two steps, because gate and up may each be rounded to the other side."""
SIZES = [(1, 1), (3, 5), (7, 512), (64, 576), (10, 4096), (6, 4100), (2, 12288), (33, 1000)]
ACTIVATIONS: dict[str | None, Any] = {
    None: None,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def _inputs(
    rows: int, columns: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, columns, generator=generator)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    bias = torch.randn(rows, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def _expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """In float64, rounded where the parts of it would be."""
    wide: torch.Tensor = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if activation is None:
        return wide
    gate, up = wide.to(x.dtype).double().chunk(2, dim=-1)
    acted: torch.Tensor = ACTIVATIONS[activation](gate)
    return acted.to(x.dtype).double() * up


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row_is_the_product(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    activation: str | None,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    monkeypatch.setattr(module, "torch", Poisoned())
    round_as_on_devices(monkeypatch)
    rows, columns = size
    x, weight, bias = _inputs(rows if activation is None else 2 * rows, columns, dtype, device)
    given = bias if has_bias else None
    found = launch_row_linear(row_product, x, weight, given, activation)
    assert found.shape == (1, 1, rows)
    assert found.dtype == dtype
    assert_near(found, _expected(x, weight, given, activation), DTYPES[dtype])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_weight_breaks_its_own_result_only(device: str, value: float) -> None:
    x, weight, _ = _inputs(6, 40, torch.bfloat16, device)
    weight[4, 39] = value
    found = launch_row_linear(row_product, x.abs(), weight, None, None).flatten()
    assert not found[4].isfinite()
    assert found[[0, 1, 2, 3, 5]].isfinite().all()


def test_only_one_row_of_a_plain_layer_is_taken(device: str) -> None:
    layer = nn.Linear(8, 4, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, 1, 8, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        assert takes_row(layer, x) is (device == "cuda")
        assert not takes_row(layer, x.expand(2, 1, 8))
        assert not takes_row(layer, x.float())
        assert not takes_row(nn.Linear(8, 4, device=device), x.float())
    assert not takes_row(layer, x)
    if device != "cuda":
        return
    changed = nn.Linear(8, 4, device=device, dtype=torch.bfloat16)
    changed.register_forward_hook(lambda module, args, found: 2 * found)
    own = nn.Linear(8, 4, device=device, dtype=torch.bfloat16)
    own.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        assert not takes_row(changed, x)
        assert not takes_row(own, x)
        with torch.autocast("cuda", torch.float16):
            assert not takes_row(layer, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a compiler takes no interpreted kernel")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiler_launches_it(mode: str) -> None:
    layer = nn.Linear(576, 96, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: call_linear(layer, x) + 1, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(1, 576, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
            assert_near(compiled(x).clone(), layer(x) + 1, 2e-2)
        _, (code,) = torch._inductor.utils.run_and_get_code(compiled, torch.ones(1, 576).to(x))
        assert "row_product" in code
        many = torch.randn(3, 576, device="cuda", dtype=torch.bfloat16)
        assert_near(compiled(many).clone(), layer(many) + 1, 2e-2)
    leaf = x.detach().requires_grad_()
    compiled(leaf).sum().backward()
    assert leaf.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a compiler takes no interpreted kernel")
def test_the_operator_keeps_the_rules_of_operators() -> None:
    x, weight, bias = _inputs(8, 64, torch.bfloat16, "cuda")
    for activation in ACTIVATIONS:
        torch.library.opcheck(row_linear, (x, weight, bias, activation))
