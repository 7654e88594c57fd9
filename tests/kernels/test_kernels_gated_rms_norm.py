"""RMSNorm with a gate: which variant a class computes, the CPU kernel against the formula, and live models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, FalconH1Config, Mamba2Config, NemotronHConfig, Qwen3NextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from kconvert import load_converted
from kconvert.kernels import apply_default_kernels, apply_kernel
from kconvert.kernels.dispatch import Dispatch, attach
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.gated_rms_norm.cpu import CpuFusedGatedRMSNorm, gated_rms_norm_cpu
from kconvert.kernels.ops.gated_rms_norm.layout import (
    GatedRMSNormLayout,
    GatedRMSNormVariant,
    gated_rms_norm_formula,
    prove_gated_variant,
)
from kconvert.manifest import load_manifest
from tests.support import convert, write_recipe

UNKNOWN = "its forward is no known gated RMSNorm variant"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- by value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        # silu(1) = 0.7311, so the gate cancels out in front of the norm
        (MambaRMSNormGated, [0.8485, 2.2627]),
        (Qwen3NextRMSNormGated, [0.6203, 1.6542]),
        (KimiLinearRMSNormGated, [0.6203, 1.6542]),  # sigmoid(1) is 0.7311 too
    ],
)
def test_values(cls: Any, expected: list[float]) -> None:
    module = cls(2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0]))
        packed = GatedRMSNormLayout.patch([module])
        found = CpuFusedGatedRMSNorm.forward(packed, torch.tensor([[3.0, 4.0]]), torch.ones(1, 2))
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=0, atol=5e-5)


# --- by proof ---------------------------------------------------------------------------------------

_Made = Callable[[], nn.Module]
CLASSES: dict[str, tuple[_Made, GatedRMSNormVariant]] = {
    "mamba2": (lambda: MambaRMSNormGated(48, eps=1e-5), GatedRMSNormVariant(1e-5)),
    "zamba2": (lambda: Zamba2RMSNormGated(48, 16), GatedRMSNormVariant(1e-6, num_groups=3)),
    "zamba2, one group": (lambda: Zamba2RMSNormGated(48, 48), GatedRMSNormVariant(1e-6)),
    "qwen3_next": (
        lambda: Qwen3NextRMSNormGated(48),
        GatedRMSNormVariant(1e-6, gate_first=False, takes_none=False),
    ),
    "kimi_linear": (
        lambda: KimiLinearRMSNormGated(48),
        GatedRMSNormVariant(1e-6, 1, "sigmoid", gate_first=False, cast_first=False, takes_none=False),
    ),
    "qwen4_exp, sigmoid": (
        lambda: Qwen4ExpTextRMSNormGated(48, activation="sigmoid"),
        GatedRMSNormVariant(1e-6, 1, "sigmoid", gate_first=False, takes_none=False),
    ),
    "falcon_h1, gate first": (
        lambda: FalconH1RMSNormGated(48, n_groups=2, norm_before_gate=False),
        GatedRMSNormVariant(1e-6, 2, cast_first=False, squeezes=True),
    ),
}


@pytest.mark.parametrize("name", list(CLASSES))
def test_the_variant_of_each_class(name: str) -> None:
    make, expected = CLASSES[name]
    module = make()
    before = module.get_parameter("weight").detach().clone()
    assert GatedRMSNormLayout.unfit([module]) is None
    assert prove_gated_variant(module) == expected
    assert torch.equal(module.get_parameter("weight"), before)
    with torch.device("meta"):
        assert prove_gated_variant(make().to(torch.bfloat16)) == expected


class Other(MambaRMSNormGated):
    """Something else in each test."""


def _gelu(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    assert gate is not None
    return MambaRMSNormGated.forward(self, hidden_states * F.gelu(gate.float()))


def _rounded_gate(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    assert gate is not None
    return MambaRMSNormGated.forward(self, hidden_states * F.silu(gate))


def _rows_first(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    """As Mamba2's for two dimensions, and over another one for three."""
    if hidden_states.dim() == 3:
        hidden_states = hidden_states - hidden_states.mean(1, keepdim=True)
    return MambaRMSNormGated.forward(self, hidden_states, gate)


