"""Attention modules with q and k normed and rotated in one launch, beside the stock ones: caches, masks, gradients, compiled.

The kernels for CUDA run here on whatever device there is, by name.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.qkv_proj.cuda import CudaFusedQKV
from kconvert.kernels.ops.rope import fused
from kconvert.kernels.ops.rope.cuda import CudaFusedRope
from kconvert.kernels.probe import capture_calls
from kconvert.kernels.select import Mode, Selection
from kconvert.kernels.triton import rope as device_code
from tests.support import Kind, tiny_model
from tests.triton.norm_checks import round_as_on_devices

IDS = torch.tensor([[3, 9, 27], [2, 4, 8]])
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 2},
    "phi": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 2},
    "exaone4": {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"partial_rotary_factor": 0.5},
}
FOLDED = ("qwen3", "gemma3_text")
"""Types whose norms are those of each head and are read by nothing but the rotation."""
PACKED: Any = CudaFusedQKV
APART: Any = CudaFusedRope
CASES = [(kind, APART if kind == "phi3" else PACKED) for kind in KINDS] + [("gemma3_text", APART), ("exaone4", APART)]


class Launches:
    """Counts the launches of the rotary embedding, with the norms that each has."""

    def __init__(self) -> None:
        self.norms: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.norms.append(kwargs.get("norms"))
        return device_code.rope(*args, **kwargs)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted = Launches()
    monkeypatch.setattr(fused, "_device_code", lambda device: fused.DeviceCode(counted))
    return counted


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_on_devices(monkeypatch)


def stock_model(kind: str, device: str) -> Any:
    model = tiny_model(cast("Kind", kind), **KINDS[kind]).to(device)
    for name, parameter in model.named_parameters():  # norms that multiply by one would not show
        if "norm" in name:
            with torch.no_grad():
                parameter.add_(
                    0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(device)
                )
    return model


def attention_paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules() if path.endswith("self_attn")]


def patched_model(stock: Any, kernel: type[LayoutKernel]) -> Any:
    """With the kernel in every attention, whatever the device."""
    model = copy.deepcopy(stock)
    for path in attention_paths(model):
        module = cast("Any", model.get_submodule(path))
        assert kernel.layout.unfit([module]) is None
        packed = cast("Any", kernel.layout.patch([module]))
        assert kernel.supports(packed) is None
        packed.kconvert_dispatch.strict = True
        for mode in Mode:
            packed.kconvert_dispatch.set(IDS.device.type, mode, Selection(kernel.kernel_id(), ()), kernel)
            packed.kconvert_dispatch.set("cuda", mode, Selection(kernel.kernel_id(), ()), kernel)
    assert sum(map(is_patched, model.modules())) == 2
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("kind", "kernel"), CASES)
def test_prefill_with_a_mask(kind: str, kernel: type[LayoutKernel], device: str, launches: Launches) -> None:
    stock = stock_model(kind, device)
    model = patched_model(stock, kernel)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]]).to(device)
    with torch.no_grad():
        found, expected = (each(IDS.to(device), attention_mask=mask).logits for each in (model, stock))
    assert_close(found[mask.bool()], expected[mask.bool()])
    rotating = 1 if kind == "exaone4" else 2  # its second layer has full attention, and no rotation
    assert len(launches.norms) == rotating
    assert all((norms is not None) == (kind in FOLDED) for norms in launches.norms)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("qwen3", PACKED), ("gemma3_text", APART), ("phi3", APART)],
)
def test_decoding_with_a_cache(
    kind: str, kernel: type[LayoutKernel], cache: str, device: str, launches: Launches
) -> None:
    stock = stock_model(kind, device)
    model = patched_model(stock, kernel)
    logits = []
    for each in (model, stock):
        made: Any = DynamicCache() if cache == "dynamic" else StaticCache(config=each.config, max_cache_len=8)
        with torch.no_grad():
            for ids in (IDS[:, :2], IDS[:, 2:], IDS[:, :1]):
                out = each(ids.to(device), past_key_values=made, use_cache=True)
            logits.append(out.logits)
    assert logits[0].shape[1] == 1
    assert_close(logits[0], logits[1])
    assert len(launches.norms) == 6


@pytest.mark.parametrize(
    ("kind", "kernel", "checkpointing"),
    [("llama", PACKED, False), ("qwen3", PACKED, True), ("gemma3_text", APART, False), ("glm4", PACKED, False)],
)
def test_training(kind: str, kernel: type[LayoutKernel], checkpointing: bool, device: str, launches: Launches) -> None:
    stock = stock_model(kind, device)
    model = patched_model(stock, kernel)
    for each in (model, stock):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        each(IDS.to(device), labels=IDS.to(device), use_cache=False).loss.backward()
    assert len(launches.norms) == 2 * (1 + checkpointing)
    theirs = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        if name in theirs:
            expected = theirs[name].grad
        else:
            expected = torch.cat([theirs[name.replace("qkv_proj", f"{part}_proj")].grad for part in "qkv"])
        assert float(expected.abs().max()) > 0
        assert_close(parameter.grad, expected)
    assert not any("k_norm" in name and parameter.grad is None for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("kind", "kernel"), [("qwen3", PACKED), ("gemma3_text", APART)])
def test_compiled(kind: str, kernel: type[LayoutKernel], device: str, launches: Launches) -> None:
    """No graph break, and none of our device code: the compiler fuses the stock formula."""
    stock = stock_model(kind, device)
    model = patched_model(stock, kernel)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found, expected = (each(IDS.to(device), use_cache=False).logits for each in (compiled, stock))
    assert_close(found, expected)
    assert launches.norms == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "glm4", "cohere"])
def test_rotation_alone_keeps_the_bits(kind: str, dtype: torch.dtype, device: str, launches: Launches) -> None:
    """With the projections apart, so that nothing else differs from stock."""
    stock = stock_model(kind, device).to(dtype)
    model = patched_model(stock, APART)
    with torch.no_grad():
        found, expected = (each(IDS.to(device)).logits for each in (model, stock))
    # a GPU may multiply heads that lie otherwise in memory in another order
    assert_close(found, expected, tolerance=0.0 if device == "cpu" else 2e-2)
    assert len(launches.norms) == 2


# --- norms are called where folding them would lose something ------------------------------------------------


class LoudNorm(nn.Module):
    """Another norm, and one that looks at more than a head: over heads where these are the second dimension."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.norm(x)) * x.shape[1] + x.mean(dim=1, keepdim=True)


