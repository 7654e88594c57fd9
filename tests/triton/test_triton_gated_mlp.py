"""The CUDA kernels of the gated MLP, alone and behind its norm, beside the reference on real classes: eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, PixtralVisionConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.pixtral.modeling_pixtral import PixtralMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from kconvert.kernels.ops.gated_mlp.cuda import CudaFusedGeGLU, CudaFusedSwiGLU
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.ops.norm_gated_mlp.cuda import CudaFusedRMSNormSwiGLU
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from tests.support import tiny_config
from tests.triton.norm_checks import assert_near

HIDDEN, INNER = 32, 100
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _qwen3() -> nn.Module:
    return GatedMLPLayout.patch([Qwen3MLP(tiny_config("qwen3", hidden_size=HIDDEN, intermediate_size=INNER))])


def _gemma() -> nn.Module:
    return GatedMLPLayout.patch([GemmaMLP(GemmaConfig(hidden_size=HIDDEN, intermediate_size=INNER))])


def _pixtral() -> nn.Module:
    return GatedMLPLayout.patch([PixtralMLP(PixtralVisionConfig(hidden_size=HIDDEN, intermediate_size=INNER))])


def _normed_qwen3() -> nn.Module:
    config = tiny_config("qwen3", hidden_size=HIDDEN, intermediate_size=INNER)
    return NormGatedMLPLayout.patch([Qwen3RMSNorm(HIDDEN), Qwen3MLP(config)])


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "silu": (_qwen3, CudaFusedSwiGLU),
    "gelu_tanh": (_gemma, CudaFusedGeGLU),
    "gelu": (_pixtral, CudaFusedGeGLU),
    "norm and silu": (_normed_qwen3, CudaFusedRMSNormSwiGLU),
}


def _made(name: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """A patched module with weights of ordinary size, and its kernel."""
    build, kernel = CASES[name]
    module, generator = build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.to(device, dtype), kernel


def _run(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> list[Any]:
    """The result and every gradient."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(shape, generator=generator).to(weight).requires_grad_()
    module.zero_grad()
    found = forward(hidden)
    found.backward(torch.randn(found.shape, generator=generator).to(found))
    return [found, hidden.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("shape", [(1, 1, HIDDEN), (2, 5, HIDDEN)], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_the_kernel_is_near_the_reference(device: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module, kernel = _made(name, dtype, device)
    assert kernel.supports(module) is None
    expected = _run(module, module.reference, shape)
    found = _run(module, lambda hidden: kernel.forward(module, hidden), shape)
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert float(other.detach().abs().max()) > 0
        assert_near(one, other, TOLERANCES[dtype])
    with torch.no_grad():
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(expected[0])
        assert torch.equal(kernel.forward(module, hidden), found[0])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_compiled_is_near_eager(device: str, name: str, dtype: torch.dtype) -> None:
    module, kernel = _made(name, dtype, device)
    assert kernel.supports(module) is None
    backend = "inductor" if device == "cuda" else "eager"
    compiled = torch.compile(lambda hidden: kernel.forward(module, hidden), fullgraph=True, backend=backend)
    expected = _run(module, lambda hidden: kernel.forward(module, hidden), (2, 5, HIDDEN))
    for one, other in zip(_run(module, compiled, (2, 5, HIDDEN)), expected, strict=True):
        assert one.dtype == dtype
        assert_near(one, other, TOLERANCES[dtype])


def test_the_packed_projection_is_what_is_kept_for_the_backward(device: str) -> None:
    module, kernel = _made("silu", torch.float32, device)
    hidden = torch.randn(3, HIDDEN, device=device)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.shape[0] == 3:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernel.forward(module, hidden)
    assert sorted(kept) == [(3, HIDDEN), (3, INNER), (3, 2 * INNER)]


@pytest.mark.parametrize("child", ["gate_up_proj", "down_proj"])
def test_a_hook_on_a_projection_is_run(device: str, child: str) -> None:
    module, kernel = _made("silu", torch.float32, device)
    hidden = torch.randn(3, HIDDEN, device=device)
    with torch.no_grad():
        before = kernel.forward(module, hidden)
        module.get_submodule(child).register_forward_hook(lambda module, args, found: 2 * found)
        expected = module.down_proj(nn.functional.silu(module.gate_proj(hidden)) * module.up_proj(hidden))
        assert not torch.allclose(before, expected, rtol=1e-2)
        assert_near(kernel.forward(module, hidden), expected, 2e-6)
