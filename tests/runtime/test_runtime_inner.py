"""The model inside the model: it holds packed modules too, and is saved and loaded on its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from kconvert.kernels import apply_default_kernels, apply_kernel
from kconvert.kernels.model import ConvertedModel
from kconvert.runtime import load_converted
from tests.runtime.pairs import IDS, Pair, logits
from tests.support import read_raw, save_tiny

LIVE = ["cpu_fused_swiglu", "cpu_fused_rmsnorm_swiglu", "auto"]


def hidden_states(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).last_hidden_state
    return found


def live(source: Path, kernels: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(source)
    return apply_kernel(kernels, model=model) if "rmsnorm_swiglu" in kernels else apply_default_kernels(model, kernels)


def check_inner_save(model: Any, source: Path, directory: Path) -> None:
    """`model.model` writes the tensors of `source`, bit for bit, under the names of the stock inner model."""
    model.model.save_pretrained(directory)
    expected = {
        name.removeprefix("model."): tensor for name, tensor in read_raw(source).items() if name != "lm_head.weight"
    }
    assert read_raw(directory) == expected
    assert torch.equal(
        hidden_states(AutoModel.from_pretrained(directory)), hidden_states(AutoModel.from_pretrained(source))
    )


def test_a_loaded_inner_model_saves_stock_names(pair: Pair, tmp_path: Path) -> None:
    model = pair.load()
    before = logits(model)
    check_inner_save(model, pair.source, tmp_path)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kernels", LIVE)
def test_a_live_inner_model_saves_stock_names(qwen3: Pair, tmp_path: Path, kernels: str) -> None:
    check_inner_save(live(qwen3.source, kernels), qwen3.source, tmp_path)


def test_kernels_put_into_the_inner_model_alone(qwen3: Pair, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(qwen3.source)
    apply_default_kernels(model.model, "auto")
    assert not isinstance(model, ConvertedModel)
    check_inner_save(model, qwen3.source, tmp_path)
    apply_default_kernels(model, "auto")
    assert ConvertedModel in type(model).__mro__
    assert len(model.kconvert_report.modules) == len(model.model.kconvert_report.modules)
    model.model.save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == read_raw(tmp_path)


def test_an_inner_model_takes_stock_names(pair: Pair) -> None:
    model, stock = pair.load(kernels="reference"), pair.stock()
    state = {name: tensor * 0.5 for name, tensor in stock.model.state_dict().items()}
    result = model.model.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    stock.model.load_state_dict(state)
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("kernels", LIVE)
def test_a_live_inner_model_takes_stock_names(qwen3: Pair, kernels: str) -> None:
    model, stock = live(qwen3.source, kernels), qwen3.stock()
    state = {name: tensor * 0.5 for name, tensor in stock.model.state_dict().items()}
    model.model.load_state_dict(state)
    stock.model.load_state_dict(state)
    torch.testing.assert_close(logits(model), logits(stock), rtol=0, atol=1e-5)


def test_the_outer_model_is_whole(pair: Pair, tmp_path: Path) -> None:
    """Beside a converted inner model: copied, saved in both layouts, and reported on."""
    model = pair.load()
    expected = logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(twin), expected)
    twin.model.save_pretrained(tmp_path / "inner")
    twin.save_pretrained(tmp_path / "stock")
    twin.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert not [name for name in read_raw(tmp_path / "inner") if "gate_up_proj" in name]
    assert read_raw(tmp_path / "stock") == read_raw(pair.source)
    assert read_raw(tmp_path / "packed") == read_raw(pair.converted)
    assert torch.equal(logits(load_converted(tmp_path / "packed")), expected)
    outer, inner = twin.kconvert_report, twin.model.kconvert_report
    assert [module.path for module in outer.modules] == [f"model.{module.path}" for module in inner.modules]


@pytest.mark.parametrize("kernels", LIVE)
def test_the_outer_live_model_is_whole(qwen3: Pair, tmp_path: Path, kernels: str) -> None:
    model = live(qwen3.source, kernels)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    twin.save_pretrained(tmp_path)
    assert read_raw(tmp_path) == read_raw(qwen3.source)


def test_a_model_built_from_the_class_of_a_live_one_is_stock(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3")
    patched = live(source, "auto")
    for model, stock in ((patched, qwen3_class(source)), (patched.model, AutoModel)):
        fresh = type(model)(model.config)
        assert fresh.kconvert_report.modules == ()
        assert not [name for name in fresh.state_dict() if "gate_up_proj" in name]
        fresh.load_state_dict(stock.from_pretrained(source).state_dict())
        directory = tmp_path / type(model).__name__
        fresh.save_pretrained(directory)
        assert sorted(read_raw(directory)) == sorted(fresh.state_dict())
        again = stock.from_pretrained(directory).eval()
        with torch.no_grad():
            assert torch.equal(again(IDS)[0], fresh.eval()(IDS)[0])


def qwen3_class(source: Path) -> type[Any]:
    """The stock class of a source directory's model."""
    return type(AutoModelForCausalLM.from_pretrained(source))
