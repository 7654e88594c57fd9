"""Gated MLP: order of gate and up by value, which forwards are SwiGLU or GeGLU, and the CPU kernels against the reference.

The CUDA kernels' device code runs in `tests/triton`; here it is what they accept and what a compiler sees of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DINOv3ViTConfig, GemmaConfig, Llama4TextConfig, PixtralVisionConfig, ZambaConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTGatedMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMLP
from transformers.models.pixtral.modeling_pixtral import PixtralMLP
from transformers.models.zamba.modeling_zamba import ZambaMLP

from kconvert.errors import KernelUnavailableError
from kconvert.kernels.ops.gated_mlp import layout
from kconvert.kernels.ops.gated_mlp.cpu import CpuFusedGeGLU, CpuFusedSwiGLU, gated_product_cpu
from kconvert.kernels.ops.gated_mlp.cuda import CudaFusedGeGLU, CudaFusedSwiGLU
from kconvert.kernels.ops.gated_mlp.layout import ACTIVATIONS, GatedMLPLayout, gelu_of, prove_activation
from kconvert.kernels.packed_linear import call_linear
from tests.support import tiny_config, tiny_model

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}
SHAPES = [(1, 1, 7), (3, 577), (2, 5, 2048)]
MODULES: dict[str, nn.Module] = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}
NOT_GATED = "its forward is not down(act(gate) * up) with silu, gelu or gelu_tanh"


class GatedMLP(nn.Module):
    """As in Llama, with sizes of its own."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn: nn.Module = nn.SiLU()

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


def test_gate_comes_first_by_value_with_gelu_too() -> None:
    hidden = torch.tensor([1.0, -1.0])
    module = _identity_mlp()
    module.act_fn = nn.GELU(approximate="tanh")
    packed: Any = GatedMLPLayout.patch([module])
    with torch.no_grad():
        for right in (torch.tensor([1.6824, 0.3176]), torch.tensor([1.9546, 0.0454])):
            torch.testing.assert_close(CpuFusedGeGLU.forward(packed, hidden), right, rtol=0, atol=5e-5)
            torch.testing.assert_close(packed.reference(hidden), right, rtol=0, atol=5e-5)
            packed.gate_up_proj.weight.copy_(packed.gate_up_proj.weight.roll(2, 0))


def test_halves_and_not_pairs() -> None:
    found = gated_product_cpu(torch.tensor([[1.0, -1.0, 2.0, -2.0]]), "silu")
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
        ("shapes", "gate_proj and up_proj differ in shape"),
        ("bias of one", "of gate_proj and up_proj, gate_proj has no bias"),
    ],
)
def test_modules_of_another_structure(name: str, said: str) -> None:
    assert said in str(GatedMLPLayout.unfit([_other(name)]))


# --- proof ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "not_swiglu", "not_geglu"),
    [
        ("silu", None, "its activation is silu, not gelu or gelu_tanh"),
        ("swish", None, "its activation is silu, not gelu or gelu_tanh"),
        ("gelu", "its activation is gelu, not silu", None),
        ("gelu_python", "its activation is gelu, not silu", None),
        ("gelu_pytorch_tanh", "its activation is gelu_tanh, not silu", None),
        ("gelu_new", "its activation is gelu_tanh, not silu", None),
        ("quick_gelu", NOT_GATED, NOT_GATED),
        ("gelu_10", NOT_GATED, NOT_GATED),
        ("relu", NOT_GATED, NOT_GATED),
    ],
)
def test_the_activation_is_proven(activation: str, not_swiglu: str | None, not_geglu: str | None) -> None:
    packed: Any = GatedMLPLayout.patch([LlamaMLP(tiny_config("llama", hidden_act=activation))])
    assert CpuFusedSwiGLU.supports(packed) == CudaFusedSwiGLU.supports(packed) == not_swiglu
    assert CpuFusedGeGLU.supports(packed) == CudaFusedGeGLU.supports(packed) == not_geglu


@pytest.mark.parametrize(("activation", "name"), [("gelu", "gelu"), ("gelu_new", "gelu_tanh")])
def test_the_two_kinds_of_gelu_are_told_apart(activation: str, name: str) -> None:
    packed: Any = GatedMLPLayout.patch([LlamaMLP(tiny_config("llama", hidden_act=activation))])
    (other,) = {"gelu", "gelu_tanh"} - {name}
    assert prove_activation(packed, name) is None
    assert prove_activation(packed, other) == f"its activation is {name}, not {other}"
    assert gelu_of(packed) == name


def test_a_module_without_gelu_has_none() -> None:
    packed: Any = GatedMLPLayout.patch([LlamaMLP(tiny_config("llama"))])
    with pytest.raises(KernelUnavailableError, match="its activation is silu, not gelu or gelu_tanh"):
        CpuFusedGeGLU.forward(packed, torch.randn(1, 8))