def hooked(norm: nn.Module) -> nn.Module:
    norm.register_forward_hook(lambda module, args, output: 2 * output)
    return norm


def own_forward(norm: nn.Module) -> nn.Module:
    stock = norm.forward
    norm.forward = lambda x: 3 * stock(x)
    return norm


def own_eps(norm: nn.Module) -> nn.Module:
    cast("Any", norm).variance_epsilon = 0.5
    return norm


@pytest.mark.parametrize("change", [LoudNorm, hooked, own_forward, own_eps])
@pytest.mark.parametrize("after", [False, True], ids=["before patching", "after patching"])
def test_a_norm_of_another_kind(change: Any, after: bool, device: str, launches: Launches) -> None:
    """Of q, not of k: the two differ, so neither is folded, and both are called as stock calls them."""
    stock = stock_model("qwen3", device)
    model = None

    def change_norms(model: Any) -> Any:
        for path in attention_paths(model):
            attention = model.get_submodule(path)
            attention.q_norm = change(attention.q_norm)
        return model

    if after:
        model = change_norms(patched_model(stock, PACKED))
        change_norms(stock)
    else:
        model = patched_model(change_norms(stock), PACKED)
    plain = stock_model("qwen3", device)
    with torch.no_grad():
        found, expected, before = (each(IDS.to(device)).logits for each in (model, stock, plain))
    assert_close(found, expected)
    assert not torch.allclose(expected, before, atol=1e-3)
    assert launches.norms == [None, None]


def test_a_function_that_somebody_puts_in_place_is_called(
    device: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries of kernels do: what the forward's module has under the name now counts."""
    from transformers.models.llama import modeling_llama

    stock = stock_model("llama", device)
    model = patched_model(stock, PACKED)
    real = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: real(2 * q, k, cos, sin))
    with torch.no_grad():
        assert_close(model(IDS.to(device)).logits, stock(IDS.to(device)).logits)
    assert launches.norms == []
    monkeypatch.undo()


def test_tensors_that_were_not_tried_go_to_the_stock_function(device: str, launches: Launches) -> None:
    """cos and sin that need a gradient, or of a width that the function does not take."""
    stock = stock_model("llama", device)
    model = patched_model(stock, PACKED)
    (call,) = capture_calls(stock, ["model.layers.0.self_attn"])[0].values()
    attention, theirs = (each.model.layers[0].self_attn for each in (model, stock))
    cos, sin = (table.clone().requires_grad_() for table in call.kwargs["position_embeddings"])
    gradients = []
    for each in (attention, theirs):
        out = each(*call.args, **{**call.kwargs, "position_embeddings": (cos, sin)})[0]
        gradients.append(torch.autograd.grad(out.square().sum(), [cos, sin]))
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected)
    wide = tuple(torch.cat([table, table], dim=-1).detach() for table in (cos, sin))
    for each in (attention, theirs):
        with pytest.raises(RuntimeError, match="must match the size"):
            each(*call.args, **{**call.kwargs, "position_embeddings": wide})
    assert launches.norms == []


def test_copies_are_independent(device: str, launches: Launches) -> None:
    """A copy norms with its own weights."""
    stock = stock_model("qwen3", device)
    model = patched_model(stock, PACKED)
    ids = IDS.to(device)
    with torch.no_grad():
        before = model(ids).logits
        other = copy.deepcopy(model)
        for path in attention_paths(other):
            other.get_submodule(path).q_norm.weight.mul_(3)
            stock.get_submodule(path).q_norm.weight.mul_(3)
        assert torch.equal(model(ids).logits, before)
        assert_close(other(ids).logits, stock(ids).logits)
        assert not torch.allclose(other(ids).logits, before, atol=1e-3)
    assert None not in launches.norms
