"""A converted model computes what the stock one does: logits, generation, attentions, gradients, compilation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from kconvert.kernels.layout import is_patched
from kconvert.runtime import load_converted
from tests.runtime.conftest import MakePair
from tests.runtime.pairs import IDS, Pair, logits
from tests.support import convert, save_tiny, write_recipe

RECIPES = ["qwen3", "qwen3-fused-norm-mlp", "llama"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_reference_has_the_bits_of_stock_and_kernels_are_near(
    make_pair: MakePair, recipe: str, dtype: torch.dtype, tie: bool, sharded: bool
) -> None:
    pair = make_pair(recipe, dtype=dtype, tie=tie, sharded=sharded)
    assert len(list(pair.converted.glob("model.kconvert*.safetensors"))) == 1 or sharded
    assert (len(list(pair.converted.glob("model.kconvert*.safetensors"))) > 1) == sharded
    stock, packed, fast = pair.stock(), pair.load(kernels="reference"), pair.load()
    expected = logits(stock)
    assert expected.dtype is dtype
    assert torch.equal(logits(packed), expected)
    found = logits(fast)
    assert found.dtype is dtype
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for model in (packed, fast):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
        assert not [name for name, tensor in model.named_parameters() if tensor.is_meta]
        assert not model.training


def test_the_models_are_told_apart_by_their_weights(pair: Pair) -> None:
    """The comparisons here mean something: one changed weight shows."""
    model = pair.load(kernels="reference")
    with torch.no_grad():
        model.get_parameter(f"{pair.mlp(1)}.gate_up_proj.weight").view(-1)[0] += 0.5
    assert not torch.equal(logits(model), logits(pair.stock()))


def test_packed_shapes_are_of_heads_that_differ_from_hidden(pair: Pair) -> None:
    model, stock = pair.load(), pair.stock()
    config = model.config
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.num_key_value_heads < config.num_attention_heads
    mlp = model.get_submodule(pair.mlp(0))
    assert mlp.gate_up_proj.weight.shape == (2 * config.intermediate_size, config.hidden_size)
    assert mlp.gate_up_proj.out_features == 2 * config.intermediate_size
    gate, up = stock.model.layers[0].mlp.gate_proj.weight, stock.model.layers[0].mlp.up_proj.weight
    assert torch.equal(mlp.gate_up_proj.weight, torch.cat([gate, up]))
    ours, theirs = model.model.layers[0].self_attn, stock.model.layers[0].self_attn
    assert ours.kconvert_rows == {"qkv_proj": (64, 32, 32)}
    parts = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
    assert torch.equal(ours.qkv_proj.weight, torch.cat(parts))


def test_eps_is_that_of_the_config_per_instance(pair: Pair) -> None:
    """A14, at rows so small that eps decides."""
    model, stock = pair.load(), pair.stock()
    small = torch.full((1, 2, model.config.hidden_size), 1e-3)
    with torch.no_grad():
        torch.testing.assert_close(model.model.norm(small), stock.model.norm(small), rtol=1e-6, atol=0)
    assert model.model.norm.variance_epsilon == stock.config.rms_norm_eps


def test_greedy_generation_is_the_same(pair: Pair) -> None:
    ours: Any = pair.load()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found, expected = ours.generate(IDS, **settings), pair.stock().generate(IDS, **settings)
    assert found.shape == (2, IDS.shape[1] + 8)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=["beam", "static-cache", "no-cache"],
)
def test_other_generation_is_the_same(pair: Pair, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = pair.stock().generate(IDS, **common, **settings)
    for kernels in ("reference", "auto"):
        assert torch.equal(pair.load(kernels=kernels).generate(IDS, **common, **settings), expected)


def test_assisted_generation_is_the_same(qwen3: Pair) -> None:
    common: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = qwen3.stock().generate(IDS[:1], **common)
    assert torch.equal(qwen3.load().generate(IDS[:1], assistant_model=qwen3.load(), **common), plain)


def test_attentions_and_hidden_states_are_recorded(pair: Pair) -> None:
    ours, stock = pair.load(attn_implementation="eager", kernels="reference"), pair.stock(attn_implementation="eager")
    with torch.no_grad():
        found = ours(IDS, output_attentions=True, output_hidden_states=True)
        expected = stock(IDS, output_attentions=True, output_hidden_states=True)
    assert (len(found.attentions), len(found.hidden_states)) == (2, 3)
    assert all(map(torch.equal, found.attentions, expected.attentions))
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_gradients_are_those_of_stock(pair: Pair, checkpointing: bool, kernels: str) -> None:
    ours, stock = pair.load(kernels=kernels), pair.stock()
    for model in (ours, stock):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    losses = [model(IDS, labels=IDS).loss for model in (ours, stock)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
    theirs = {name: parameter.grad for name, parameter in stock.named_parameters()}
    compared: set[str] = set()
    for packing in ours.kconvert_packings:
        ((target, made),) = packing.targets.items()
        wanted = torch.cat([theirs[name] for name in made.sources])
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(ours.get_parameter(target).grad, wanted, rtol=1e-4, atol=1e-6)
        compared.update(packing.sources)
    for name in theirs.keys() - compared:
        torch.testing.assert_close(ours.get_parameter(name).grad, theirs[name], rtol=1e-4, atol=1e-6)
    assert {name.split(".")[-2] for name in compared} >= {"gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"}


def test_checkpointing_recomputes_the_packed_modules(qwen3: Pair) -> None:
    """Not only the flag: with checkpointing the MLP runs twice per step."""
    calls = {}
    for checkpointing in (False, True):
        model = qwen3.load()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        seen: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        model(IDS, labels=IDS).loss.backward()
        calls[checkpointing] = len(seen)
    assert calls == {False: 1, True: 2}


def test_compiled_equals_eager(pair: Pair) -> None:
    """K3: one graph, no break."""
    torch._dynamo.reset()
    model = pair.load(use_cache=False)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(compiled), logits(pair.stock()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_packed_modules_export_strictly(pair: Pair, kernels: str) -> None:
    model = pair.load(kernels=kernels)
    for path in (pair.mlp(0), "model.layers.0.post_attention_layernorm"):
        module = model.get_submodule(path)
        hidden = torch.randn(2, 5, model.config.hidden_size)
        exported = torch.export.export(module, (hidden,), strict=True)
        with torch.no_grad():
            torch.testing.assert_close(exported.module()(hidden), module(hidden), rtol=0, atol=1e-6)


def test_a_whole_model_exports_strictly(qwen3: Pair) -> None:
    model = qwen3.load(use_cache=False)
    with torch.no_grad():
        exported = torch.export.export(model, (IDS,), strict=True)
        torch.testing.assert_close(exported.module()(IDS).logits, logits(qwen3.stock()), rtol=0, atol=1e-5)


def test_rotary_buffers_are_computed_as_in_stock(pair: Pair) -> None:
    """B18: they are in no file."""
    ours, stock = pair.load(), pair.stock()
    found, expected = dict(ours.named_buffers()), dict(stock.named_buffers())
    assert "model.rotary_emb.inv_freq" in found
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_resized_embeddings(tied: Pair) -> None:
    ours, stock = tied.load(), tied.stock()
    for model in (ours, stock):
        model.resize_token_embeddings(80, mean_resizing=False)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    found = logits(ours)
    assert found.shape[-1] == 80
    torch.testing.assert_close(found[..., :64], logits(stock)[..., :64], rtol=0, atol=1e-5)


def test_a_copy_is_independent(pair: Pair) -> None:
    """A17."""
    model = pair.load()
    before = logits(model)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert torch.equal(logits(twin), before)
    theirs = {tensor.data_ptr() for tensor in model.parameters()}
    assert theirs.isdisjoint(tensor.data_ptr() for tensor in twin.parameters())
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.mul_(0.5)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(twin), before)
    patched = [path for path, module in model.named_modules() if is_patched(module)]
    assert [path for path, module in twin.named_modules() if is_patched(module)] == patched
    assert twin.kconvert_report.to_dict() == model.kconvert_report.to_dict()


def test_a_copy_takes_stock_names_for_itself(pair: Pair) -> None:
    model, stock = pair.load(), pair.stock()
    twin, before = copy.deepcopy(model), logits(model)
    twin.load_state_dict({name: 0.5 * tensor for name, tensor in stock.state_dict().items()})
    stock.load_state_dict({name: 0.5 * tensor for name, tensor in stock.state_dict().items()})
    torch.testing.assert_close(logits(twin), logits(stock), rtol=0, atol=1e-5)
    assert torch.equal(logits(model), before)


def test_the_attention_of_a_vision_tower(tmp_path: Path) -> None:
    """Its initialiser fills `q_proj` and the like while loading; the rows that were read must stay."""
    source = save_tiny(tmp_path / "source", "gemma3")
    entry = '  - kernel: cpu_fused_qkv\n    replace: {class: SiglipAttention, path: "model.vision_tower.encoder.layers.*.self_attn"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", entry, model_type="gemma3")
    output = convert(recipe, source, tmp_path / "out").output
    stock = AutoModelForImageTextToText.from_pretrained(source)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[2, 61, 60, 60, 60, 60, 62, 9, 3]])
    with torch.no_grad():
        expected = stock(input_ids=ids, pixel_values=pixels).logits
        assert not torch.equal(expected, stock(input_ids=ids, pixel_values=pixels + 1).logits)
        for kernels in ("reference", "auto"):
            model = load_converted(output, kernels=kernels)
            assert model.model.vision_tower.encoder.layers[0].self_attn.qkv_proj.weight.shape == (48, 16)
            found = model(input_ids=ids, pixel_values=pixels).logits
            assert torch.equal(found, expected) or kernels == "auto"
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [item.kernel for item in model.kconvert_report.modules] == ["cpu_fused_qkv"]


def test_hooks_on_the_packed_projections_fire(pair: Pair) -> None:
    model, calls = pair.load(), list[str]()
    for path, module in model.named_modules():
        if path.endswith(("qkv_proj", "gate_up_proj")):
            module.register_forward_hook(lambda *_, path=path: calls.append(path.rpartition(".")[2]))
    expected = logits(pair.stock())
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert calls == ["qkv_proj", "gate_up_proj"] * 2