def test_the_activation_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: Any = GatedMLPLayout.patch([LlamaMLP(tiny_config("llama", hidden_act="gelu"))])
    assert CudaFusedGeGLU.supports(packed) is None

    def again(*_: Any) -> None:
        raise AssertionError("looked for again")

    monkeypatch.setattr(layout, "_find_activation", again)
    assert CpuFusedGeGLU.supports(packed) is None
    assert gelu_of(packed) == "gelu"


@pytest.mark.parametrize(
    ("build", "kernel"),
    [
        (lambda: GemmaMLP(GemmaConfig(hidden_size=8, intermediate_size=12)), CpuFusedGeGLU),
        (lambda: GemmaMLP(GemmaConfig(hidden_size=8, intermediate_size=12, hidden_act="silu")), CpuFusedSwiGLU),
        (lambda: LlamaMLP(tiny_config("llama", hidden_size=8, mlp_bias=True)), CpuFusedSwiGLU),
        (lambda: LlamaMLP(tiny_config("llama", hidden_size=8, hidden_act="gelu_new", mlp_bias=True)), CpuFusedGeGLU),
        (lambda: Llama4TextMLP(Llama4TextConfig(hidden_size=8, intermediate_size_mlp=12)), CpuFusedSwiGLU),
        (lambda: Llama4TextMLP(Llama4TextConfig(hidden_size=8, hidden_act="gelu_pytorch_tanh")), CpuFusedGeGLU),
        (lambda: PixtralMLP(PixtralVisionConfig(hidden_size=8, intermediate_size=12)), CpuFusedGeGLU),
        (lambda: DINOv3ViTGatedMLP(DINOv3ViTConfig(hidden_size=8, intermediate_size=12)), CpuFusedGeGLU),
        (lambda: ZambaMLP(ZambaConfig(hidden_size=8, intermediate_size=12)), CpuFusedGeGLU),
    ],
    ids=["gemma", "gemma silu", "bias", "bias gelu", "llama4", "llama4 gelu", "pixtral", "dinov3", "zamba"],
)
def test_the_kernel_follows_the_activation_wherever_the_class_keeps_it(build: Any, kernel: Any) -> None:
    """A19: Gemma's config calls it hidden_act or hidden_activation, Llama 4's MLP activation_fn."""
    module = build()
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
        expected = module(hidden)
        packed: Any = GatedMLPLayout.patch([module])
        (other,) = {CpuFusedSwiGLU, CpuFusedGeGLU} - {kernel}
        assert kernel.supports(packed) is None
        assert str(other.supports(packed)).startswith("its activation is ")
        assert torch.equal(packed.reference(hidden), expected)
        torch.testing.assert_close(kernel.forward(packed, hidden), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "other"),
    [
        (lambda: PixtralMLP(PixtralVisionConfig(hidden_size=8, intermediate_size=12)), "gelu_tanh"),
        (lambda: GemmaMLP(GemmaConfig(hidden_size=8, intermediate_size=12)), "gelu"),
    ],
    ids=["pixtral", "gemma"],
)
def test_the_other_gelu_would_show(build: Any, other: str) -> None:
    packed: Any = GatedMLPLayout.patch([build()])
    hidden = 3 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.normal_(std=0.5)
        wrong = packed.down_proj(gated_product_cpu(packed.gate_up_proj(hidden), other))
        assert not torch.allclose(wrong, packed.reference(hidden), rtol=1e-5, atol=1e-5)


def test_gemma_2_keeps_its_activation_under_another_key() -> None:
    model = tiny_model("gemma2", hidden_activation="gelu_pytorch_tanh", hidden_act="silu")
    packed: Any = GatedMLPLayout.patch([model.model.layers[0].mlp])
    assert CpuFusedGeGLU.supports(packed) is None
    other = tiny_model("gemma2", hidden_activation="silu")
    assert CpuFusedSwiGLU.supports(GatedMLPLayout.patch([other.model.layers[0].mlp])) is None


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
    assert CpuFusedSwiGLU.supports(packed) == NOT_GATED
    assert CpuFusedGeGLU.supports(packed) == NOT_GATED


def test_a_forward_of_another_signature() -> None:
    module = type("TwoInputs", (GatedMLP,), {"forward": lambda self, x, gate: GatedMLP.forward(self, x) * gate})(8, 12)
    assert "takes x and gate" in str(prove_activation(GatedMLPLayout.patch([module]), "silu"))  # type: ignore[arg-type]


