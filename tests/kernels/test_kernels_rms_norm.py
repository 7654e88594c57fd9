"""RMSNorm: which variant a class computes, by value and by proof, and the CPU kernel against its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaWeightlessRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.hy_v4.modeling_hy_v4 import HYV4UnweightedRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kconvert.kernels.ops.rms_norm.cpu import CpuFusedRMSNorm, rms_norm_cpu
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, RMSNormVariant, prove_variant, rms_norm_formula

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    # against the same arithmetic in plain torch: one rounding of the result in the narrow types
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
}
SHAPES = [(1, 1, 7), (3, 577), (2, 5, 2048)]
VARIANTS = {
    "llama": RMSNormVariant(1e-6, 0.0, True),
    "gemma": RMSNormVariant(1e-6, 1.0, False),
    "olmo2": RMSNormVariant(1e-6, 0.0, False),
    "shifted llama": RMSNormVariant(1e-6, 1.0, True),
}


def _norm(cls: Any, weight: list[float], *, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> Any:
    module = cls(len(weight), eps=eps).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight))
    return module


def _run(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The CPU kernel on the patched module."""
    patched = RMSNormLayout.patch([module])
    assert CpuFusedRMSNorm.supports(patched) is None
    with torch.no_grad():
        return CpuFusedRMSNorm.forward(patched, hidden)


# --- by value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm])
def test_one_plus_weight(cls: Any) -> None:
    found = _run(_norm(cls, [0.0, 0.0]), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(found, torch.tensor([0.8485, 1.1314]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Qwen3RMSNorm, Gemma3nRMSNorm, T5LayerNorm, Olmo2RMSNorm])
def test_plain_weight(cls: Any) -> None:
    assert _run(_norm(cls, [0.0, 0.0]), torch.tensor([3.0, 4.0])).tolist() == [0.0, 0.0]
    found = _run(_norm(cls, [1.0, 2.0]), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(found, torch.tensor([0.8485, 2.2627]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, [0.6325, 0.8433]), (1e-6, [0.8165, 1.0887])])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
def test_eps_is_that_of_the_instance_and_inside_the_root(cls: Any, eps: float, expected: list[float]) -> None:
    weight = [0.0, 0.0] if cls is GemmaRMSNorm else [1.0, 1.0]
    found = _run(_norm(cls, weight, eps=eps), torch.tensor([3e-3, 4e-3]))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=5e-5)


def test_cast_after_the_multiply() -> None:
    module = _norm(GemmaRMSNorm, [-0.4921875, -0.4921875], dtype=torch.bfloat16)
    found = _run(module, torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [0.431640625, 0.57421875]


def test_cast_before_the_multiply() -> None:
    module = _norm(LlamaRMSNorm, [1 - 0.4921875] * 2, dtype=torch.bfloat16)
    found = _run(module, torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [0.4296875, 0.57421875]


# --- by proof ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "offset", "cast_first"),
    [
        (LlamaRMSNorm, 0.0, True),
        (Qwen3RMSNorm, 0.0, True),
        (T5LayerNorm, 0.0, True),
        (GemmaRMSNorm, 1.0, False),
        (Gemma2RMSNorm, 1.0, False),
        (Gemma3RMSNorm, 1.0, False),
        (Qwen3NextRMSNorm, 1.0, False),
        (Gemma3nRMSNorm, 0.0, False),
        (Olmo2RMSNorm, 0.0, False),
    ],
)
@pytest.mark.parametrize("size", [8, 577])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-12])
def test_the_variant_of_each_class(cls: Any, offset: float, cast_first: bool, size: int, eps: float) -> None:
    module = cls(size, eps=eps)
    before = module.weight.detach().clone()
    assert prove_variant(module) == RMSNormVariant(eps, offset, cast_first, mixes=cls is not T5LayerNorm)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, Olmo2RMSNorm])
