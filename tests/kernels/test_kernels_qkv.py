"""Packed q, k and v: order by value, every kind of attention against stock on its real arguments, and live models."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from kconvert.errors import UsageError
from kconvert.kernels import apply_default_kernels, apply_kernel
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.qkv_proj.cpu import CpuFusedQKV
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.probe import Call, capture_calls, same_output
from tests.support import Kind, tiny_config, tiny_model

KERNEL = "cpu_fused_qkv"
IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11], [2, 4, 8, 16, 32, 5, 1]])


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **kwargs).logits  # type: ignore[no-any-return]


def patched(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if is_patched(module)]


def live(kind: str, **kw: Any) -> tuple[Any, Any]:
    """A model with the kernel in every attention, and the stock one."""
    stock = tiny_model(cast("Kind", kind), **kw)
    model = apply_kernel(KERNEL, model=copy.deepcopy(stock))
    assert patched(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    return model, stock


# --- order ------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Projections with sizes of their own, and nothing else."""

    def __init__(self, rows: tuple[int, int, int], *, hidden: int = 8, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, rows[0], bias=bias)
        self.k_proj = nn.Linear(hidden, rows[1], bias=bias)
        self.v_proj = nn.Linear(hidden, rows[2], bias=bias)
        self.o_proj = nn.Linear(rows[0], hidden)

    def forward(self, x: torch.Tensor) -> Any:
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        return query, key, value


