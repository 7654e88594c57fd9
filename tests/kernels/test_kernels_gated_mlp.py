"""Gated MLP: order of gate and up by value, which forwards are SwiGLU, and the CPU kernel against its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from kconvert.kernels.ops.gated_mlp.cpu import CpuFusedSwiGLU, swiglu_cpu
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout, prove_swiglu
from tests.support import tiny_config

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}
SHAPES = [(1, 1, 7), (3, 577), (2, 5, 2048)]


class GatedMLP(nn.Module):
    """As in Llama, with sizes of its own."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _identity_mlp() -> GatedMLP:
    module = GatedMLP(2, 2)
    with torch.no_grad():
        module.gate_proj.weight.copy_(torch.eye(2))
        module.up_proj.weight.copy_(2 * torch.eye(2))
        module.down_proj.weight.copy_(torch.eye(2))
    return module


# --- order ------------------------------------------------------------------------------------------


def test_gate_comes_first_by_value() -> None:
    hidden = torch.tensor([1.0, -1.0])
    right = torch.tensor([1.4621, 0.5379])
    module: Any = GatedMLPLayout.patch([_identity_mlp()])
    with torch.no_grad():
        torch.testing.assert_close(CpuFusedSwiGLU.forward(module, hidden), right, rtol=0, atol=5e-5)
        torch.testing.assert_close(module.reference(hidden), right, rtol=0, atol=5e-5)
        packed = module.gate_up_proj.weight
        assert packed.tolist() == [[1, 0], [0, 1], [2, 0], [0, 2]]
        packed.copy_(packed.roll(2, 0))
        swapped = torch.tensor([1.7616, 0.2384])
        torch.testing.assert_close(CpuFusedSwiGLU.forward(module, hidden), swapped, rtol=0, atol=5e-5)
        torch.testing.assert_close(module.reference(hidden), swapped, rtol=0, atol=5e-5)


def test_halves_and_not_pairs() -> None:
    found = swiglu_cpu(torch.tensor([[1.0, -1.0, 2.0, -2.0]]))
    torch.testing.assert_close(found, torch.tensor([[1.4621, 0.5379]]), rtol=0, atol=5e-5)


# --- packing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_packing_keeps_every_bit(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = GatedMLP(8, 12, bias=bias).to(dtype)
    before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    hidden = torch.randn(3, 8).to(dtype)
    expected = module(hidden)
    packed: Any = GatedMLPLayout.patch([module])
    kinds = ("weight", "bias") if bias else ("weight",)
    names = [f"{child}.{kind}" for child in ("gate_up_proj", "down_proj") for kind in kinds]
    assert [name for name, _ in packed.named_parameters()] == names
    for kind in kinds:
        joined = torch.cat([before[f"gate_proj.{kind}"], before[f"up_proj.{kind}"]])
        assert torch.equal(getattr(packed.gate_up_proj, kind), joined)
        assert torch.equal(getattr(packed.gate_proj, kind), before[f"gate_proj.{kind}"])
        assert torch.equal(getattr(packed.up_proj, kind), before[f"up_proj.{kind}"])
    if not bias:
        assert packed.gate_proj.bias is None
    assert (packed.gate_proj.out_features, packed.up_proj.in_features) == (12, 8)
    assert torch.equal(packed(hidden), expected)
    assert isinstance(packed, GatedMLP)
    assert type(packed).__name__ == "GatedMLP"


def test_a_frozen_module_stays_frozen() -> None:
    packed: Any = GatedMLPLayout.patch([GatedMLP(8, 12).requires_grad_(False).eval()])
    assert not [name for name, parameter in packed.named_parameters() if parameter.requires_grad]
    assert not packed.gate_up_proj.training


class _OwnLinear(nn.Linear):
    pass


def _other(name: str) -> GatedMLP:
    module = GatedMLP(8, 12)
    if name == "own linear":
        module.gate_proj = _OwnLinear(8, 12, bias=False)
    elif name == "no up":
        del module.up_proj
    elif name == "parameter":
        module.scale = nn.Parameter(torch.ones(8))
    elif name == "child with parameters":
        module.norm = nn.LayerNorm(8)
    elif name == "shapes":
        module.up_proj = nn.Linear(8, 10, bias=False)
    elif name == "bias of one":
        module.up_proj = nn.Linear(8, 12, bias=True)
    return module


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own linear", "no plain linear gate_proj"),
        ("no up", "no plain linear up_proj"),
        ("parameter", "other parameters: scale"),
        ("child with parameters", "other parameters: norm.weight"),
        ("shapes", "differ in shape or bias"),
        ("bias of one", "differ in shape or bias"),
    ],
)
def test_modules_of_another_structure(name: str, said: str) -> None:
    assert said in str(GatedMLPLayout.unfit([_other(name)]))


