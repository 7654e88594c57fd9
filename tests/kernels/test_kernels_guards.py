"""What a compiler guards in a patched model, which it checks at every call: about what it guards in the stock model.

In torch 2.11 a module of which it has looked at anything but dicts, plain values, functions and tensors is checked in full.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from kconvert.kernels.layout import is_patched
from kconvert.kernels.live import apply_kernel
from kconvert.kernels.ops.decoder_layer.cuda import CudaFusedDecoderLayer
from kconvert.kernels.ops.gated_mlp.cuda import CudaFusedSwiGLU
from kconvert.kernels.ops.qkv_proj.cuda import CudaFusedQKV
from kconvert.kernels.ops.rms_norm.cuda import CudaFusedRMSNorm

CONFIG: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}
IDS = torch.zeros(1, 1, dtype=torch.long)


def _guards(model: nn.Module) -> list[str]:
    """The sources of all guards on the last layer."""
    found: list[str] = []

    def note(entries: Any) -> list[bool]:
        found.extend(entry.name for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True, options={"guard_filter_fn": note})
    with torch.no_grad():
        compiled(IDS, use_cache=False)
    return [name for name in found if "['layers']._modules['1']" in name]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    """The stock model, and one with the CUDA kernels, which a compiler traces as plain torch."""
    stock = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval()
    patched = copy.deepcopy(stock)
    apply_kernel("cpu_fused_decoder_layer", model=patched)
    kernels: dict[str, Any] = {
        "decoder_layer": CudaFusedDecoderLayer,
        "rms_norm": CudaFusedRMSNorm,
        "qkv_proj": CudaFusedQKV,
        "gated_mlp": CudaFusedSwiGLU,
    }
    for module in patched.modules():
        if is_patched(module):
            kernel = kernels[module.__dict__["kconvert_layout"]]
            assert kernel.supports(module) is None
            module.__dict__["kconvert_traced"]["cpu"] = kernel.forward
    return stock, patched


def test_a_patched_layer_has_no_more_guards_than_the_stock_one(models: tuple[nn.Module, nn.Module]) -> None:
    stock, patched = (_guards(model) for model in models)
    assert len(stock) > 50
    assert len(patched) <= 1.1 * len(stock)


def test_a_compiler_looks_at_no_object_of_ours(models: tuple[nn.Module, nn.Module]) -> None:
    stock, patched = models
    names = _guards(patched)
    assert any("kconvert_traced" in name for name in names)
    for part in ("kconvert_dispatch", "kconvert_stock_class", "kconvert_variant", "'variant'", ".__dict__['"):
        assert not [name for name in names if part in name], part
    of_classes = [[name for name in each if name.startswith("type(")] for each in (names, _guards(stock))]
    assert len(of_classes[0]) == len(of_classes[1])


def test_a_forward_that_is_replaced_before_tracing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    model: Any = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval()
    apply_kernel("cpu_fused_qkv", model=model)
    compiled: Any = torch.compile(model, backend="eager")
    before = compiled(IDS, use_cache=False).logits
    forward = modeling_qwen3.Qwen3Attention.forward

    def negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, weights = forward(self, *args, **kwargs)
        return -hidden, weights

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", negated)
    torch._dynamo.reset()
    expected = model(IDS, use_cache=False).logits
    found = compiled(IDS, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, before, atol=1e-4)