def test_heads_lie_in_the_order_q_k_v_by_value() -> None:
    """B10: 4 query heads 0..3, keys 10 and 11, values 20 and 21; each head is two equal rows."""
    module = Plain((8, 4, 4), hidden=1)
    heads = {"q": [0, 1, 2, 3], "k": [10, 11], "v": [20, 21]}
    with torch.no_grad():
        for name, values in heads.items():
            rows = [[float(value)] for value in values for _ in range(2)]
            module.get_submodule(f"{name}_proj").weight.copy_(torch.tensor(rows))  # type: ignore[operator]
    packed: Any = QKVProjLayout.patch([module])
    assert packed.qkv_proj.weight[::2, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert packed.qkv_proj.weight[1::2, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    one = torch.ones(1, 1)
    with torch.no_grad():
        for run in (packed.reference, lambda x: CpuFusedQKV.forward(packed, x)):
            found = [part[0, ::2].tolist() for part in run(one)]
            assert found == list(heads.values())
    for name, values in heads.items():
        assert getattr(packed, f"{name}_proj").weight[::2, 0].tolist() == values


def test_splits_follow_the_rows_and_not_hidden_over_heads() -> None:
    """B9: hidden 8, 4 heads of 4, 2 kv heads: q has 16 rows, not 8."""
    config = tiny_config("llama", hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    stock: Any = LlamaAttention(config, 0)
    packed: Any = QKVProjLayout.patch([copy.deepcopy(stock)])
    assert packed.kconvert_rows == {"qkv_proj": (16, 8, 8)}
    assert packed.qkv_proj.weight.shape == (32, 8)
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = packed.kconvert_project("qkv_proj", hidden)
        assert [part.shape[-1] for part in parts] == [16, 8, 8]
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            torch.testing.assert_close(part, stock.get_submodule(name)(hidden), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(16, 8, 8), (8, 8, 8), (4, 4, 12), (3, 5, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_of_any_size(dtype: torch.dtype, rows: tuple[int, int, int], bias: bool) -> None:
    torch.manual_seed(0)
    module = Plain(rows, bias=bias).to(dtype)
    before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    packed: Any = QKVProjLayout.patch([module])
    kinds = ("weight", "bias") if bias else ("weight",)
    assert [name for name, _ in packed.named_parameters()] == [
        *(f"qkv_proj.{kind}" for kind in kinds),
        "o_proj.weight",
        "o_proj.bias",
    ]
    for kind in kinds:
        parts = [before[f"{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(packed.qkv_proj, kind), torch.cat(parts))
        assert all(
            torch.equal(getattr(getattr(packed, f"{n}_proj"), kind), part) for n, part in zip("qkv", parts, strict=True)
        )
    hidden = torch.randn(2, 3, 8).to(dtype)
    with torch.no_grad():
        parts = [nn.functional.linear(hidden, before[f"{n}_proj.weight"], before.get(f"{n}_proj.bias")) for n in "qkv"]
        for found, expected in zip(packed(hidden), parts, strict=True):
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_share_of_the_rows_is_split_in_the_same_proportions(ranks: int) -> None:
    """As tensor parallelism leaves a rank with a part of each projection."""
    packed: Any = QKVProjLayout.patch([Plain((16, 8, 4))])
    assert packed.kconvert_sizes("qkv_proj", 28 // ranks) == [16 // ranks, 8 // ranks, 4 // ranks]


class _OwnLinear(nn.Linear):
    pass


def other(name: str) -> Plain:
    module = Plain((16, 8, 8), bias=True)
    if name == "own linear":
        module.k_proj = _OwnLinear(8, 8)
    elif name == "no v":
        del module.v_proj
    elif name == "inputs":
        module.k_proj = nn.Linear(4, 8)
    elif name == "bias":
        module.k_proj = nn.Linear(8, 8, bias=False)
    elif name == "biases":
        module.q_proj, module.v_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
    elif name == "dtype":
        module.v_proj.double()
    elif name == "frozen":
        module.q_proj.requires_grad_(False)
    elif name == "packed":
        del module.q_proj, module.k_proj, module.v_proj
        module.qkv_proj = nn.Linear(8, 32)
    return module


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own linear", "has no plain linear k_proj"),
        ("no v", "has no plain linear v_proj"),
        ("inputs", "q_proj, k_proj and v_proj have inputs of different sizes"),
        ("bias", "of q_proj, k_proj and v_proj, k_proj has no bias"),
        ("biases", "of q_proj, k_proj and v_proj, q_proj and v_proj have no bias"),
        ("dtype", "q_proj, k_proj and v_proj differ in dtype, device or requires_grad"),
        ("frozen", "q_proj, k_proj and v_proj differ in dtype, device or requires_grad"),
        ("packed", "is built packed, in an order of its own"),
    ],
)
def test_modules_of_another_structure(name: str, said: str) -> None:
    assert QKVProjLayout.unfit([other(name)]) == said


# --- every kind of attention ------------------------------------------------------------------------------

SHIPPED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 4},
    "gemma3": {"sliding_window": 4},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1},
    "starcoder2": {"use_bias": True},
    "stablelm": {"head_dim": 8, "qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "phi": {"head_dim": 8, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 4},
    "olmo": {"clip_qkv": 0.2},
    "olmo3": {"sliding_window": 4},
    "smollm3": {"no_rope_layers": [1, 0]},
    "exaone4": {"sliding_window": 4},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "nemotron": {"partial_rotary_factor": 0.5},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2, "num_heads": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "diffllama": {},
    "ernie4_5": {"use_bias": True},
}
NOT_JOINED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma4_text": (
        {
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
        },
        "its forward calls v_proj on a condition",
    ),
}
"""Types whose attention is packed and runs its reference."""


@cache
def captured(kind: str) -> tuple[Any, dict[str, Call]]:
    """A float32 model and what its attention modules are given."""
    values = {**SHIPPED, **OTHERS, **{name: case[0] for name, case in NOT_JOINED.items()}}[kind]
    model = tiny_model(cast("Kind", kind), **values)
    places = [path for path, module in model.named_modules() if path and QKVProjLayout.unfit([module]) is None]
    calls, failure = capture_calls(model, places)
    assert failure is None
    return model, calls


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments for a module of another dtype; what is not to be changed by a call is copied."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, tuple | list):
        return type(value)(cast_to(item, dtype) for item in value)
    return copy.deepcopy(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*SHIPPED, *OTHERS, *NOT_JOINED])
def test_every_attention_against_stock_on_its_real_arguments(kind: str, dtype: torch.dtype) -> None:
    model, calls = captured(kind)
    assert len(calls) == 2  # layers of two kinds, where the type has them
    for path, call in calls.items():
        stock = copy.deepcopy(model.get_submodule(path)).to(dtype)
        packed: Any = QKVProjLayout.patch([copy.deepcopy(stock)])

        def run(forward: Callable[..., Any], call: Call = call) -> Any:
            args, kwargs = cast_to(call.args, dtype), {key: cast_to(v, dtype) for key, v in call.kwargs.items()}
            with torch.no_grad():
                return forward(*args, **kwargs)

        expected = run(stock)
        assert same_output(run(packed.reference), expected)
        assert same_output(run(packed), expected)  # no kernel was assigned
        if kind in NOT_JOINED:
            assert CpuFusedQKV.supports(packed) == NOT_JOINED[kind][1]
            continue
        assert CpuFusedQKV.supports(packed) is None
        count: list[int] = []
        packed.qkv_proj.register_forward_hook(lambda *_, count=count: count.append(1))
        found = run(lambda *args, packed=packed, **kwargs: CpuFusedQKV.forward(packed, *args, **kwargs))
        assert len(count) == 1
        one, two = (value[0] if isinstance(value, tuple) else value for value in (found, expected))
        assert one.dtype is dtype
        scale = max(1.0, float(two.abs().max()))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
        torch.testing.assert_close(one, two, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_every_attention_implementation(attention: str) -> None:
    model, stock = live("llama")
    for each in (model, stock):
        each.set_attn_implementation(attention)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(logits(model), logits(stock), rtol=0, atol=1e-5)


# --- generation -------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beam": {"num_beams": 3},
}


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_generation_is_the_same(kind: str, settings: str) -> None:
    """Mistral and Gemma slide over 4 tokens, so their caches turn over."""
    model, stock = live(kind, **SHIPPED[kind])
    common: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.compiler.set_stance("force_eager"):
        found, expected = (each.generate(IDS, **common, **SETTINGS[settings]) for each in (model, stock))
    assert found.shape == (2, 13)
    assert torch.equal(found, expected)


def test_attentions_and_hidden_states_are_recorded() -> None:
    model, stock = live("gemma3_text", **SHIPPED["gemma3_text"])
    for each in (model, stock):
        each.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (each(IDS, output_attentions=True, output_hidden_states=True) for each in (model, stock))
    assert (len(found.attentions), len(found.hidden_states)) == (2, 3)
    assert found.attentions[0].shape == (2, 4, 7, 7)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=0, atol=1e-4)