def test_a_forward_that_gives_a_tuple() -> None:
    module = type("Tuple", (GatedMLP,), {"forward": lambda self, x: (GatedMLP.forward(self, x), x)})(8, 12)
    assert "one tensor" in str(prove_activation(GatedMLPLayout.patch([module]), "silu"))  # type: ignore[arg-type]


def test_a_forward_with_an_optional_second_input_is_not_handed_to_the_kernel() -> None:
    def forward(self: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        result = GatedMLP.forward(self, x)
        return result if scale is None else result * scale

    module = type("Scaled", (GatedMLP,), {"forward": forward})(8, 12)
    assert "takes x and scale" in str(prove_activation(GatedMLPLayout.patch([module]), "silu"))  # type: ignore[arg-type]


# --- the kernel -------------------------------------------------------------------------------------


def _random(hidden: int, inner: int, dtype: torch.dtype, *, bias: bool) -> GatedMLP:
    module, generator = GatedMLP(hidden, inner, bias=bias), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / hidden**0.5)
    return module.to(dtype)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_against_the_stock_forward(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...], activation: str
) -> None:
    module = _random(shape[-1], 33, dtype, bias=bias)
    module.act_fn = MODULES[activation]
    kernel: Any = CpuFusedSwiGLU if activation == "silu" else CpuFusedGeGLU
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, expected = hidden.clone(), module(hidden).detach()
    with torch.no_grad():
        found = kernel.forward(GatedMLPLayout.patch([module]), hidden)
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
    for name, activated in ((name, module(gate)) for name, module in MODULES.items()):
        assert torch.equal(gated_product_cpu(packed.clone(), name), activated * up)
        assert torch.equal(gated_product_cpu(packed.clone().requires_grad_(), name).detach(), activated * up)


