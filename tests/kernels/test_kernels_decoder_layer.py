"""A whole decoder layer: residual adds joined with the norms behind them, and everything that transformers does with layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

from kconvert.kernels import apply_kernel
from kconvert.kernels.joined_adds import join_adds
from kconvert.kernels.ops.decoder_layer.layout import DecoderLayerLayout
from kconvert.kernels.ops.decoder_layer.spec import NORMS
from kconvert.kernels.select import Mode
from kconvert.kernels.stock_function import NotJoinableError
from kconvert.runtime import load_converted
from tests.support import convert, read_raw, save_tiny, tiny_model, write_recipe

IDS = torch.arange(1, 15).reshape(2, 7)
KERNEL = "cpu_fused_decoder_layer"
TYPES: list[Any] = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The norms that are called together with an add."""
    names: list[str] = []
    joined = DecoderLayerLayout.kconvert_add_norm

    def noting(self: Any, name: str, left: Any, right: Any) -> Any:
        names.append(name)
        return joined(self, name, left, right)

    monkeypatch.setattr(DecoderLayerLayout, "kconvert_add_norm", noting)
    return names


@pytest.mark.parametrize("kind", TYPES)
def test_the_same_bits_and_every_add_joined(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    expected = model(IDS).logits
    stock = set(model.state_dict())
    apply_kernel(KERNEL, model=model)
    names = spied(monkeypatch)
    found = model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    norm = "pre_feedforward_layernorm" if kind == "gemma2" else "post_attention_layernorm"
    assert names == [norm] * model.config.num_hidden_layers
    kernels = {module.layout: module.kernel for module in model.kconvert_report.modules}
    assert kernels["decoder_layer"] == KERNEL
    assert (kernels["qkv_proj"], kernels["rms_norm"]) == ("cpu_fused_qkv", "cpu_fused_rmsnorm")
    assert kernels["gated_mlp"] in ("cpu_fused_swiglu", "cpu_fused_geglu")
    assert stock - set(model.state_dict())


def test_from_a_recipe_and_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3")
    recipe = write_recipe(
        tmp_path / "r.yaml",
        f"  - kernel: [cuda_fused_decoder_layer, {KERNEL}]\n"
        '    replace: {class: Qwen3DecoderLayer, path: "model.layers.*"}\n',
    )
    output = convert(recipe, source, tmp_path / "out").output
    model = load_converted(output, strict=True)
    assert any(name.endswith("self_attn.qkv_proj.weight") for name in read_raw(output))
    assert {module.path for module in model.kconvert_report.modules} >= {"model.layers.0", "model.layers.0.mlp"}
    model.save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == read_raw(source)


def test_what_transformers_records_of_layers(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    twin = copy.deepcopy(model)
    apply_kernel(KERNEL, model=model)
    for each in (model, twin):
        each.set_attn_implementation("eager")
    found = model(IDS, output_hidden_states=True, output_attentions=True)
    expected = twin(IDS, output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == len(expected.hidden_states) == model.config.num_hidden_layers + 1
    for one, two in zip(
        found.hidden_states + found.attentions, expected.hidden_states + expected.attentions, strict=True
    ):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_gradient_checkpointing() -> None:
    model = tiny_model("qwen3").train()
    apply_kernel(KERNEL, model=model)
    twin = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    for each in (model, twin):
        each(IDS, labels=IDS, use_cache=False).loss.backward()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_a_hook_on_a_norm_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    apply_kernel(KERNEL, model=model)
    seen: list[int] = []
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    model(IDS)
    assert seen == [model.config.hidden_size]


def test_a_forward_that_somebody_gave_a_norm_is_called() -> None:
    """It stands on the instance, where the norm's kernel does not see it."""
    model = tiny_model("qwen3")
    apply_kernel(KERNEL, model=model)
    norm = model.model.layers[0].post_attention_layernorm
    seen: list[int] = []
    stock = norm.forward

    def own(hidden: torch.Tensor) -> Any:
        seen.append(hidden.shape[-1])
        return stock(hidden)

    kernel = type("Joined", (), {"forward": None, "add_forward": staticmethod(lambda *args: 1 / 0)})
    for mode in Mode:
        norm.kconvert_dispatch.set("cpu", mode, norm.kconvert_dispatch.selection("cpu", mode), kernel)
    norm.kconvert_dispatch.has_run.add(kernel)
    norm.forward = own
    with pytest.raises(TypeError, match="NoneType"):
        model.model.layers[0].kconvert_add_norm("post_attention_layernorm", torch.ones(1, 2, 32), torch.ones(1, 2, 32))
    assert seen == [32]


def test_greedy_decoding_with_a_cache() -> None:
    model = tiny_model("qwen3")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    apply_kernel(KERNEL, model=model)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("stock", [LlamaDecoderLayer, Gemma2DecoderLayer, GraniteDecoderLayer])
def test_joined(stock: type[nn.Module]) -> None:
    assert join_adds(stock, NORMS) is not stock.forward


@pytest.mark.parametrize(("stock", "reason"), [(Olmo2DecoderLayer, "no residual add"), (GPT2Block, "no residual add")])
def test_not_joined(stock: type[nn.Module], reason: str) -> None:
    """Norms behind the projections, or under other names."""
    with pytest.raises(NotJoinableError, match=reason):
        join_adds(stock, NORMS)


class Reads(nn.Module):
    """The sum is not what the norm takes."""

    input_layernorm: Any

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        """Nothing to join."""
        hidden = residual + hidden
        hidden = hidden * 2
        return self.input_layernorm(hidden)


def test_something_in_between_is_not_joined() -> None:
    with pytest.raises(NotJoinableError, match="no residual add"):
        join_adds(Reads, NORMS)


@pytest.mark.parametrize("kind", ["olmo2", "cohere"])
def test_layers_of_another_form_are_left_alone(kind: Any) -> None:
    model = tiny_model(kind)
    expected = model(IDS).logits
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel(KERNEL, model=model)
    assert torch.equal(model(IDS).logits, expected)