# --- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("kind", "values"), [("qwen2", {}), ("olmo", {"clip_qkv": 0.2}), ("gemma", {"num_key_value_heads": 1})]
)
def test_gradients_are_those_of_stock(kind: str, values: dict[str, Any], checkpointing: bool) -> None:
    """OLMo clips the projections in place, here views of one tensor."""
    model, stock = live(kind, **values)
    calls: list[int] = []
    model.model.layers[0].self_attn.qkv_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    for each in (model, stock):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        each(IDS, labels=IDS).loss.backward()
    assert len(calls) == 1 + checkpointing
    for layer, theirs in zip(model.model.layers, stock.model.layers, strict=True):
        packed, apart = layer.self_attn.qkv_proj, theirs.self_attn
        for kind_of, parameter in packed.named_parameters():
            expected = torch.cat([apart.get_submodule(f"{n}_proj").get_parameter(kind_of).grad for n in "qkv"])
            assert float(expected.abs().max()) > 1e-4
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "values", "keeps"), [("qwen2", {}, True), ("olmo", {"clip_qkv": 0.2}, False)])
def test_parts_are_split_where_nothing_changes_them_in_place(kind: str, values: dict[str, Any], keeps: bool) -> None:
    """Autograd then makes one gradient of the whole projection, not one for each part."""
    model, _ = live(kind, **values)
    attention = model.model.layers[0].self_attn
    q, _, v = attention.kconvert_project("qkv_proj", torch.randn(1, 3, 32))
    assert (q.grad_fn.name() == v.grad_fn.name() == "SplitWithSizesBackward0") == keeps
    assert type(attention).kconvert_keeps_parts is keeps