def _without_gradient(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    assert gate is not None
    return MambaRMSNormGated.forward(self, hidden_states, gate.detach())


def _in_training(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    return MambaRMSNormGated.forward(self, hidden_states, gate) * (2.0 if self.training else 1.0)


@pytest.mark.parametrize("forward", [_gelu, _rounded_gate, _rows_first, _without_gradient, _in_training])
def test_a_forward_that_is_another_one(forward: Callable[..., Any]) -> None:
    module = type("OtherRMSNormGated", (Other,), {"forward": forward})(48)
    reason = prove_gated_variant(module).why_not
    assert reason == ("its gradients are not those of its forward" if forward is _without_gradient else UNKNOWN)
    assert CpuFusedGatedRMSNorm.supports(GatedRMSNormLayout.patch([module])) == reason


def test_a_gate_that_the_class_multiplies_into_another_shape_is_refused() -> None:
    """Falcon-H1 drops the dimension of one token before the gate, which then spreads over the batch."""
    module = FalconH1RMSNormGated(48, norm_before_gate=True)
    assert prove_gated_variant(module).why_not == UNKNOWN
    assert prove_gated_variant(Qwen4ExpTextRMSNormGated(48, activation="gelu")).why_not == UNKNOWN


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x * residual


def test_structures_that_do_not_fit() -> None:
    assert GatedRMSNormLayout.unfit([LlamaRMSNorm(8)]) == "its forward takes hidden_states"
    assert GatedRMSNormLayout.unfit([_Named()]) == "its forward takes x and residual"
    bare, more, two = (MambaRMSNormGated(8) for _ in range(3))
    del bare.weight
    more.bias = nn.Parameter(torch.zeros(8))
    two.weight = nn.Parameter(torch.ones(2, 4))
    assert GatedRMSNormLayout.unfit([bare]) == "has no weight"
    assert GatedRMSNormLayout.unfit([more]) == "has other parameters than one weight"
    assert GatedRMSNormLayout.unfit([two]) == "its weight is not one-dimensional"
    assert prove_gated_variant(bare).why_not == "has no weight"


# --- the kernel -------------------------------------------------------------------------------------

_ACTIVATIONS: tuple[Literal["silu", "sigmoid"], ...] = ("silu", "sigmoid")
VARIANTS = [
    GatedRMSNormVariant(1e-6, num_groups, activation, gate_first, cast_first)
    for num_groups, activation, gate_first, cast_first in product((1, 3), _ACTIVATIONS, (True, False), (True, False))
]


def _label(variant: GatedRMSNormVariant) -> str:
    return f"{variant.num_groups} {variant.activation} {variant.gate_first} {variant.cast_first}"


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=_label)
def test_kernel_against_the_formula(variant: GatedRMSNormVariant, dtype: torch.dtype) -> None:
    weight = _random(48, dtype=dtype, seed=2)
    for shape in ((1, 48), (7, 48), (2, 5, 48)):
        hidden, gate = 3 * _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=1)
        before = hidden.clone(), gate.clone()
        for given in (gate, None):
            with torch.no_grad():
                found = gated_rms_norm_cpu(hidden, given, weight, variant)
            expected = gated_rms_norm_formula(hidden, given, weight, variant)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=1e-6)
            torch.testing.assert_close(
                gated_rms_norm_cpu(hidden, given, weight, variant), found, rtol=TOLERANCES[dtype], atol=1e-6
            )
        assert torch.equal(hidden, before[0])
        assert torch.equal(gate, before[1])


@pytest.mark.parametrize("variant", VARIANTS, ids=_label)
def test_gradients_against_the_formula(variant: GatedRMSNormVariant) -> None:
    x, gate, weight = (
        _random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(3, 48), (3, 48), (48,)])
    )
    upstream = _random(3, 48, seed=5)
    found = torch.autograd.grad(gated_rms_norm_cpu(x, gate, weight, variant), (x, gate, weight), upstream)
    expected = torch.autograd.grad(gated_rms_norm_formula(x, gate, weight, variant), (x, gate, weight), upstream)
    for one, two in zip(found, expected, strict=True):
        assert float(two.abs().max()) > 0.1
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(CLASSES))
def test_the_kernel_on_a_module_gives_what_stock_gives(name: str) -> None:
    module = CLASSES[name][0]()
    with torch.no_grad():
        module.get_parameter("weight").copy_(_random(48, seed=3))
    packed: Any = GatedRMSNormLayout.patch([module])
    assert CpuFusedGatedRMSNorm.supports(packed) is None
    for shape, dtype in product(((5, 48), (2, 5, 48), (4, 1, 48)), (torch.float32, torch.bfloat16)):
        hidden, gate = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=1)
        expected = packed.reference(hidden, gate)
        found = CpuFusedGatedRMSNorm.forward(packed, hidden, gate)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=1e-6)


