"""What a live model must not lose: wrappers, shared or frozen parts, gradients, hooks and dropout are left alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, SeedOssConfig
from transformers.models.llama import modeling_llama

from kconvert.errors import UsageError
from kconvert.kernels import apply_default_kernels, apply_kernel
from kconvert.kernels.layout import is_patched
from kconvert.kernels.model import ConvertedModel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout, prove_activation
from tests.support import tiny_config, tiny_model

LlamaMLP: Any = modeling_llama.LlamaMLP
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
FUSION = "cpu_fused_rmsnorm_swiglu"


def patched(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if is_patched(module)}


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


# --- wrappers ---------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


class Holder(nn.Module):
    """As PEFT's or a value head's: the model is a child, here of a child."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Identity(), model])


def inner_compiled(model: Any) -> Any:
    return Holder(compiled(model))


@pytest.mark.parametrize("wrap", [compiled, Holder, inner_compiled, nn.DataParallel])
@pytest.mark.parametrize("kernel", ["cpu_fused_swiglu", "cpu_fused_rmsnorm", FUSION, "auto"])
def test_a_wrapper_is_refused(wrap: Callable[[Any], Any], kernel: str) -> None:
    model = tiny_model("qwen3")
    cls, before = type(model), names(model)
    wrapper = wrap(model)
    patch = apply_default_kernels if kernel == "auto" else lambda model, name: apply_kernel(name, model=model)
    with pytest.raises(ValueError, match=f"a {type(wrapper).__name__}, no transformers model.*before PEFT") as caught:
        patch(wrapper, kernel)
    assert isinstance(caught.value, UsageError)
    assert type(model) is cls
    assert not isinstance(wrapper, ConvertedModel)
    assert names(model) == before
    assert not patched(wrapper)


@pytest.mark.parametrize("value", ["model", 3, object(), [1], nn.Linear, tiny_config("llama")])
def test_what_is_no_module_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="no transformers model"):
        apply_kernel("cpu_fused_swiglu", model=value)
    with pytest.raises(UsageError, match="no transformers model"):
        apply_default_kernels(value, "auto")


def test_the_model_inside_a_wrapper_can_be_patched() -> None:
    model = tiny_model("qwen3")
    wrapper, expected = Holder(model), model(IDS).logits
    apply_default_kernels(model, "auto")
    assert "base.1.model.layers.0.mlp" in patched(wrapper)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)


# --- dropout ----------------------------------------------------------------------------------------------


def seed_oss() -> Any:
    config = SeedOssConfig(**{**tiny_config("qwen3").to_dict(), "model_type": "seed_oss"}, residual_dropout=0.1)
    assert config.residual_dropout == 0.1
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_in_the_stock_mlp_is_kept(training: bool) -> None:
    """In eval mode it does not show, and training would go on without it."""
    model = seed_oss().train(training)
    stock = copy.deepcopy(model)
    apply_default_kernels(model, "auto")
    assert any("norm" in path for path in patched(model))
    hidden = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    mlp, theirs = model.train().model.layers[0].mlp, stock.train().model.layers[0].mlp
    torch.manual_seed(5)
    expected = theirs(hidden)
    assert 0 < int(expected.eq(0).sum()) < expected.numel()
    torch.manual_seed(5)
    assert torch.equal(mlp(hidden), expected)
    assert torch.equal(mlp.eval()(hidden), theirs.eval()(hidden))