def test_compiled_and_exported_attention_is_the_eager_one() -> None:
    model, stock = live("gemma2", **SHIPPED["gemma2"])
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, use_cache=False), logits(stock), rtol=0, atol=1e-5)
    model.config.use_cache = False
    with torch.no_grad():
        exported = torch.export.export(model, (IDS,), strict=True)
        torch.testing.assert_close(exported.module()(IDS).logits, logits(model), rtol=0, atol=1e-6)
    names = [node.target for node in exported.graph.nodes if "linear" in str(node.target)]
    assert len(names) == 2 * (1 + 1 + 3) + 1  # per layer qkv, o, and the three of the MLP; the head


# --- the module in a live model ---------------------------------------------------------------------------


def test_the_class_keeps_what_transformers_looks_for() -> None:
    model, stock = live("qwen3")
    ours, theirs = model.model.layers[0].self_attn, stock.model.layers[0].self_attn
    assert isinstance(ours, type(theirs))
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(ours), name) == getattr(type(theirs), name)
    assert type(theirs).forward is not type(ours).forward
    assert type(ours).forward.__doc__ == type(theirs).forward.__doc__
    assert ours.layer_idx == 0


def test_parts_stay_readable_and_cannot_be_set() -> None:
    model, stock = live("qwen2")
    ours, theirs = model.model.layers[0].self_attn, stock.model.layers[0].self_attn
    hidden = torch.randn(1, 3, 32)
    for name in ("q_proj", "k_proj", "v_proj"):
        part, expected = getattr(ours, name), theirs.get_submodule(name)
        assert torch.equal(part.weight, expected.weight)
        assert torch.equal(part.bias, expected.bias)
        assert (part.in_features, part.out_features) == (expected.in_features, expected.out_features)
        assert torch.equal(part(hidden), expected(hidden))
        assert not isinstance(part, nn.Module)
        for value in (nn.Linear(32, 64), None, part):
            with pytest.raises(AttributeError, match=f"{name} is packed into qkv_proj and cannot be set"):
                setattr(ours, name, value)
        with pytest.raises(AttributeError):
            part.weight = expected.weight
    for names in (model.state_dict(), dict(model.named_modules()), dict(model.named_parameters())):
        found = [name for name in names if "self_attn" in name and "_proj" in name]
        assert {name.split(".")[4] for name in found} == {"qkv_proj", "o_proj"}
    ours.o_proj = nn.Linear(64, 32)


def test_a_hook_on_the_packed_projection_fires_and_reaches_all_parts() -> None:
    model, _ = live("llama")
    attention, before = model.model.layers[0].self_attn, logits(model)
    calls: list[tuple[int, ...]] = []
    handle = attention.qkv_proj.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
    assert torch.equal(logits(model), before)
    assert calls == [(2, 7, 128)]
    handle.remove()
    attention.qkv_proj.register_forward_hook(lambda module, args, output: 2 * output)
    changed = logits(model)
    assert not torch.allclose(changed, before)
    stock = tiny_model("llama")
    with torch.no_grad():
        for name in "qkv":
            stock.model.layers[0].self_attn.get_submodule(f"{name}_proj").weight.mul_(2)
    torch.testing.assert_close(changed, logits(stock), rtol=0, atol=1e-5)


def test_copies_and_pickles_are_of_the_same_class_and_independent() -> None:
    """Nemotron's attention can be pickled in stock form; that of most types cannot where `kernels` is installed."""
    model, stock = live("nemotron")
    pickle.dumps(stock.model.layers[0].self_attn)
    attention = model.model.layers[0].self_attn
    (call,) = capture_calls(model, ["model.layers.0.self_attn"])[0].values()
    for again in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert type(again) is type(attention)
        assert again.kconvert_dispatch is not attention.kconvert_dispatch
        with torch.no_grad():
            assert same_output(again(*call.args, **call.kwargs), call.output)
            again.qkv_proj.weight.zero_()
            assert not same_output(again(*call.args, **call.kwargs), call.output)
            assert same_output(attention(*call.args, **call.kwargs), call.output)


