"""Weights and code that adapter libraries put on projections: applied where they can be, refused where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.kernels import apply_default_kernels
from tests.runtime.pairs import Pair, logits
from tests.support import tiny_model


class Lora(nn.Module):
    """As PEFT wraps a linear layer: its attributes, and its result plus a delta."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer: Any = base
        generator = torch.Generator().manual_seed(7)
        self.delta = nn.Parameter(0.1 * torch.randn(base.weight.shape, generator=generator).to(base.weight.dtype))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias  # type: ignore[no-any-return]

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features  # type: ignore[no-any-return]

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features  # type: ignore[no-any-return]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + hidden @ self.delta.T  # type: ignore[no-any-return]


def wrap(mlp: Any) -> None:
    mlp.gate_up_proj = Lora(mlp.gate_up_proj)


def hook(mlp: Any) -> None:
    mlp.gate_up_proj.register_forward_hook(lambda module, args, output: output * 1.5)


def pre_hook(mlp: Any) -> None:
    mlp.gate_up_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def own_forward(mlp: Any) -> None:
    linear = mlp.gate_up_proj
    linear.forward = lambda hidden: 1.5 * nn.Linear.forward(linear, hidden)


CHANGES = [wrap, hook, pre_hook, own_forward]


# --- what is around a packed projection ---------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_the_reference_shows_what_is_around_a_packed_projection(pair: Pair, change: Any) -> None:
    reference, auto = pair.load(kernels="reference"), pair.load()
    for model in (reference, auto):
        for layer in (0, 1):
            change(model.get_submodule(pair.mlp(layer)))
    found, plain = logits(reference), logits(pair.stock())
    assert (found - plain).abs().max() > 0.01
    torch.testing.assert_close(found, logits(auto), rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_the_reference_is_that_of_the_stock_model_with_the_same_change(qwen3: Pair, change: Any) -> None:
    """Not only the same as the kernel, which goes through the packed projection too."""
    model, stock = qwen3.load(kernels="reference"), qwen3.stock()
    mlp, theirs = model.get_submodule(qwen3.mlp(0)), stock.model.layers[0].mlp
    change(mlp)
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate, up = mlp.gate_up_proj(hidden).chunk(2, dim=-1)
        expected = theirs.down_proj(theirs.act_fn(gate) * up)
        assert not torch.allclose(expected, theirs(hidden))
        torch.testing.assert_close(mlp(hidden), expected, rtol=0, atol=1e-5)


def test_a_hook_that_is_taken_away_leaves_the_stock_bits(pair: Pair) -> None:
    model, expected = pair.load(kernels="reference"), logits(pair.stock())
    assert torch.equal(logits(model), expected)
    linear = model.get_submodule(pair.mlp(0)).gate_up_proj
    handle = linear.register_forward_hook(lambda module, args, output: output * 1.5)
    assert not torch.equal(logits(model), expected)
    handle.remove()
    assert torch.equal(logits(model), expected)


def test_gradients_reach_a_wrapper_through_the_reference(pair: Pair) -> None:
    model = pair.load(kernels="reference")
    mlp = model.get_submodule(pair.mlp(1))
    wrap(mlp)
    model.requires_grad_(False)
    mlp.gate_up_proj.delta.requires_grad_(True)
    model(input_ids=torch.tensor([[3, 1, 4]])).logits.sum().backward()
    assert mlp.gate_up_proj.delta.grad.abs().max() > 0


# --- weights of adapters ------------------------------------------------------------------------------


KEY = "model.layers.{}.mlp.{}.lora_{}.default.weight"


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_weights_for_a_packed_projection_are_refused(pair: Pair, name: str) -> None:
    """Silently dropped, an adapter would be applied in part."""
    model = pair.load()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {KEY.format(1, name, "A"): torch.zeros(2, 32), "model.norm.weight": torch.zeros(32)}
    with pytest.raises(UsageError, match=rf"'model\.layers\.1\.mlp\.{name}', which is packed"):
        model.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["base_layer.weight", "lora_embedding_A.default", "qweight"])