def test_without_a_gate_the_stock_forward_decides() -> None:
    hidden = _random(3, 48)
    takes: Any = GatedRMSNormLayout.patch([MambaRMSNormGated(48)])
    torch.testing.assert_close(CpuFusedGatedRMSNorm.forward(takes, hidden), takes.reference(hidden))
    needs = GatedRMSNormLayout.patch([KimiLinearRMSNormGated(48)])
    with pytest.raises(AttributeError):  # as the stock class does
        CpuFusedGatedRMSNorm.forward(needs, hidden)


def test_a_gate_of_another_shape_goes_to_the_stock_forward() -> None:
    packed: Any = GatedRMSNormLayout.patch([MambaRMSNormGated(48)])
    hidden, gate = _random(2, 3, 48), _random(2, 1, 48, seed=1)
    assert torch.equal(CpuFusedGatedRMSNorm.forward(packed, hidden, gate), packed.reference(hidden, gate))


# --- live models ------------------------------------------------------------------------------------

_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, **_TOKENS}
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "mamba2": (
        lambda: Mamba2Config(
            **_SIZES, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, expand=2, chunk_size=4
        ),
        2,
    ),
    "nemotron_h": (
        lambda: NemotronHConfig(
            **_SIZES,
            **_ATTENTION,
            intermediate_size=48,
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=4,
        ),
        1,
    ),
    "qwen3_next": (
        lambda: Qwen3NextConfig(
            **_SIZES,
            **_ATTENTION,
            intermediate_size=48,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        1,
    ),
    "falcon_h1": (
        lambda: FalconH1Config(
            **_SIZES,
            **_ATTENTION,
            intermediate_size=48,
            num_hidden_layers=2,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_d_ssm=64,
            mamba_chunk_size=4,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
        ),
        2,
    ),
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS[name][0]())
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path:
                weight.add_(0.25 * _random(*weight.shape, seed=len(path)))
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_live_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, num_modules = _model(name), MODELS[name][1]
    expected = _logits(model)
    apply_kernel("cpu_fused_gated_rmsnorm", model=model)
    assert model.kconvert_report.to_dict()["kernels"] == {"cpu_fused_gated_rmsnorm": num_modules}
    calls: list[tuple[int, ...]] = []
    forward = CpuFusedGatedRMSNorm.forward

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(tuple(args[0].shape))
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(CpuFusedGatedRMSNorm, "forward", staticmethod(counted))
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)
    assert len(calls) == num_modules
    tokens = model.generate(IDS, max_new_tokens=3, do_sample=False)
    for module in model.modules():
        if is_patched(module):
            attach(module, Dispatch())  # the reference everywhere
    assert torch.equal(_logits(model), expected)
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), tokens)


def test_training_gives_the_stock_gradients() -> None:
    models = _model("nemotron_h"), _model("nemotron_h")
    apply_default_kernels(models[0], "cpu_fused_gated_rmsnorm")
    grads = []
    for model in models:
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)


def test_through_a_recipe(tmp_path: Path) -> None:
    _model("nemotron_h").save_pretrained(tmp_path / "source")
    patches = """  - kernel: [cuda_fused_gated_rmsnorm, npu_fused_gated_rmsnorm, cpu_fused_gated_rmsnorm]
    replace: {class: NemotronHRMSNormGated, path: "model.layers.0.mixer.norm"}
"""
    convert(write_recipe(tmp_path / "r.yaml", patches, model_type="nemotron_h"), tmp_path / "source", tmp_path / "out")
    facts = {"activation": "silu", "cast_first": True, "gate_first": True, "num_groups": 2}
    assert [patch.facts for patch in load_manifest(tmp_path / "out").patches] == [{"NemotronHRMSNormGated": facts}]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    assert torch.equal(_logits(load_converted(tmp_path / "out", kernels="reference").eval()), _logits(stock))
    model = load_converted(tmp_path / "out").eval()
    assert model.kconvert_report.to_dict()["kernels"] == {"cpu_fused_gated_rmsnorm": 1}
    torch.testing.assert_close(_logits(model), _logits(stock), rtol=0, atol=1e-5)