@pytest.mark.parametrize("num_models", [1, 2])
def test_threads(num_models: int) -> None:
    """The forward holds no state: threads on one model, or on two of one class, do not mix."""
    pairs = [live("qwen3", seed=seed) for seed in range(num_models)]
    inputs = [
        torch.randint(0, 64, (1, 3 + number), generator=torch.Generator().manual_seed(number)) for number in range(4)
    ]
    with torch.no_grad():
        expected = [[model(ids).logits for ids in inputs] for model, _ in pairs]
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        model = pairs[number % num_models][0]
        for _ in range(10):
            with torch.no_grad():
                for place, ids in enumerate(inputs):
                    if not torch.equal(model(ids).logits, expected[number % num_models][place]):
                        wrong.append((number, place))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_models_of_one_class_have_one_forward_and_their_own_weights() -> None:
    (one, stock), (two, other_stock) = live("llama", seed=0), live("llama", seed=1)
    first, second = one.model.layers[0].self_attn, two.model.layers[1].self_attn
    assert type(first) is type(second)
    torch.testing.assert_close(logits(one), logits(stock), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(two), logits(other_stock), rtol=0, atol=1e-5)


def test_stock_names_are_taken_and_given() -> None:
    model, other_model = live("qwen2")[0], tiny_model("qwen2", seed=1)
    assert model.load_state_dict(other_model.state_dict()).missing_keys == []
    torch.testing.assert_close(logits(model), logits(other_model), rtol=0, atol=1e-5)
    packed = model.model.layers[1].self_attn.qkv_proj
    before = packed.weight.detach().clone()
    model.load_state_dict({"model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 32)}, strict=False)
    assert not packed.weight[64:96].any()
    assert torch.equal(packed.weight[:64], before[:64])
    assert torch.equal(packed.weight[96:], before[96:])


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("key", ["lora_A.default.weight", "base_layer.weight"])
def test_weights_of_an_adapter_for_a_part_are_refused(name: str, key: str) -> None:
    model, _ = live("llama")
    with pytest.raises(UsageError, match=rf"'model\.layers\.0\.self_attn\.{name}', which is packed"):
        model.load_state_dict({f"model.layers.0.self_attn.{name}.{key}": torch.zeros(2, 32)}, strict=False)
    passes = {f"model.layers.0.self_attn.o_proj.{key}": torch.zeros(2, 32)}
    assert model.load_state_dict(passes, strict=False).unexpected_keys == list(passes)


# --- what is left alone -----------------------------------------------------------------------------------


def share(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = model.model.layers[0].self_attn.k_proj


def share_weight(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight


def train(model: Any) -> None:
    model(IDS, labels=IDS).loss.backward()


def hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *_: None)


def gradient_hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (share, "shares parameters with another module"),
        (share_weight, "shares parameters with another module"),
        (train, "patch before training"),
        (hook, "has hooks on its parts"),
        (gradient_hook, "patch before training"),
    ],
)
def test_what_packing_would_lose_is_left_alone(prepare: Callable[[Any], None], said: str) -> None:
    model = tiny_model("qwen3")
    prepare(model)
    before = [name for name, _ in model.named_parameters()]
    with pytest.warns(UserWarning, match=rf"nothing is patched; e\.g\. model\.layers\.0\.self_attn .*{said}"):
        apply_kernel(KERNEL, model=model)
    assert patched(model) == []
    assert [name for name, _ in model.named_parameters()] == before


def test_what_is_not_taken_may_be_shared_hooked_and_trained() -> None:
    """`o_proj` and the norms stay modules of their own."""
    model, calls = tiny_model("qwen3"), []
    first, second = (layer.self_attn for layer in model.model.layers)
    second.o_proj = first.o_proj
    first.q_norm.register_forward_hook(lambda *_: calls.append(1))
    first.q_norm.weight.grad = torch.ones_like(first.q_norm.weight)
    expected = logits(model)
    apply_kernel(KERNEL, model=model)
    assert len(patched(model)) == 2
    assert first.o_proj is second.o_proj
    assert first.q_norm.weight.grad is not None
    calls.clear()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert calls == [1]


def test_a_forward_that_cannot_be_rewritten_is_left_alone_in_a_live_model() -> None:
    """Packing alone would change names and gain nothing."""
    model = tiny_model(cast("Kind", "gemma4_text"), **NOT_JOINED["gemma4_text"][0])
    with pytest.warns(
        UserWarning, match="nothing is patched.*is not for the kernel: its forward calls v_proj on a condi"
    ):
        apply_kernel(KERNEL, model=model)
    assert patched(model) == []


def test_a_module_that_a_forward_does_not_reach_is_left_alone() -> None:
    model = tiny_model("gemma3")
    apply_kernel(KERNEL, model=model)
    assert patched(model) == [f"model.language_model.layers.{number}.self_attn" for number in (0, 1)]
    assert "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight" in model.state_dict()


def test_norms_and_projections_of_one_attention_module_have_a_kernel_each() -> None:
    for order in ("cpu_fused_qkv,cpu_fused_rmsnorm", "cpu_fused_rmsnorm,cpu_fused_qkv"):
        model = tiny_model("qwen3")
        expected = logits(model)
        apply_default_kernels(model, order)
        kernels = {item.path: item.kernel for item in model.kconvert_report.modules}
        assert kernels["model.layers.0.self_attn"] == "cpu_fused_qkv"
        assert kernels["model.layers.0.self_attn.q_norm"] == "cpu_fused_rmsnorm"
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_init_weights_of_a_model_that_reads_the_projections_leaves_loaded_rows_alone() -> None:
    """The initialiser of vision towers fills `q_proj.weight` and the like by name."""
    model = tiny_model("gemma3")
    attention = model.model.vision_tower.encoder.layers[0].self_attn
    packed: Any = QKVProjLayout.patch([attention])
    parameters = [packed.qkv_proj.weight, packed.qkv_proj.bias]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter._is_hf_initialized = True
    for name in ("q_proj", "k_proj", "v_proj"):
        assert getattr(packed, name).weight._is_hf_initialized
    model.model.vision_tower._init_weights(packed)
    assert all(map(torch.equal, parameters, before))
    for parameter in parameters:
        del parameter._is_hf_initialized
    model.model.vision_tower._init_weights(packed)
    assert not torch.equal(packed.qkv_proj.weight, before[0])


def _halved(self: Any, *args: Any, **kwargs: Any) -> Any:
    output, weights = LlamaAttention.kconvert_test_forward(self, *args, **kwargs)  # type: ignore[attr-defined]
    return output * 0.5, weights


def test_a_forward_that_somebody_replaces_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after patching: what the class computes now counts, in models that were patched before too."""
    early, ids = tiny_model("llama"), torch.tensor([[3, 1, 4, 1, 5]])
    plain = early(ids).logits
    apply_kernel("cpu_fused_qkv", model=early)
    monkeypatch.setattr(LlamaAttention, "kconvert_test_forward", LlamaAttention.forward, raising=False)
    monkeypatch.setattr(LlamaAttention, "forward", _halved)
    late = tiny_model("llama")
    expected = late(ids).logits
    assert (expected - plain).abs().max() > 1e-3
    assert torch.equal(early(ids).logits, expected)
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel("cpu_fused_qkv", model=late)
    monkeypatch.undo()
    again = tiny_model("llama")
    apply_kernel("cpu_fused_qkv", model=again)
    assert again.kconvert_report.to_dict()["kernels"] == {"cpu_fused_qkv": 2}
    for model in (early, again):
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-5)
