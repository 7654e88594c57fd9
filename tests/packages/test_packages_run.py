"""Two-class packages end to end: converted, loaded, computed, saved, trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.names import KERNELS_DIR, MANIFEST_NAME, SINGLE_NAME, STOCK_SINGLE_NAME
from tests.packages.helpers import CUSTOM, FUSED, NORM, fuse, load, logits, replace, run_recipe, stock, write_package
from tests.support import read_raw

LAYERS = (0, 1)
ENTRIES = {"replace": replace(), "fuse": fuse(), "both": replace() + fuse()}


def _kernels(model: Any) -> dict[str, str]:
    return {module.path: module.kernel for module in model.kconvert_report.modules}


def _expected_kernels(entry: str, layers: tuple[int, ...] = LAYERS) -> dict[str, str]:
    expected = {}
    for layer in layers:
        if entry in ("replace", "both"):
            expected[f"model.layers.{layer}.input_layernorm"] = CUSTOM
        if entry in ("fuse", "both"):
            expected[f"model.layers.{layer}.post_attention_layernorm"] = FUSED
    return expected


def _check_fused_tensors(source: Path, output: Path) -> None:
    before, after = read_raw(source), read_raw(output)
    for layer in LAYERS:
        mlp, target = f"model.layers.{layer}.mlp", f"model.layers.{layer}.post_attention_layernorm"
        packed = after[f"{target}.gate_up_proj.weight"]
        gate, up = before[f"{mlp}.gate_proj.weight"], before[f"{mlp}.up_proj.weight"]
        assert packed.data == gate.data + up.data
        assert packed.shape == (gate.shape[0] + up.shape[0], gate.shape[1])
        assert after[f"{target}.scale"] == before[f"{target}.weight"]
        assert after[f"{target}.down_proj.weight"] == before[f"{mlp}.down_proj.weight"]
        assert not [name for name in after if name.startswith(f"{mlp}.")]


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_float32_logits_are_those_of_the_stock_model(entry: str, packages: Path, qwen3_dir: Path) -> None:
    output = run_recipe(packages, ENTRIES[entry], qwen3_dir)
    model, expected = load(output), logits(stock(qwen3_dir))
    assert _kernels(model) == _expected_kernels(entry)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), expected)


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_bfloat16_stays_bfloat16(entry: str, packages: Path, qwen3_bf16_dir: Path) -> None:
    output = run_recipe(packages, ENTRIES[entry], qwen3_bf16_dir)
    model, expected = load(output), logits(stock(qwen3_bf16_dir))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=5e-2 * float(expected.abs().max()))
    assert torch.equal(logits(load(output, kernels="reference")), expected)


def test_sharded_source_gives_the_same_tensors_and_logits(packages: Path, qwen3_sharded_dir: Path) -> None:
    assert len(list(qwen3_sharded_dir.glob("*.safetensors"))) > 1
    output = run_recipe(packages, ENTRIES["both"], qwen3_sharded_dir)
    _check_fused_tensors(qwen3_sharded_dir, output)
    torch.testing.assert_close(logits(load(output)), logits(stock(qwen3_sharded_dir)), rtol=0, atol=1e-5)


def test_tensors_carry_the_bytes_of_their_sources(converted_both_dir: Path, qwen3_dir: Path) -> None:
    _check_fused_tensors(qwen3_dir, converted_both_dir)
    before, after = read_raw(qwen3_dir), read_raw(converted_both_dir)
    for layer in LAYERS:
        norm = f"model.layers.{layer}.input_layernorm"
        assert after[f"{norm}.scale"] == before[f"{norm}.weight"]
        assert f"{norm}.weight" not in after
    untouched = [name for name in before if "self_attn" in name or "layers" not in name]
    assert len(untouched) > 10
    assert all(after[name] == before[name] for name in untouched)


def test_one_layer_only(packages: Path, qwen3_dir: Path) -> None:
    patches = replace(path="model.layers.{1}.input_layernorm") + fuse(layers="{1}")
    model, plain = load(run_recipe(packages, patches, qwen3_dir)), stock(qwen3_dir)
    assert _kernels(model) == _expected_kernels("both", (1,))
    for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
        assert type(model.model.layers[0].get_submodule(name)) is type(plain.model.layers[0].get_submodule(name))
    assert type(model.model.layers[1].input_layernorm) is not type(plain.model.layers[1].input_layernorm)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)


def test_two_fusions_under_one_parent_class_both_run(packages: Path, qwen3_dir: Path) -> None:
    model = load(run_recipe(packages, fuse(layers="0") + fuse(layers="1"), qwen3_dir))
    assert _kernels(model) == _expected_kernels("fuse")
    for layer in model.model.layers:
        assert type(layer.post_attention_layernorm).__name__ == "RMSNormMLPLayout"
        assert type(layer.mlp) is nn.Identity


def test_modules_in_the_tree(converted_both_dir: Path, qwen3_dir: Path) -> None:
    model, plain = load(converted_both_dir), stock(qwen3_dir)
    for layer, stock_layer in zip(model.model.layers, plain.model.layers, strict=True):
        assert type(layer.mlp) is nn.Identity
        assert list(dict(layer.input_layernorm.named_parameters())) == ["scale"]
        assert layer.input_layernorm.eps == stock_layer.input_layernorm.variance_epsilon
        # transformers looks modules up by class: a replacement is still one of the class it replaces
        assert isinstance(layer.input_layernorm, type(stock_layer.input_layernorm))
        assert type(layer.input_layernorm).__qualname__ == "Qwen3RMSNorm"
        assert type(layer.input_layernorm).__module__ == type(stock_layer.input_layernorm).__module__
    assert not model.training
    assert not any(module.training for module in model.modules())


def test_the_report_names_the_package_and_its_layout(converted_both_dir: Path) -> None:
    data = load(converted_both_dir).kconvert_report.to_dict()
    assert data["kernels"] == {CUSTOM: 2, FUSED: 2}
    assert {(module["class"], module["layout"]) for module in data["modules"]} == {
        ("Qwen3RMSNorm", "CustomRMSNormLayout"),
        ("RMSNormMLPLayout", "RMSNormMLPLayout"),
    }
    assert all(module["trace"][0]["accepted"] for module in data["modules"])
    data = load(converted_both_dir, kernels="reference").kconvert_report.to_dict()
    assert data["kernels"] == {"reference": 4}


def test_kernels_named_one_by_one(converted_both_dir: Path, qwen3_dir: Path) -> None:
    model = load(converted_both_dir, kernels=[FUSED])
    assert set(_kernels(model).values()) == {FUSED, "reference"}
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_another_load_of_the_class_is_stock(converted_both_dir: Path, qwen3_dir: Path) -> None:
    expected = logits(stock(qwen3_dir))
    load(converted_both_dir)
    plain = stock(qwen3_dir)
    assert type(plain).__mro__[0].__module__ == "transformers.models.qwen3.modeling_qwen3"
    assert not [path for path, module in plain.named_modules() if "kconvert_dispatch" in vars(module)]
    assert torch.equal(logits(plain), expected)


def test_saved_in_the_stock_layout(converted_both_dir: Path, qwen3_dir: Path, tmp_path: Path) -> None:
    load(converted_both_dir).save_pretrained(tmp_path)
    assert (tmp_path / STOCK_SINGLE_NAME).is_file()
    assert read_raw(tmp_path) == read_raw(qwen3_dir)
    assert torch.equal(logits(stock(tmp_path)), logits(stock(qwen3_dir)))


def test_saved_packed_with_its_vendored_code(converted_both_dir: Path, qwen3_dir: Path, tmp_path: Path) -> None:
    load(converted_both_dir).save_pretrained(tmp_path, variant="kconvert")
    assert {path.name for path in tmp_path.iterdir()} >= {SINGLE_NAME, MANIFEST_NAME, KERNELS_DIR}
    vendored = {path.relative_to(tmp_path) for path in (tmp_path / KERNELS_DIR).rglob("*") if path.is_file()}
    assert len(vendored) == 2
    assert {path.name for path in vendored} == {"layers.py"}
    again = load(tmp_path)
    assert _kernels(again) == _expected_kernels("both")
    torch.testing.assert_close(logits(again), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_deepcopy_is_independent_and_runs_the_same_kernels(converted_both_dir: Path) -> None:
    model = load(converted_both_dir)
    expected, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin), expected)
    assert _kernels(twin) == _kernels(model)
    reference = copy.deepcopy(load(converted_both_dir, kernels="reference"))
    torch.testing.assert_close(logits(reference), expected, rtol=0, atol=1e-5)


def test_training_reaches_every_parameter_with_the_stock_gradients(converted_both_dir: Path, qwen3_dir: Path) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    model, plain = load(converted_both_dir).train(), stock(qwen3_dir).train()
    model(input_ids=ids, labels=ids).loss.backward()
    plain(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    ours, theirs = model.model.layers[0], plain.model.layers[0]
    fused = ours.post_attention_layernorm
    for found, expected in (
        (ours.input_layernorm.scale.grad, theirs.input_layernorm.weight.grad),
        (fused.scale.grad, theirs.post_attention_layernorm.weight.grad),
        (fused.gate_up_proj.weight.grad[:48], theirs.mlp.gate_proj.weight.grad),
        (fused.gate_up_proj.weight.grad[48:], theirs.mlp.up_proj.weight.grad),
        (fused.down_proj.weight.grad, theirs.mlp.down_proj.weight.grad),
    ):
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_a_step_of_training_lowers_the_loss_and_is_saved(converted_both_dir: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    model = load(converted_both_dir).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    model.eval().save_pretrained(tmp_path)
    torch.testing.assert_close(logits(stock(tmp_path)), logits(model), rtol=0, atol=1e-5)


def test_stock_names_load_into_the_packed_model(converted_both_dir: Path, qwen3_dir: Path) -> None:
    model = load(converted_both_dir)
    expected = logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.equal(logits(model), expected)
    model.load_state_dict(stock(qwen3_dir).state_dict())
    assert torch.equal(logits(model), expected)


def test_packed_names_load_and_weights_of_adapters_do_not(converted_both_dir: Path, qwen3_dir: Path) -> None:
    """A renamed norm keeps its module: only the projections have lost theirs."""
    model, expected = load(converted_both_dir, kernels="reference"), stock(qwen3_dir)
    for factor, state in ((0.5, expected.state_dict()), (0.5, model.state_dict())):
        values = {name: tensor * factor for name, tensor in state.items()}
        for strict in (True, False):
            result = model.load_state_dict(values, strict=strict)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert "model.layers.0.input_layernorm.scale" in model.state_dict()
    expected.load_state_dict({name: tensor * 0.25 for name, tensor in expected.state_dict().items()})
    assert torch.equal(logits(model), logits(expected))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.lora_A.default.weight"
        with pytest.raises(UsageError, match=rf"'model\.layers\.1\.mlp\.{name}', which is packed"):
            model.load_state_dict({key: torch.zeros(2, 32)}, strict=False)
    for key in ("model.layers.1.self_attn.o_proj.lora_A.default.weight", "model.layers.1.input_layernorm.other"):
        assert model.load_state_dict({key: torch.zeros(2, 32)}, strict=False).unexpected_keys == [key]


def test_an_inner_model_saves_stock_names(converted_both_dir: Path, qwen3_dir: Path, tmp_path: Path) -> None:
    model, source = load(converted_both_dir), read_raw(qwen3_dir)
    model.model.save_pretrained(tmp_path)
    expected = {name.removeprefix("model."): value for name, value in source.items() if name != "lm_head.weight"}
    assert read_raw(tmp_path) == expected
    model.model.load_state_dict(stock(qwen3_dir).model.state_dict())
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_loading_draws_nothing(tmp_path: Path, qwen3_dir: Path) -> None:
    """Not even where a layout's buffer is made again, and its `__init__` draws."""
    noisy = NORM.replace("self.eps = eps", "self.eps = eps; self.noise = torch.rand(3)")
    write_package(tmp_path, noisy)
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    before = torch.get_rng_state()
    model = load(output)
    assert model.model.layers[0].input_layernorm.noise.device.type == "cpu"
    assert torch.equal(torch.get_rng_state(), before)
