"""Whole models with the CUDA kernels, chosen as users get them, beside the stock ones.

Where there is no GPU the kernels say that they are for the CPU, and run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kconvert.errors import KernelUnavailableError
from kconvert.kernels import apply_kernel
from kconvert.kernels.base import DeviceType
from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.rms_norm.cuda import CudaFusedRMSNorm
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout
from kconvert.kernels.registry import Registry
from kconvert.runtime import load_converted
from tests.devices.models import assert_close, patched
from tests.support import convert, save_tiny, tiny_model
from tests.triton.norm_checks import round_as_on_devices

GPU = torch.cuda.is_available()
IDS = torch.arange(1, 15).reshape(2, 7)
_LAYER = ("cuda_fused_decoder_layer", "cuda_fused_rmsnorm")
KERNELS: dict[Any, tuple[str, ...]] = {
    "qwen3": _LAYER,
    "gemma2": _LAYER,
    "qwen3_moe": ("cuda_fused_rmsnorm", "cuda_fused_qkv", "cuda_fused_moe", "cuda_fused_router"),
    "deepseek_v3": ("cuda_fused_rmsnorm", "cuda_fused_swiglu", "cuda_fused_moe", "cuda_fused_router"),
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_on_devices(monkeypatch)
    if GPU:
        return
    for kernel in Registry.catalog().values():
        if issubclass(kernel, CudaKernel):
            monkeypatch.setattr(kernel, "_device", DeviceType.CPU)


def kernels_of(model: Any) -> dict[str, int]:
    found: dict[str, int] = model.kconvert_report.to_dict()["kernels"]
    return found


@pytest.fixture(params=list(KERNELS))
def pair(request: pytest.FixtureRequest, device: str) -> tuple[Any, Any]:
    """A stock model and its patched copy."""
    stock = tiny_model(request.param).to(device)
    return stock, patched(stock, KERNELS[request.param])


def test_every_module_runs_a_cuda_kernel(pair: tuple[Any, Any]) -> None:
    _, model = pair
    assert all(name.startswith("cuda_") for name in kernels_of(model))
    assert len(kernels_of(model)) >= 3


def test_prefill_and_what_is_recorded(pair: tuple[Any, Any], device: str) -> None:
    stock, model = pair
    for each in pair:
        each.set_attn_implementation("eager")  # which alone gives its weights
    with torch.no_grad():
        found, expected = (
            each(IDS.to(device), output_hidden_states=True, output_attentions=True) for each in (model, stock)
        )
    assert_close(found.logits, expected.logits)
    assert len(found.hidden_states) == len(expected.hidden_states) == stock.config.num_hidden_layers + 1
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_close(one, other)
    assert len(found.attentions) == stock.config.num_hidden_layers
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(pair: tuple[Any, Any], checkpointing: bool, device: str) -> None:
    stock, model = pair
    for each in pair:
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        each(IDS.to(device), labels=IDS.to(device), use_cache=False).loss.backward()
    theirs = {name: weight.grad for name, weight in stock.named_parameters()}
    compared = 0
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        if name in theirs:
            assert_close(weight.grad, theirs[name], 1e-4)
            compared += 1
        elif "qkv_proj" in name:
            parts = [theirs[name.replace("qkv_proj", f"{part}_proj")] for part in "qkv"]
            assert_close(weight.grad, torch.cat(parts), 1e-4)
            compared += 1
        elif "gate_up_proj" in name:
            parts = [theirs[name.replace("gate_up_proj", f"{part}_proj")] for part in ("gate", "up")]
            assert_close(weight.grad, torch.cat(parts), 1e-4)
            compared += 1
    assert compared == len(list(model.parameters()))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(pair: tuple[Any, Any], cache: str, device: str) -> None:
    """With a static cache on a GPU transformers compiles the forward, which then has CUDA graphs."""
    if cache == "static" and not GPU:
        pytest.skip("transformers compiles on accelerators only")
    torch._dynamo.reset()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = IDS[:1].to(device)  # one row: its projections run by a kernel of their own
    stock, model = (each.generate(ids, cache_implementation=cache, **options) for each in pair)
    assert model.shape == (1, 13)
    assert torch.equal(model, stock)


def test_compiled_is_eager(pair: tuple[Any, Any], device: str) -> None:
    _, model = pair
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="inductor" if GPU else "eager")
    with torch.no_grad():
        found, expected = (each(IDS.to(device), use_cache=False).logits for each in (compiled, model))
    assert_close(found, expected)


def test_a_loaded_model(tmp_path: Path, device: str) -> None:
    """From a shipped recipe, in bfloat16, and saved back."""
    source = save_tiny(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    convert("qwen3", source, tmp_path / "out")
    model: Any = load_converted(tmp_path / "out", strict=True).to(device)
    reference: Any = load_converted(tmp_path / "out", kernels="reference").to(device)
    assert {"cuda_fused_rmsnorm", "cuda_fused_qkv", "cuda_fused_swiglu"} <= kernels_of(model).keys()
    with torch.no_grad():
        found, expected = (each(IDS.to(device)).logits.float() for each in (model, reference))
    assert_close(found, expected, 2e-2)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size > 1000


@pytest.mark.skipif(not GPU, reason="needs two devices")
def test_a_layer_on_the_cpu_uses_the_cpu_kernel() -> None:
    stock = tiny_model("qwen3").to("cuda")
    model = patched(stock, KERNELS["qwen3"])
    mlp = model.model.layers[1].mlp.to("cpu")
    hidden = torch.randn(2, 3, stock.config.hidden_size)
    expected = stock.model.layers[1].mlp(hidden.to("cuda")).cpu()
    assert_close(mlp(hidden), expected)
    runs = {module.path: module.kernel for module in model.kconvert_report.modules}
    assert runs["model.layers.1.mlp"] == "cpu_fused_swiglu"
    assert runs["model.layers.0.mlp"] == "cuda_fused_swiglu"


def test_a_kernel_without_a_backward_is_not_used_under_grad(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(CudaFusedRMSNorm, "has_backward", False)
    model = copy.deepcopy(tiny_model("llama").to(device))
    apply_kernel("cuda_fused_rmsnorm", model=model)
    called: list[bool] = []
    forward = CudaFusedRMSNorm.forward

    def noting(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        called.append(torch.is_grad_enabled())
        return forward(module, hidden)

    monkeypatch.setattr(CudaFusedRMSNorm, "forward", staticmethod(noting))
    with torch.no_grad():
        model(IDS.to(device))
    assert called == [False] * 5
    model(IDS.to(device), labels=IDS.to(device)).loss.backward()
    assert called == [False] * 5
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_kernel_that_raises_is_an_error_where_it_may_not_give_way(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def fails(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    model = patched(tiny_model("llama").to(device), ("cuda_fused_rmsnorm",))
    monkeypatch.setattr(CudaFusedRMSNorm, "forward", staticmethod(fails))
    with torch.no_grad(), pytest.raises(KernelUnavailableError, match="no kernel image is available"):
        model(IDS.to(device))
    for module in model.modules():
        if is_patched(module):
            module.kconvert_dispatch.strict = False
    with torch.no_grad(), pytest.warns(UserWarning, match="no kernel image is available"):
        model(IDS.to(device))
    assert set(kernels_of(model)) == {"reference"}
    said = " ".join(str(model.kconvert_report).split())
    assert "fails at its first call (RuntimeError: no kernel image is available)" in said


@pytest.mark.parametrize(
    ("cls", "weight", "hidden", "eps", "expected"),
    [
        (GemmaRMSNorm, [0.0, 0.0], [3.0, 4.0], 1e-6, [0.8485, 1.1314]),
        (LlamaRMSNorm, [0.0, 0.0], [3.0, 4.0], 1e-6, [0.0, 0.0]),
        (LlamaRMSNorm, [1.0, 1.0], [3e-3, 4e-3], 1e-5, [0.6325, 0.8433]),
        (LlamaRMSNorm, [1.0, 1.0], [3e-3, 4e-3], 1e-6, [0.8165, 1.0887]),
    ],
)
def test_norms_by_value(
    cls: Any, weight: list[float], hidden: list[float], eps: float, expected: list[float], device: str
) -> None:
    norm = cls(2, eps=eps).to(device)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(weight))
        packed = RMSNormLayout.patch([norm])
        assert CudaFusedRMSNorm.supports(packed) is None
        found = CudaFusedRMSNorm.forward(packed, torch.tensor(hidden, device=device))
    torch.testing.assert_close(found.cpu(), torch.tensor(expected), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("cls", "weight", "expected"),
    [
        (GemmaRMSNorm, -0.4921875, [0.431640625, 0.57421875]),
        (LlamaRMSNorm, 1 - 0.4921875, [0.4296875, 0.57421875]),
    ],
)
def test_the_place_of_the_cast_by_value(cls: Any, weight: float, expected: list[float], device: str) -> None:
    norm = cls(2, eps=1e-6).to(device, torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(weight)
        packed = RMSNormLayout.patch([norm])
        assert CudaFusedRMSNorm.supports(packed) is None
        found = CudaFusedRMSNorm.forward(packed, torch.tensor([3.0, 4.0], device=device, dtype=torch.bfloat16))
    assert found.tolist() == expected
