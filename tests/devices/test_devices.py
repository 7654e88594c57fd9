"""Norms, gated MLPs, rotations and experts of every device beside float64, with one table of tolerances for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from kconvert.kernels.assign import layout_kernels, load_layout
from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.ops.rope import fused
from kconvert.kernels.rotation import HeadNorms, Rotation
from tests.triton.norm_checks import assert_near

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value: of the narrow types two steps, because parts are rounded in between, and a cast may come first."""
DTYPES = list(TOLERANCES)


def kernel_of(family: str, layout: str, kernel_id: str) -> tuple[type[Any], type[LayoutKernel]]:
    """A layout, and the kernel that a device has for it."""
    found: Any = load_layout(layout)
    return found, layout_kernels(found)[f"{family}_{kernel_id}"]


def randomised(module: nn.Module, scale: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return module


def check(
    stock: nn.Module,
    family: str,
    layout: str,
    kernel_id: str,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Forward and gradients of the first input and the parameters against the stock module in float64.

    A kernel without a backward is looked at without gradients.
    """
    found_layout, kernel = kernel_of(family, layout, kernel_id)
    narrow = copy.deepcopy(stock).to(device, dtype)
    wide = copy.deepcopy(narrow).to("cpu", torch.float64)
    packed = found_layout.patch([narrow])
    assert kernel.supports(packed) is None
    first = inputs[0].to(device, dtype).requires_grad_(kernel.has_backward)
    others = [each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in inputs[1:]]
    leaf = first.detach().double().cpu().requires_grad_(kernel.has_backward)
    wide_others = [each.cpu().double() if each.is_floating_point() else each.cpu() for each in others]
    with torch.set_grad_enabled(kernel.has_backward):
        found = kernel.forward(packed, first, *others)
        expected = wide(leaf, *wide_others)
    assert found.dtype == dtype
    assert_near(found.cpu(), expected, TOLERANCES[dtype])
    if not kernel.has_backward:
        return
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found.backward(upstream.to(device, dtype))
    expected.backward(upstream.to(dtype).double())
    assert first.grad is not None
    assert leaf.grad is not None
    assert_near(first.grad.cpu(), leaf.grad, 2 * TOLERANCES[dtype])
    theirs = dict(wide.named_parameters())
    for name, weight in packed.named_parameters():
        stored = name.removesuffix("_transposed")
        parts = (
            [stored] if stored in theirs else [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        )
        gradients: list[Any] = [theirs[part].grad for part in parts]
        gradient = torch.cat(gradients) if name == stored else torch.cat(gradients).transpose(1, 2)
        assert weight.grad is not None
        assert_near(weight.grad.cpu(), gradient, 2 * TOLERANCES[dtype])


def _without_weight() -> nn.Module:
    return Gemma3nRMSNorm(33, with_scale=False)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: randomised(LlamaRMSNorm(33, eps=1e-5)),
    "gemma, 1 + weight": lambda: randomised(GemmaRMSNorm(33, eps=1e-6)),
    "gemma3n": lambda: randomised(Gemma3nRMSNorm(33, eps=1e-6)),
    "no weight": _without_weight,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 33), (5, 33), (2, 3, 33), (2, 3, 4, 33)], ids=str)
@pytest.mark.parametrize("name", list(NORMS))
def test_norms(family: str, device: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    check(NORMS[name](), family, "rms_norm", "fused_rmsnorm", [x], dtype, device)


GATED: dict[str, Callable[[], nn.Module]] = {
    "mamba, gate first": lambda: randomised(MambaRMSNormGated(36, eps=1e-5)),
    "qwen3 next, gate last": lambda: randomised(Qwen3NextRMSNormGated(36, eps=1e-6)),
    "zamba2, in groups": lambda: randomised(Zamba2RMSNormGated(36, group_size=12, eps=1e-5)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 36), (2, 3, 36)], ids=str)
@pytest.mark.parametrize("name", list(GATED))
def test_gated_norms(family: str, device: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, gate = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    check(GATED[name](), family, "gated_rms_norm", "fused_gated_rmsnorm", [x, gate], dtype, device)


@pytest.mark.parametrize("shape", [(33,), (0, 33), (2, 0, 33)], ids=str)
def test_norms_of_few_dimensions_and_of_nothing(family: str, device: str, shape: tuple[int, ...]) -> None:
    found, kernel = kernel_of(family, "rms_norm", "fused_rmsnorm")
    norm = NORMS["gemma, 1 + weight"]().to(device)
    x = torch.randn(shape, device=device)
    expected = norm(x)
    packed = found.patch([norm])
    assert kernel.supports(packed) is None
    assert_near(kernel.forward(packed, x), expected, 5e-6)


@pytest.mark.parametrize(
    ("cls", "weight", "expected"),
    [(GemmaRMSNorm, [0.0, 0.0], [0.8485, 1.1314]), (LlamaRMSNorm, [1.0, 2.0], [0.8485, 2.2627])],
)
def test_norms_by_value(family: str, device: str, cls: Any, weight: list[float], expected: list[float]) -> None:
    found, kernel = kernel_of(family, "rms_norm", "fused_rmsnorm")
    norm = cls(2, eps=1e-6).to(device)
    norm.weight.data.copy_(torch.tensor(weight))
    packed = found.patch([norm])
    assert kernel.supports(packed) is None
    with torch.no_grad():
        made = kernel.forward(packed, torch.tensor([[3.0, 4.0]], device=device))
    torch.testing.assert_close(made.cpu(), torch.tensor([expected]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("family", "cls", "weight", "expected"),
    [(family, GemmaRMSNorm, -0.4921875, [0.431640625, 0.57421875]) for family in ("cuda", "npu", "cpu")]
    # the operator of NPUs has no cast before the multiply, so what is cast first differs by a rounding there
    + [(family, LlamaRMSNorm, 0.5078125, [0.4296875, 0.57421875]) for family in ("cuda", "cpu")],
    indirect=["family"],
)
def test_where_the_cast_is(family: str, device: str, cls: Any, weight: float, expected: list[float]) -> None:
    """In float32 until after the multiply, or not."""
    found, kernel = kernel_of(family, "rms_norm", "fused_rmsnorm")
    norm = cls(2, eps=1e-6).to(device, torch.bfloat16)
    norm.weight.data.fill_(weight)
    packed = found.patch([norm])
    assert kernel.supports(packed) is None
    with torch.no_grad():
        made = kernel.forward(packed, torch.tensor([[3.0, 4.0]], device=device, dtype=torch.bfloat16))
    assert made.cpu().tolist() == [expected]


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, [0.6325, 0.8433]), (1e-6, [0.8165, 1.0887])])
def test_eps_is_that_of_the_instance(family: str, device: str, eps: float, expected: list[float]) -> None:
    found, kernel = kernel_of(family, "rms_norm", "fused_rmsnorm")
    packed = found.patch([LlamaRMSNorm(2, eps=eps).to(device)])
    assert kernel.supports(packed) is None
    with torch.no_grad():
        made = kernel.forward(packed, torch.tensor([[3e-3, 4e-3]], device=device))
    torch.testing.assert_close(made.cpu(), torch.tensor([expected]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "kernel"),
    [("silu", "fused_swiglu"), ("gelu", "fused_geglu"), ("gelu_pytorch_tanh", "fused_geglu")],
)
def test_gated_mlps(family: str, device: str, activation: str, kernel: str, dtype: torch.dtype) -> None:
    config = Qwen3Config(hidden_size=24, intermediate_size=36, hidden_act=activation)
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    check(randomised(Qwen3MLP(config), 0.2), family, "gated_mlp", kernel, [x], dtype, device)


def test_a_kernel_of_another_activation_is_refused(family: str) -> None:
    found, swiglu = kernel_of(family, "gated_mlp", "fused_swiglu")
    _, geglu = kernel_of(family, "gated_mlp", "fused_geglu")
    for activation, right, other in (("silu", swiglu, geglu), ("gelu", geglu, swiglu), ("relu", None, swiglu)):
        mlp = found.patch([Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=12, hidden_act=activation))])
        assert "its activation is" in str(other.supports(mlp)) or "is not down" in str(other.supports(mlp))
        assert right is None or right.supports(mlp) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("family", ["cuda", "npu"], indirect=True)
def test_rotations(family: str, device: str, axis: int, is_normed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2))
    if axis == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = torch.rand(1, 5, 8, generator=generator, dtype=torch.float64) * 6
    cos, sin = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    scale = torch.rand(16, generator=generator, dtype=torch.float64) + 0.5
    q, k, cos, sin, scale = (each.to(dtype).double() for each in (q, k, cos, sin, scale))
    expected = [q, k]
    if is_normed:
        expected = [each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + 2.0**-20) * scale for each in expected]
    expected = apply_rotary_pos_emb(*expected, cos, sin, unsqueeze_dim=axis)
    rotation, norms = Rotation(16), HeadNorms(2.0**-20, 0.0, False) if is_normed else None
    tensors = [each.to(device, dtype) for each in (q, k, cos, sin)]
    weight = scale.to(device, dtype)
    code = fused._device_code(family)
    heads = None if norms is None else (norms, weight, weight)
    assert code.takes is None or code.takes(tensors[0], tensors[1], tensors[2], rotation, axis, heads)
    given: dict[str, Any] = {} if norms is None else {"norms": norms, "q_weight": weight, "k_weight": weight}
    found = code.rope(*tensors, rotation=rotation, heads_axis=axis, **given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert_near(one.cpu(), other, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("layout", "kernel"), [("experts", "fused_moe"), ("experts_transposed", "fused_moe_transposed")]
)
def test_experts(family: str, device: str, layout: str, kernel: str) -> None:
    config = Qwen3MoeConfig(hidden_size=24, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    _check_experts(randomised(Qwen3MoeExperts(config), 0.2), family, device, layout, kernel)


def test_experts_with_a_clamped_gate_and_biases(family: str, device: str) -> None:
    config = GptOssConfig(hidden_size=24, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    _check_experts(randomised(GptOssExperts(config), 0.4), family, device, "experts", "fused_moe")


def _check_experts(stock: nn.Module, family: str, device: str, layout: str, kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 7, 33):
        hidden = torch.randn(tokens, 24, generator=generator, dtype=torch.float64)
        weights, index = torch.rand(tokens, 5, generator=generator, dtype=torch.float64).topk(2)
        for dtype in DTYPES:
            inputs = [hidden, index, weights]
            check(copy.deepcopy(stock), family, layout, kernel, inputs, dtype, device)