def test_a_float32_weight_and_a_bfloat16_input_give_what_stock_gives(cls: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    module = cls(577, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(577, generator=generator))
    hidden = torch.randn(3, 577, generator=generator).to(torch.bfloat16)
    expected = module(hidden)
    found = CpuFusedRMSNorm.forward(RMSNormLayout.patch([module]), hidden)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if cls is T5LayerNorm else 2e-2)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_the_variant_does_not_depend_on_the_weights(cls: Any, value: float) -> None:
    module = cls(8, eps=1e-6)
    with torch.no_grad():
        module.weight.fill_(value)
    assert prove_variant(module) == prove_variant(cls(8, eps=1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_on_meta_or_in_another_dtype_is_proven_too(dtype: torch.dtype) -> None:
    expected = RMSNormVariant(1e-6, 1.0, False)
    assert prove_variant(GemmaRMSNorm(8, eps=1e-6).to(dtype)) == expected
    with torch.device("meta"):
        module = GemmaRMSNorm(8, eps=1e-6)
    assert prove_variant(module) == expected


class Base(nn.Module):
    """Llama's norm, with everything about eps left to the subclass."""

    used_eps: float = 1e-6

    def __init__(self, size: int = 8, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm_formula(hidden_states, self.weight, eps=self.used_eps, offset=0.0, cast_first=True)


@pytest.mark.parametrize("name", ["eps", "variance_epsilon", "epsilon"])
def test_eps_under_any_of_its_names(name: str) -> None:
    attributes: dict[str, Any] = {name: 1e-6}
    module = Base(**attributes)
    assert RMSNormLayout.unfit([module]) is None
    assert prove_variant(module) == RMSNormVariant(1e-6, 0.0, True)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({}, "no eps"),
        ({"eps": None}, "eps is None"),
        ({"variance_epsilon": None}, "eps is None"),
        ({"eps": True}, "eps is True"),
        ({"eps": "1e-6"}, "eps is '1e-6'"),
        ({"eps": 1e-6, "variance_epsilon": 1e-5}, "several values"),
    ],
)
def test_an_unknown_eps_is_left_alone_with_its_reason(attributes: dict[str, Any], said: str) -> None:
    module = Base(**attributes)
    assert said in str(RMSNormLayout.unfit([module]))
    variant = prove_variant(module)
    assert said in str(variant.why_not)
    assert said in str(CpuFusedRMSNorm.supports(RMSNormLayout.patch([module])))


def test_an_eps_that_the_forward_does_not_use_is_found_out() -> None:
    module = Base(eps=1e-5)
    assert prove_variant(module).why_not == "its forward is no known RMSNorm variant"


def _scaled(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return 2.0 * Base.forward(self, hidden_states)


def _clamped(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return Base.forward(self, hidden_states).clamp(-1, 1)


def _outside_root(self: Any, hidden_states: torch.Tensor) -> Any:
    wide = hidden_states.float()
    return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(hidden_states.dtype)


def _centred(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return Base.forward(self, hidden_states - hidden_states.mean(-1, keepdim=True))


def _float32(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return Base.forward(self, hidden_states).float()


def _pair(self: Any, hidden_states: torch.Tensor) -> Any:
    return Base.forward(self, hidden_states), hidden_states


@pytest.mark.parametrize(
    "forward", [_scaled, _clamped, _outside_root, _centred, _float32, _pair], ids=lambda f: f.__name__
)
def test_a_forward_that_is_another_one(forward: Callable[..., Any]) -> None:
    module = type("OtherRMSNorm", (Base,), {"forward": forward})(eps=1e-6)
    assert prove_variant(module).why_not == "its forward is no known RMSNorm variant"


@pytest.mark.parametrize("cls", [MambaRMSNormGated, Qwen3NextRMSNormGated])
def test_a_gated_norm_is_no_plain_norm(cls: Any) -> None:
    module = cls(8, eps=1e-6)
    assert RMSNormLayout.unfit([module]) == "its forward takes hidden_states and gate"
    assert prove_variant(module).why_not == "its forward takes hidden_states and gate"
    hidden, gate = torch.randn(3, 8), torch.randn(3, 8)
    expected = module(hidden, gate)
    assert torch.equal(RMSNormLayout.patch([module])(hidden, gate), expected)


def _buffered(self: Any, hidden_states: torch.Tensor) -> Any:
    return Base.forward(self, hidden_states) * self.scale.to(hidden_states.dtype)


def test_a_buffer_that_happens_to_change_nothing_is_found_out() -> None:
    module = type("OtherRMSNorm", (Base,), {"forward": _buffered})(eps=1e-6)
    module.register_buffer("scale", torch.ones(8))
    assert prove_variant(module).why_not == "its forward is no known RMSNorm variant"
    assert torch.equal(module.scale, torch.ones(8))
    idle = FalconMambaWeightlessRMSNorm(8)  # has a buffer that it does not read
    assert prove_variant(idle) == RMSNormVariant(1e-6, has_weight=False)


@pytest.mark.parametrize("where", ["inference mode", "no grad", "default dtype", "default device"])
def test_the_proof_does_not_depend_on_where_it_is_asked_for(where: str) -> None:
    module = type("FreshRMSNorm", (LlamaRMSNorm,), {})(8)  # of which nothing is known yet
    contexts: dict[str, Any] = {
        "inference mode": torch.inference_mode(),
        "no grad": torch.no_grad(),
        "default dtype": nullcontext(),
        "default device": torch.device("meta"),
    }
    torch.set_default_dtype(torch.bfloat16 if where == "default dtype" else torch.float32)
    try:
        with contexts[where]:
            assert prove_variant(module) == RMSNormVariant(1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def _detached(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return Base.forward(self, hidden_states.detach())


def test_a_forward_without_its_gradients_is_found_out() -> None:
    module = type("OtherRMSNorm", (Base,), {"forward": _detached})(eps=1e-6)
    assert prove_variant(module).why_not == "its gradients are not those of its forward"


@pytest.mark.parametrize("make", [Llama4TextL2Norm, lambda: Gemma4RMSNorm(8, with_scale=False)])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_a_norm_without_a_weight(make: Callable[[], Any], dtype: torch.dtype) -> None:
    module = make()
    assert RMSNormLayout.unfit([module]) is None
    assert prove_variant(module) == RMSNormVariant(1e-6, has_weight=False)
    hidden = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, found = module(hidden), _run(module, hidden)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("cls", [DeepseekV4UnweightedRMSNorm, HYV4UnweightedRMSNorm])
def test_what_is_no_norm_without_a_weight(cls: Any) -> None:
    assert RMSNormLayout.unfit([cls()]) is None
    assert prove_variant(cls()).why_not == "its forward is no known RMSNorm variant"
    assert RMSNormLayout.unfit([nn.Dropout()]) == "has no eps"


def test_modules_of_another_structure() -> None:
    assert RMSNormLayout.unfit([nn.LayerNorm(8)]) == "has other parameters than one weight"
    assert RMSNormLayout.unfit([OlmoLayerNorm(8)]) == "has no eps"
    assert RMSNormLayout.unfit([nn.Linear(8, 8, bias=False)]) == "its weight is not one-dimensional"
    assert prove_variant(OlmoLayerNorm(8)).why_not is not None


# --- the kernel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_kernel_against_the_formula(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(shape, generator=generator)).to(dtype)
    weight, variant = torch.randn(shape[-1], generator=generator).to(dtype), VARIANTS[name]
    before = hidden.clone()
    formula = partial(rms_norm_formula, eps=variant.eps, offset=variant.offset, cast_first=variant.cast_first)
    for given in (weight, weight.float(), None):
        expected = formula(hidden, given)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = rms_norm_cpu(hidden, given, variant)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert torch.equal(hidden, before)
    assert formula(hidden, weight).dtype == dtype


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weight_under_narrow_inputs_gives_the_stock_dtype(cls: Any, dtype: torch.dtype) -> None:
    module = _norm(cls, [0.5, -0.25, 1.0, 2.0])
    hidden = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=dtype)
    expected = module(hidden).detach()
    found = _run(module, hidden)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-6 if expected.dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gradients_against_the_formula(name: str, shape: tuple[int, ...]) -> None:
    variant, generator = VARIANTS[name], torch.Generator().manual_seed(0)
    weight, values, upstream = (torch.randn(size, generator=generator) for size in (shape[-1], shape, shape))
    grads = []
    formula = partial(rms_norm_formula, eps=variant.eps, offset=variant.offset, cast_first=variant.cast_first)
    for run in (partial(rms_norm_cpu, variant=variant), formula):
        x, w = values.clone().requires_grad_(), weight.clone().requires_grad_()
        (run(x, w) * upstream).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert float(x.grad.abs().max()) > 0
        assert float(w.grad.abs().max()) > 0
        grads.append((x.grad, w.grad))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_empty_and_strided_inputs() -> None:
    variant, weight = VARIANTS["llama"], torch.ones(6)
    assert rms_norm_cpu(torch.zeros(0, 6), weight, variant).shape == (0, 6)
    wide = torch.randn(4, 12)
    strided = wide[:, ::2]
    with torch.no_grad():
        assert rms_norm_cpu(torch.zeros(0, 6), weight, variant).shape == (0, 6)
        torch.testing.assert_close(
            rms_norm_cpu(strided, weight, variant), rms_norm_cpu(strided.contiguous(), weight, variant)
        )


def test_zeros_stay_zeros() -> None:
    for variant, grad in product(VARIANTS.values(), (False, True)):
        with torch.set_grad_enabled(grad):
            assert not rms_norm_cpu(torch.zeros(2, 6), torch.ones(6), variant).any()
