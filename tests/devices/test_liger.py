"""Liger's functions behind our layouts: what they are given, here by stand-ins, and on a GPU what they compute."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from kconvert.kernels import liger as liger_kernels
from kconvert.kernels.assign import layout_kernels, load_layout
from kconvert.kernels.base import DeviceType
from kconvert.kernels.device import device_reason
from kconvert.kernels.ops.gated_mlp import liger as gated_mlp
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.ops.rms_norm import liger as rms_norm
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, rms_norm_formula
from kconvert.kernels.registry import Registry, check_deps_reason
from tests.devices.test_devices import randomised
from tests.triton.norm_checks import assert_near

HAS_LIGER = torch.cuda.is_available() and find_spec("liger_kernel") is not None
IDS = ("liger_rmsnorm", "liger_swiglu", "liger_geglu")


@pytest.mark.parametrize("kernel_id", IDS)
def test_they_are_for_who_asks(kernel_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = Registry.catalog()[kernel_id]
    assert not kernel.default
    assert kernel.device() is DeviceType.CUDA
    first = next(iter(layout_kernels(kernel.layout)))
    assert first != kernel_id
    missing = device_reason(DeviceType.CUDA)
    if missing is not None:
        assert check_deps_reason(kernel) == missing
    monkeypatch.setattr(kernel, "_device", DeviceType.CPU)
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: None)
    assert check_deps_reason(kernel) == "liger-kernel is not installed: pip install liger-kernel"
    monkeypatch.setattr(liger_kernels, "find_spec", lambda name: object())
    assert check_deps_reason(kernel) is None


@pytest.mark.parametrize(
    ("norm", "given"),
    [
        (LlamaRMSNorm(33, eps=1e-5), (1e-5, 0.0, "llama", False)),
        (GemmaRMSNorm(33, eps=1e-6), (1e-6, 1.0, "gemma", False)),
        (Gemma3nRMSNorm(33, eps=1e-6), (1e-6, 0.0, "gemma", False)),
    ],
)
def test_norms_are_given_the_variant(norm: Any, given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def function(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(others)
        eps, offset, mode, _ = others
        return rms_norm_formula(x, weight, eps=eps, offset=offset, cast_first=mode == "llama")

    monkeypatch.setattr(rms_norm, "_device_code", lambda: function)
    norm = randomised(norm)
    x = torch.randn(2, 5, 33)
    expected = norm(x)
    packed = RMSNormLayout.patch([norm])
    assert rms_norm.LigerRMSNorm.supports(packed) is None
    assert_near(rms_norm.LigerRMSNorm.forward(packed, x), expected, 1e-6)
    assert calls == [given]
    for other in (x[:0], x.bfloat16()):
        rms_norm.LigerRMSNorm.forward(packed, other)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("activation", "kernel", "function"),
    [
        ("silu", gated_mlp.LigerSwiGLU, F.silu),
        ("gelu_pytorch_tanh", gated_mlp.LigerGeGLU, lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gated_mlps_are_given_the_halves(
    activation: str, kernel: Any, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_mlp, "_device_code", lambda name: lambda gate, up: function(gate) * up)
    mlp = randomised(Qwen3MLP(Qwen3Config(hidden_size=24, intermediate_size=36, hidden_act=activation)))
    x = torch.randn(2, 5, 24)
    expected, nothing = mlp(x), mlp(x[:0])
    packed = GatedMLPLayout.patch([mlp])
    assert kernel.supports(packed) is None
    assert_near(kernel.forward(packed, x), expected, 1e-6)
    assert kernel.forward(packed, x[:0]).shape == nothing.shape


def test_the_exact_gelu_is_not_ligers() -> None:
    mlp = GatedMLPLayout.patch([Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=12, hidden_act="gelu"))])
    assert gated_mlp.LigerGeGLU.supports(mlp) == "its activation is gelu, not gelu_tanh"


@pytest.mark.skipif(not HAS_LIGER, reason="needs a GPU and liger-kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma", "silu", "gelu_pytorch_tanh"])
def test_what_liger_computes(name: str, dtype: torch.dtype) -> None:
    norms = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm}
    if name in norms:
        stock, layout, kernel_id, size = norms[name](96), "rms_norm", "liger_rmsnorm", 96
    else:
        config = Qwen3Config(hidden_size=24, intermediate_size=36, hidden_act=name)
        kernel_id = "liger_swiglu" if name == "silu" else "liger_geglu"
        stock, layout, size = Qwen3MLP(config), "gated_mlp", 24
    stock = randomised(stock).to("cuda", dtype)
    x = torch.randn(2, 5, size, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(2, 5, size, device="cuda", dtype=dtype)
    expected = stock(x)
    expected.backward(upstream)
    wanted, x.grad = x.grad, None
    found_layout: Any = load_layout(layout)
    kernel = layout_kernels(found_layout)[kernel_id]
    packed = found_layout.patch([stock])
    assert kernel.supports(packed) is None
    kept = upstream.clone()
    found = kernel.forward(packed, x)
    found.backward(upstream)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert_near(found, expected, tolerance)
    assert_near(x.grad, wanted, tolerance)
    assert torch.equal(upstream, kept)
