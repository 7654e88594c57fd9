"""Experts that are stored transposed: the bits of the stock forward, its gradients, and what other code sees of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kconvert.kernels import apply_default_kernels, apply_kernel
from kconvert.kernels.ops.experts.layout import ExpertsLayout
from kconvert.kernels.ops.experts_transposed.layout import TransposedExpertsLayout
from tests.kernels.test_kernels_experts import IDS, assert_near, inputs, stock
from tests.support import tiny_model

KERNEL = "cpu_fused_moe_transposed"


def patched(module: nn.Module) -> Any:
    return TransposedExpertsLayout.patch([copy.deepcopy(module)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [Qwen3MoeExperts, MixtralExperts])
def test_the_reference_gives_the_bits_of_stock_and_its_gradients(cls: Any, dtype: torch.dtype) -> None:
    module = stock(cls, dtype=dtype)
    packed = patched(module)
    args = inputs(module, dtype=dtype)
    leaf, other = (args[0].clone().requires_grad_() for _ in range(2))
    found, expected = packed.reference(leaf, *args[1:]), module(other, *args[1:])
    assert torch.equal(found, expected)
    for out in (found, expected):
        out.square().sum().backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert torch.equal(leaf.grad, other.grad)
    for name, weight in module.named_parameters():
        turned = packed.get_parameter(f"{name}_transposed").grad
        assert torch.equal(turned.transpose(1, 2), weight.grad)


def test_what_it_holds_and_what_stock_code_sees() -> None:
    module = stock(Qwen3MoeExperts)
    module.gate_up_proj.requires_grad_(False)
    packed = patched(module)
    names = [name for name, _ in packed.named_parameters()]
    assert names == ["gate_up_proj_transposed", "down_proj_transposed"]
    assert not packed.gate_up_proj_transposed.requires_grad
    for name in ("gate_up_proj", "down_proj"):
        seen, stored = getattr(packed, name), packed.get_parameter(f"{name}_transposed")
        assert torch.equal(seen, getattr(module, name))
        assert seen.data_ptr() == stored.data_ptr()
        assert stored.is_contiguous()
        with pytest.raises(AttributeError, match=f"{name} is stored as {name}_transposed and cannot be set"):
            setattr(packed, name, nn.Parameter(torch.ones(1)))
        stored._is_hf_initialized = True
        assert getattr(packed, name)._is_hf_initialized
    args = inputs(module)
    for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(twin.reference(*args), module(*args))


def test_on_meta_nothing_is_made() -> None:
    packed = TransposedExpertsLayout.patch([stock(Qwen3MoeExperts).to("meta")])
    assert packed.gate_up_proj_transposed.is_meta
    assert packed.gate_up_proj_transposed.shape == (5, 32, 48)
    assert packed.down_proj_transposed.shape == (5, 24, 32)


def test_a_class_that_has_them_so_is_refused() -> None:
    reason = "has its weights transposed already: the layout for it is 'experts'"
    assert TransposedExpertsLayout.unfit([stock(GptOssExperts)]) == reason
    # square, so that the shapes say nothing
    square = stock(GptOssExperts, hidden_size=32, moe_intermediate_size=16)
    assert TransposedExpertsLayout.unfit([square]) == reason
    for cls in (Qwen3MoeExperts, MixtralExperts):
        assert TransposedExpertsLayout.unfit([stock(cls, hidden_size=32, moe_intermediate_size=16)]) is None


def test_the_gate_is_proven_and_only_the_form_differs() -> None:
    module = stock(Qwen3MoeExperts)
    ours = patched(module).kconvert_variant[0]
    theirs = cast("Any", ExpertsLayout.patch([copy.deepcopy(module)])).kconvert_variant[0]
    assert (theirs.is_transposed, ours) == (False, theirs._replace(is_transposed=True))


def test_a_live_model_gets_it_where_it_is_named_and_never_by_default() -> None:
    model, named = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    with torch.no_grad():
        expected = model(IDS).logits
    apply_default_kernels(model, "auto")
    layouts = {module["layout"] for module in model.kconvert_report.to_dict()["modules"]}
    assert "experts" in layouts
    assert "experts_transposed" not in layouts
    apply_kernel(KERNEL, model=named)
    assert named.kconvert_report.to_dict()["kernels"] == {KERNEL: 1}
    with torch.no_grad():
        assert_near(named(IDS).logits, expected, 2e-6)


def test_training_reaches_the_stored_weights() -> None:
    stock_model, model = tiny_model("qwen3_moe").train(), tiny_model("qwen3_moe").train()
    apply_kernel(KERNEL, model=model)
    for each in (stock_model, model):
        each(IDS, labels=IDS, use_cache=False).loss.backward()
    theirs = dict(stock_model.named_parameters())
    turned = 0
    for name, weight in model.named_parameters():
        expected = theirs[name.removesuffix("_transposed")].grad
        if name.endswith("_transposed"):
            expected = expected.transpose(1, 2)
            turned += 1
        assert_near(weight.grad, expected, 1e-5)
    assert turned == 2
