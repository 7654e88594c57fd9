"""A kernel that raises at its first call: the reference takes its place, that is said, and nothing has happened twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from kconvert.errors import KernelUnavailableError
from kconvert.kernels import apply_kernel
from kconvert.kernels.ops.gated_mlp.cpu import CpuFusedSwiGLU
from kconvert.kernels.ops.qkv_proj.cpu import CpuFusedQKV
from kconvert.runtime import load_converted
from tests.support import tiny_model

IDS = torch.arange(1, 9).reshape(1, 8)


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3")


def failing(
    monkeypatch: pytest.MonkeyPatch, kernel: type, *, after: int = 0, error: Exception | None = None
) -> list[int]:
    """Makes the forward of a kernel raise from its call number `after` on; gives how often it was called."""
    calls = [0]
    forward = kernel.forward  # type: ignore[attr-defined]

    def raising(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise error or RuntimeError("no such instruction")
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(kernel, "forward", staticmethod(raising))
    return calls


@pytest.fixture(autouse=True)
def _always_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_the_reference_takes_its_place_for_good(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model(IDS).logits
    apply_kernel("cpu_fused_swiglu", model=model)
    calls = failing(monkeypatch, CpuFusedSwiGLU)
    with pytest.warns(
        UserWarning, match=r"'cpu_fused_swiglu' fails at its first call .*no such instruction.*reference"
    ):
        found = model(IDS).logits
    assert torch.equal(found, expected)
    count = calls[0]
    assert torch.equal(model(IDS).logits, expected)
    assert calls[0] == count == model.config.num_hidden_layers
    for module in model.kconvert_report.modules:
        assert (module.kernel, module.training_kernel) == ("reference", None)
        assert "fails at its first call" in module.selection.reasons()


def test_a_kernel_that_ran_once_is_believed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises later is the caller's business: memory, a wrong input."""
    apply_kernel("cpu_fused_swiglu", model=model)
    model(IDS)
    failing(monkeypatch, CpuFusedSwiGLU)
    with pytest.raises(RuntimeError, match="no such instruction"):
        model(IDS)
    assert {module.kernel for module in model.kconvert_report.modules} == {"cpu_fused_swiglu"}


def test_a_call_that_is_wrong_says_nothing_of_the_kernel(model: Any) -> None:
    apply_kernel("cpu_fused_swiglu", model=model)
    mlp = model.model.layers[0].mlp
    with pytest.raises(RuntimeError, match="shape"):
        mlp(torch.randn(2, 3))
    assert model.kconvert_report.modules[0].kernel == "cpu_fused_swiglu"


def test_too_little_memory_is_no_fault_of_the_kernel(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_kernel("cpu_fused_swiglu", model=model)
    failing(monkeypatch, CpuFusedSwiGLU, error=torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        model(IDS)
    assert model.kconvert_report.modules[0].kernel == "cpu_fused_swiglu"


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_is_as_before_when_the_reference_runs(model: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The kernel has put the keys into the cache, and then raises."""

    def cache() -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)

    def logits(past: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(part, past_key_values=past).logits for part in (IDS[:, :5], IDS[:, 5:6], IDS[:, 6:])]

    expected = logits(cache())
    apply_kernel("cpu_fused_qkv", model=model)
    forward = CpuFusedQKV.forward

    def raising(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward(module, *args, **kwargs)
        raise RuntimeError("too late")

    monkeypatch.setattr(CpuFusedQKV, "forward", staticmethod(raising))
    with pytest.warns(UserWarning, match="too late"):
        found = logits(cache())
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_gradients_flow_through_the_reference(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that a graph hangs on cannot be copied, and need not be."""
    apply_kernel("cpu_fused_qkv", model=model)
    failing(monkeypatch, CpuFusedQKV)
    with pytest.warns(UserWarning, match="no such instruction"):
        model(IDS, labels=IDS, use_cache=True).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def test_strict(converted_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_converted(converted_qwen3_dir, strict=True)
    failing(monkeypatch, CpuFusedSwiGLU)
    with pytest.raises(KernelUnavailableError, match="fails at its first call") as caught:
        model(IDS)
    assert isinstance(caught.value.__cause__, RuntimeError)