class Dropping(LlamaMLP):  # type: ignore[misc]
    """A dropout so small that few values show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = super().forward(x)
        return F.dropout(hidden, p=0.01, training=self.training)


class DroppingChild(LlamaMLP):  # type: ignore[misc]
    """The same by a module of its own."""

    def __init__(self, config: Any, p: float = 0.01) -> None:
        super().__init__(config)
        self.drop = nn.Sequential(nn.Identity(), nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [Dropping, DroppingChild])
@pytest.mark.parametrize("kernel", ["cpu_fused_swiglu", FUSION])
def test_a_small_dropout_is_found_in_eval_mode(cls: Any, kernel: str) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = cls(model.config).eval()
    if kernel == FUSION:
        model = rebuilt_with(cls, model)
    before = names(model)
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel(kernel, model=model)
    assert not patched(model)
    assert names(model) == before


def rebuilt_with(cls: Any, model: Any) -> Any:
    """A model whose class builds these MLPs itself: fusions look at a twin made by the class."""

    class Model(type(model)):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = cls(config)

    return Model(model.config).eval()


def test_a_fusion_with_a_plain_mlp_of_ones_own_is_patched() -> None:
    """So the refusal above is for the dropout."""

    class Own(LlamaMLP):  # type: ignore[misc]
        pass

    model = rebuilt_with(Own, tiny_model("llama"))
    apply_kernel(FUSION, model=model)
    assert len(model.kconvert_report.modules) == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.01])
def test_the_proof_leaves_training_flags_alone(training: bool, p: float) -> None:
    module = DroppingChild(tiny_config("llama"), p).train(training)
    child: Any = module.drop
    child[1].train(not training)
    packed: Any = GatedMLPLayout.patch([module])
    before = {name: each.training for name, each in packed.named_modules()}
    assert set(before.values()) == {True, False}
    why = prove_activation(packed, "silu")
    assert why == (None if p == 0.0 else "its forward is not down(act(gate) * up) with silu, gelu or gelu_tanh")
    assert {name: each.training for name, each in packed.named_modules()} == before


def test_the_proof_leaves_the_random_state_alone() -> None:
    packed: Any = GatedMLPLayout.patch([Dropping(tiny_config("llama"))])
    before = torch.get_rng_state()
    assert prove_activation(packed, "silu") is not None
    assert torch.equal(torch.get_rng_state(), before)


# --- shared, frozen, trained, hooked ----------------------------------------------------------------------

Prepare = Callable[[Any], None]


def one_module_in_two_layers(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def one_gate_in_two_layers(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj = model.model.layers[0].mlp.gate_proj


def one_gate_weight_in_two_layers(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight


def one_down_weight_in_two_layers(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight


def gate_is_up(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


def gradient(model: Any) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()


def gradient_of_down(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.grad = torch.zeros_like(layer.mlp.down_proj.weight)


def gradient_hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.register_hook(lambda grad: grad * 2)


def hook_on(name: str, kind: str) -> Prepare:
    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            part = layer.mlp.get_submodule(name)
            if kind == "forward":
                part.register_forward_hook(lambda module, args, output: None)
            elif kind == "pre":
                part.register_forward_pre_hook(lambda module, args: None)
            else:
                part.register_full_backward_hook(lambda module, given, result: None)

    return prepare


LEFT_ALONE: dict[str, tuple[Prepare, str]] = {
    "module": (one_module_in_two_layers, "shares parameters with another module"),
    "linear": (one_gate_in_two_layers, "shares parameters with another module"),
    "weight": (one_gate_weight_in_two_layers, "shares parameters with another module"),
    "down": (one_down_weight_in_two_layers, "shares parameters with another module"),
    "itself": (gate_is_up, "shares parameters with another module"),
    "gradient": (gradient, "patch before training"),
    "gradient of down": (gradient_of_down, "patch before training"),
    "gradient hook": (gradient_hook, "patch before training"),
    **{
        f"{kind} hook on {name}": (hook_on(name, kind), "has hooks on its parts")
        for name in ("gate_proj", "up_proj", "act_fn", "down_proj")
        for kind in ("forward", "pre", "backward")
    },
}


@pytest.mark.parametrize("case", list(LEFT_ALONE))
def test_what_packing_would_lose_is_left_alone(case: str) -> None:
    prepare, said = LEFT_ALONE[case]
    model = tiny_model("llama")
    prepare(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with pytest.warns(UserWarning, match=rf"nothing is patched; e\.g\. model\.layers\.0\.mlp .*{said}"):
        apply_kernel("cpu_fused_swiglu", model=model)
    assert not patched(model)
    assert not isinstance(model, ConvertedModel)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())


@pytest.mark.parametrize("case", ["gradient", "gradient hook", "forward hook on gate_proj"])
def test_the_fusion_leaves_it_alone_too(case: str) -> None:
    prepare, said = LEFT_ALONE[case]
    model = tiny_model("llama")
    prepare(model)
    with pytest.warns(UserWarning, match=f"nothing is patched.*{said}"):
        apply_kernel(FUSION, model=model)
    assert not patched(model)


def freeze(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.requires_grad_(False)


def widen(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.double()


def to_meta(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.to("meta"))


@pytest.mark.parametrize("prepare", [freeze, widen, to_meta])
def test_gate_and_up_of_two_kinds_are_left_alone(prepare: Prepare) -> None:
    """One tensor has one dtype, one device and one requires_grad; the other layer is packed."""
    model = tiny_model("llama")
    prepare(model)
    before = {name: (tensor.dtype, tensor.requires_grad) for name, tensor in model.model.layers[0].named_parameters()}
    apply_default_kernels(model, "cpu_fused_swiglu")
    assert patched(model) == {"model.layers.1.mlp"}
    after = {name: (tensor.dtype, tensor.requires_grad) for name, tensor in model.model.layers[0].named_parameters()}
    assert after == before
    mlp = model.model.layers[0].mlp
    assert GatedMLPLayout.unfit([mlp]) == "gate_proj and up_proj differ in dtype, device or requires_grad"


def test_a_hook_on_the_whole_module_stays() -> None:
    """It is kept with the module, so it does not stand in the way."""
    model, calls = tiny_model("llama"), []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: calls.append(1))
    apply_kernel("cpu_fused_swiglu", model=model)
    assert len(patched(model)) == 2
    calls.clear()
    model(IDS)
    assert len(calls) == 2


# --- the packed module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["cpu_fused_swiglu", FUSION])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_packed_projection_cannot_be_set(kernel: str, name: str) -> None:
    """A library that replaces it would see no error and no effect."""
    model = tiny_model("qwen3")
    apply_kernel(kernel, model=model)
    layer = model.model.layers[0]
    mlp = layer.mlp if kernel == "cpu_fused_swiglu" else layer.post_attention_layernorm.mlp
    before, parts = names(mlp), list(dict(mlp.named_modules()))
    for value in (nn.Linear(32, 48, bias=False), None, 3):
        with pytest.raises(AttributeError, match=f"{name} is packed into gate_up_proj"):
            setattr(mlp, name, value)
    assert names(mlp) == before
    assert list(dict(mlp.named_modules())) == parts
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other.gate_proj.weight, mlp.gate_proj.weight)
        hidden = torch.randn(2, 32)
        assert torch.equal(other(hidden), mlp(hidden))
        with pytest.raises(AttributeError, match="packed into"):
            setattr(other, name, nn.Linear(32, 48))
    mlp.down_proj = nn.Linear(48, 32, bias=False)
    mlp.other = nn.Linear(1, 1)


# --- the user's random state ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "cpu_fused_swiglu", "cpu_fused_rmsnorm", FUSION])
@pytest.mark.parametrize("build", [partial(tiny_model, "qwen3"), partial(tiny_model, "llama"), seed_oss])
def test_patching_draws_nothing(build: Callable[[], Any], kernels: str) -> None:
    model = build()
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every kernel fits
        apply_default_kernels(model.train(), kernels)
    assert torch.equal(torch.get_rng_state(), before)


def test_trying_a_model_leaves_every_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other devices either: what seeds them all cannot be taken back."""
    model = tiny_model("llama", attention_dropout=0.5).train()

    def seed_all(*_: Any) -> None:
        raise AssertionError("the generators of every device are the user's")

    for name in ("manual_seed", "seed"):
        monkeypatch.setattr(torch, name, seed_all)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed_all)
    before = torch.get_rng_state()
    apply_default_kernels(model, "auto")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.kconvert_report.to_dict()["kernels"]["cpu_fused_qkv"] == 2