# --- proof ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "is_swiglu"), [("silu", True), ("swish", True), ("gelu_pytorch_tanh", False), ("relu", False)]
)
def test_the_activation_is_proven(activation: str, is_swiglu: bool) -> None:
    config = tiny_config("llama", hidden_act=activation)
    reason = prove_swiglu(GatedMLPLayout.patch([LlamaMLP(config)]))  # type: ignore[arg-type]
    assert reason == (None if is_swiglu else "its forward is not down(silu(gate) * up)")


def _clamped(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(F.silu(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x).clamp(-7.0, 7.0))


def _multiplied(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(F.silu(self.gate_proj(x) * 1.25) * self.up_proj(x)) * 0.5


def _swapped(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


def _sparse(self: Any, x: torch.Tensor) -> Any:
    gate = self.gate_proj(x)
    return self.down_proj(F.silu(F.relu(gate - gate.mean(-1, keepdim=True))) * self.up_proj(x))


def _residual(self: Any, x: torch.Tensor) -> Any:
    return x + GatedMLP.forward(self, x)


OTHER_FORWARDS = [_clamped, _multiplied, _swapped, _sparse, _residual]


@pytest.mark.parametrize("forward", OTHER_FORWARDS, ids=lambda f: f.__name__)
def test_a_forward_with_more_arithmetic_keeps_its_own_bits(forward: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module = type("OtherMLP", (GatedMLP,), {"forward": forward})(8, 12)
    hidden = 100 * torch.randn(3, 8)
    expected = module(hidden)
    assert not torch.allclose(expected, GatedMLP.forward(module, hidden), atol=1e-3)
    assert GatedMLPLayout.unfit([module]) is None
    packed: Any = GatedMLPLayout.patch([module])
    assert torch.equal(packed.reference(hidden), expected)
    assert CpuFusedSwiGLU.supports(packed) == "its forward is not down(silu(gate) * up)"


def test_a_forward_of_another_signature() -> None:
    module = type("TwoInputs", (GatedMLP,), {"forward": lambda self, x, gate: GatedMLP.forward(self, x) * gate})(8, 12)
    assert "takes x and gate" in str(prove_swiglu(GatedMLPLayout.patch([module])))  # type: ignore[arg-type]


def test_a_forward_that_gives_a_tuple() -> None:
    module = type("Tuple", (GatedMLP,), {"forward": lambda self, x: (GatedMLP.forward(self, x), x)})(8, 12)
    assert "one tensor" in str(prove_swiglu(GatedMLPLayout.patch([module])))  # type: ignore[arg-type]


def test_a_forward_with_an_optional_second_input_is_not_handed_to_the_kernel() -> None:
    def forward(self: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        result = GatedMLP.forward(self, x)
        return result if scale is None else result * scale

    module = type("Scaled", (GatedMLP,), {"forward": forward})(8, 12)
    assert "takes x and scale" in str(prove_swiglu(GatedMLPLayout.patch([module])))  # type: ignore[arg-type]


# --- the kernel -------------------------------------------------------------------------------------


def _random(hidden: int, inner: int, dtype: torch.dtype, *, bias: bool) -> GatedMLP:
    module, generator = GatedMLP(hidden, inner, bias=bias), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / hidden**0.5)
    return module.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_against_the_stock_forward(bias: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = _random(shape[-1], 33, dtype, bias=bias)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, expected = hidden.clone(), module(hidden).detach()
    with torch.no_grad():
        found = CpuFusedSwiGLU.forward(GatedMLPLayout.patch([module]), hidden)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_reference_is_the_stock_forward_bit_for_bit(bias: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # 32 rows: the up half begins on a cache line, as it does in real models.  Where it does not, a product with one
    # row may round differently.
    module = _random(shape[-1], 32, dtype, bias=bias)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = module(hidden)
    packed: Any = GatedMLPLayout.patch([module])
    assert torch.equal(packed.reference(hidden), expected)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gradients_against_the_reference(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    packed: Any = GatedMLPLayout.patch([GatedMLP(shape[-1], 33, bias=True)])
    values, upstream = torch.randn(shape), torch.randn(shape)
    grads = []
    for run in (packed.reference, lambda x: CpuFusedSwiGLU.forward(packed, x)):
        packed.zero_grad()
        hidden = values.clone().requires_grad_()
        (run(hidden) * upstream).sum().backward()
        assert hidden.grad is not None
        grads.append([hidden.grad, *(parameter.grad.clone() for parameter in packed.parameters())])
    assert len(grads[0]) == 5
    for found, expected in zip(grads[1], grads[0], strict=True):
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_in_place_and_not_in_place_give_the_same_bits(dtype: torch.dtype) -> None:
    packed = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = packed.chunk(2, -1)
    expected = F.silu(gate) * up
    assert torch.equal(swiglu_cpu(packed.clone()), expected)
    assert torch.equal(swiglu_cpu(packed.clone().requires_grad_()).detach(), expected)


def test_gradients_of_inputs_through_frozen_weights() -> None:
    packed: Any = GatedMLPLayout.patch([GatedMLP(8, 12).requires_grad_(False)])
    hidden = torch.randn(3, 8).requires_grad_()
    CpuFusedSwiGLU.forward(packed, hidden).sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) > 0