@pytest.mark.parametrize(
    ("forward", "activation", "said"),
    [
        (lambda self, x: self._run(x, *self.gate_up_proj(x).chunk(2, -1)), "silu", None),
        (lambda self, x: self._run(x, *self.gate_up_proj(x).chunk(2, -1)), "gelu_tanh", None),
        (
            lambda self, x: self._run(x, *reversed(self.gate_up_proj(x).chunk(2, -1))),
            "silu",
            f"is built packed, and {NOT_GATED}",
        ),
        (
            lambda self, x: self._run(x, *self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)),
            "silu",
            f"is built packed, and {NOT_GATED}",
        ),
    ],
    ids=["gate first", "gate first, gelu", "up first", "interleaved"],
)
def test_a_module_that_is_built_packed_fits_where_its_order_is_the_layouts(
    forward: Callable[..., Any], activation: str, said: str | None
) -> None:
    """A4: the same shapes, and gate and up in other places."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Linear(8, 24, bias=False)
            self.down_proj = nn.Linear(12, 8, bias=False)

        def _run(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
            return self.down_proj((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up)

    module = type("Packed", (Packed,), {"forward": forward})()
    assert GatedMLPLayout.unfit([module]) == said
    if said is None:
        hidden = torch.randn(3, 8)
        expected, before = module(hidden), module.gate_up_proj
        packed: Any = GatedMLPLayout.patch([module])
        assert packed.gate_up_proj is before
        kernel = CpuFusedSwiGLU if activation == "silu" else CpuFusedGeGLU
        torch.testing.assert_close(kernel.forward(packed, hidden), expected)
        assert torch.equal(packed.reference(hidden), expected)


def test_gradients_of_inputs_through_frozen_weights() -> None:
    packed: Any = GatedMLPLayout.patch([GatedMLP(8, 12).requires_grad_(False)])
    hidden = torch.randn(3, 8).requires_grad_()
    CpuFusedSwiGLU.forward(packed, hidden).sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) > 0


# --- what a CUDA kernel does beside its device code -----------------------------------------------------


@pytest.mark.parametrize(("activation", "kernel"), [("silu", CudaFusedSwiGLU), ("gelu", CudaFusedGeGLU)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_compiler_sees_plain_torch_in_the_cuda_kernel(activation: str, kernel: Any, bias: bool) -> None:
    module = _random(8, 12, torch.float32, bias=bias)
    module.act_fn = MODULES[activation]
    packed: Any = GatedMLPLayout.patch([module])
    assert kernel.supports(packed) is None
    compiled = torch.compile(lambda x: kernel.forward(packed, x), fullgraph=True, backend="eager")
    grads = []
    for run in (packed.reference, compiled):
        packed.zero_grad()
        hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found = run(hidden)
        found.pow(2).sum().backward()
        grads.append([found, hidden.grad, *(parameter.grad for parameter in packed.parameters())])
    for expected, made in zip(*grads, strict=True):
        assert expected is not None
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


class _Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _changed(name: str) -> nn.Linear:
    linear = _Doubled(8, 6) if name == "subclass" else nn.Linear(8, 6)
    if name == "forward":
        linear.__dict__["forward"] = lambda x: 2 * nn.Linear.forward(linear, x)  # as accelerate sets it
    elif name == "hook":
        linear.register_forward_hook(lambda module, args, found: 2 * found)
    elif name == "pre-hook":
        linear.bias = None  # type: ignore[assignment]
        linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return linear


@pytest.mark.parametrize("name", ["subclass", "forward", "hook", "pre-hook"])
def test_a_linear_that_is_more_than_that_is_called(name: str) -> None:
    linear, hidden = _changed(name), torch.randn(3, 8)
    expected = 2 * F.linear(hidden, linear.weight, linear.bias)
    torch.testing.assert_close(call_linear(linear, hidden), expected)


def test_a_linear_is_called_where_hooks_are_on_all_modules() -> None:
    linear, hidden = nn.Linear(8, 6), torch.randn(3, 8)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, found: 2 * found)
    try:
        torch.testing.assert_close(call_linear(linear, hidden), 2 * F.linear(hidden, linear.weight, linear.bias))
    finally:
        handle.remove()


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_linear_is_not_called(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, hidden = nn.Linear(8, 6, bias=bias), torch.randn(3, 8)
    expected = linear(hidden)
    monkeypatch.setattr(nn.Module, "__call__", None)
    assert torch.equal(call_linear(linear, hidden), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_without_gradients_the_cpu_kernel_has_the_bits_of_stock(
    activation: str, dtype: torch.dtype, bias: bool
) -> None:
    """Gate and up are the products that stock has; nothing of the input is written over."""
    torch.manual_seed(0)
    stock = GatedMLP(48, 80, bias=bias)
    stock.act_fn = MODULES[activation]
    stock = stock.to(dtype)
    packed: Any = GatedMLPLayout.patch([copy.deepcopy(stock)])
    hidden = torch.randn(2, 5, 48).to(dtype)
    before, kernel = hidden.clone(), {"silu": CpuFusedSwiGLU, "gelu": CpuFusedGeGLU}[activation]
    with torch.no_grad():
        found, expected = kernel.forward(packed, hidden), stock(hidden)
    assert torch.equal(found, expected)
    assert torch.equal(hidden, before)


def test_a_projection_that_is_more_than_its_weight_is_called_whole() -> None:
    """Hooks, and a module that its author built packed; under gradients it is one product too."""
    torch.manual_seed(0)
    packed: Any = GatedMLPLayout.patch([GatedMLP(8, 12)])
    hidden = torch.randn(3, 8)
    parts = packed.kconvert_project_apart("gate_up_proj", hidden)
    assert parts is None
    with torch.no_grad():
        parts = packed.kconvert_project_apart("gate_up_proj", hidden)
        joined = packed.gate_up_proj(hidden)
        torch.testing.assert_close(torch.cat(parts, -1), joined)
        assert all(part.is_contiguous() for part in parts)
        expected = CpuFusedSwiGLU.forward(packed, hidden)
        handle = packed.gate_up_proj.register_forward_hook(lambda module, args, output: output + 1.0)
        assert packed.kconvert_project_apart("gate_up_proj", hidden) is None
        gate, up = (joined + 1.0).chunk(2, -1)
        torch.testing.assert_close(
            CpuFusedSwiGLU.forward(packed, hidden), packed.down_proj(torch.nn.functional.silu(gate) * up)
        )
        handle.remove()
        assert torch.equal(CpuFusedSwiGLU.forward(packed, hidden), expected)
        packed.requires_grad_(False)
    assert packed.kconvert_project_apart("gate_up_proj", hidden) is not None
    assert packed.kconvert_project_apart("gate_up_proj", hidden.requires_grad_()) is None


class _Whole(torch.Tensor):
    """A weight that cannot be cut, as quantised ones may be."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.split, torch.Tensor.narrow, torch.split):
            raise NotImplementedError("it has no rows")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_weight_that_cannot_be_cut_is_called_whole() -> None:
    torch.manual_seed(0)
    packed: Any = GatedMLPLayout.patch([GatedMLP(8, 12)])
    hidden = torch.randn(3, 8)
    with torch.no_grad():
        expected = CpuFusedSwiGLU.forward(packed, hidden)
        weight = packed.gate_up_proj.weight.detach().as_subclass(_Whole)
        packed.gate_up_proj.weight = nn.Parameter(weight, requires_grad=False)
        assert type(packed.gate_up_proj.weight) is not nn.Parameter
        assert packed.kconvert_project_apart("gate_up_proj", hidden) is None
        torch.testing.assert_close(CpuFusedSwiGLU.forward(packed, hidden).as_subclass(torch.Tensor), expected)