def test_any_name_below_a_packed_projection_is_refused(pair: Pair, kind: str) -> None:
    with pytest.raises(UsageError, match="gate_proj"):
        pair.load().load_state_dict({f"model.layers.0.mlp.gate_proj.{kind}": torch.zeros(1)}, strict=False)


def test_weights_are_refused_in_the_inner_model_too(pair: Pair) -> None:
    key = KEY.format(0, "gate_proj", "A").removeprefix("model.")
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.gate_proj"):
        pair.load().model.load_state_dict({key: torch.zeros(2, 32)}, strict=False)


def wrapped(model: nn.Module) -> nn.Module:
    """As in PEFT: `base_model.model` is the model."""
    outer, base = nn.Module(), nn.Module()
    base.model = model
    outer.base_model = base
    return outer


def test_weights_are_refused_below_a_wrapper(pair: Pair) -> None:
    outer = wrapped(pair.load())
    key = f"base_model.model.{KEY.format(0, 'gate_proj', 'B')}"
    with pytest.raises(UsageError, match=r"'base_model\.model\.model\.layers\.0\.mlp\.gate_proj'"):
        outer.load_state_dict({key: torch.zeros(48, 2)}, strict=False)


def test_weights_for_other_projections_pass(pair: Pair) -> None:
    model, key = pair.load(), "model.layers.0.self_attn.o_proj.lora_A.default.weight"
    expected = logits(model)
    assert model.load_state_dict({key: torch.zeros(2, 64)}, strict=False).unexpected_keys == [key]
    outer_key = f"base_model.model.{key}"
    result = wrapped(model).load_state_dict({outer_key: torch.zeros(2, 64)}, strict=False)
    assert result.unexpected_keys == [outer_key]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_both_kinds_of_names_pass(pair: Pair, strict: bool) -> None:
    model, stock = pair.load(kernels="reference"), pair.stock()
    original = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    states = (original, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert [any("gate_up_proj" in name for name in state) for state in states] == [False, True]
    factor = 1.0
    for state in states:
        for target, prefix in ((model, ""), (wrapped(model), "base_model.model.")):
            factor *= 0.5
            result = target.load_state_dict(
                {f"{prefix}{name}": tensor * factor for name, tensor in state.items()}, strict=strict
            )
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            stock.load_state_dict({name: tensor * factor for name, tensor in original.items()})
            assert torch.equal(logits(model), logits(stock))


# --- shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shape", [(47, 32), (48, 31), (49, 32), (48,), (1, 32), ()], ids=str)
def test_a_part_of_another_shape_is_refused(pair: Pair, shape: tuple[int, ...], strict: bool) -> None:
    """The complete group: two wrong parts may even add up to the right whole."""
    model = pair.load()
    packed = model.get_parameter(f"{pair.mlp(0)}.gate_up_proj.weight")
    before = packed.detach().clone()
    state = dict(pair.stock().state_dict())
    state["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(shape)
    if shape in ((47, 32), (49, 32)):
        state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96 - shape[0], 32)
    with pytest.raises(UsageError, match=r"size mismatch: 'model\.layers\.0\.mlp\.gate_proj\.weight'"):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("shape", [(47, 32), (48, 31), (1, 32), (1, 1), ()], ids=str)
def test_half_a_group_of_another_shape_is_refused(pair: Pair, shape: tuple[int, ...]) -> None:
    """`copy_` would spread one row, or one number, over all rows."""
    model = pair.load()
    packed = model.get_parameter(f"{pair.mlp(1)}.gate_up_proj.weight")
    before = packed.detach().clone()
    with pytest.raises(UsageError, match="size mismatch"):
        model.load_state_dict({"model.layers.1.mlp.up_proj.weight": torch.zeros(shape)}, strict=False)
    assert torch.equal(packed, before)


def test_a_bias_of_another_shape_is_refused() -> None:
    model = apply_default_kernels(tiny_model("llama", mlp_bias=True), "cpu_fused_swiglu")
    with pytest.raises(UsageError, match=r"gate_proj\.bias' is \[1\], the model has \[48\]"):
        model.load_state_dict({"model.layers.0.mlp.gate_proj.bias": torch.zeros(1)}, strict=False)
