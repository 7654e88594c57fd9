"""Groups that a checkpoint holds joined already, and models in which only some layers have a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from kconvert.errors import CheckpointError, ManifestError, RecipeError
from kconvert.runtime import load_converted
from tests.support import check_refused, convert, qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe

MLP = """\
  - kernel: cpu_fused_swiglu
    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
QKV = """\
  - kernel: cpu_fused_qkv
    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}
"""


def _joined(directory: Path, module: str, parts: tuple[str, ...], target: str) -> Path:
    """A Qwen3 checkpoint in which somebody has joined `parts` of `module` in every layer."""
    tensors = qwen3_tensors()
    for layer in range(2):
        prefix = f"model.layers.{layer}.{module}"
        sources = [tensors.pop(f"{prefix}.{part}.weight") for part in parts]
        tensors[f"{prefix}.{target}.weight"] = torch.cat(sources)
    return write_checkpoint(directory, tensors, qwen3_config())


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj"), ("up_proj", "gate_proj")])
def test_a_joined_group_that_the_model_class_does_not_have_is_refused(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Its order cannot be told: gate first or up first are the same shape."""
    source = _joined(tmp_path / "source", "mlp", parts, "gate_up_proj")
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    words = ["'model.layers.0.mlp.gate_up_proj.weight' is no tensor of the model"]
    check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "out")
    converted = convert(recipe, source, tmp_path / "unchecked", model_check=False).output
    with pytest.raises(ManifestError, match=r"no tensor 'model\.layers\.0\.mlp\.gate_up_proj\.weight'"):
        load_converted(converted)


def test_joined_attention_projections_are_left_to_their_model(tmp_path: Path) -> None:
    source = _joined(tmp_path / "source", "self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    recipe = write_recipe(tmp_path / "r.yaml", QKV)
    for number, check in enumerate((True, False)):
        words = ["'model.layers.0.self_attn.qkv_proj.weight' is stored packed", "pass through as they are"]
        check_refused(RecipeError, 3, words, recipe, source, tmp_path / f"out{number}", model_check=check)


@pytest.fixture
def moe_dir(tmp_path: Path) -> Path:
    """Layer 0 dense, layer 1 with 12 experts, in module names."""
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_experts=12,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "moe", save_original_format=False)
    return tmp_path / "moe"


def test_dense_layers_of_a_moe_model_are_packed_and_experts_are_left(tmp_path: Path, moe_dir: Path) -> None:
    patches = MLP.replace("Qwen3MLP", "Qwen3MoeMLP").replace("*", "{0}") + QKV.replace("Qwen3", "Qwen3Moe")
    recipe = write_recipe(tmp_path / "r.yaml", patches, model_type="qwen3_moe")
    output = convert(recipe, moe_dir, tmp_path / "out").output
    before, after = read_raw(moe_dir), read_raw(output)
    assert after["model.layers.0.mlp.gate_up_proj.weight"].shape == (24, 8)
    assert before["model.layers.1.mlp.experts.gate_up_proj"].shape == (12, 12, 8)
    same = {name for name in before if ".experts." in name or ".mlp.gate." in name}
    assert len(same) == 3
    assert all(after[name] == before[name] for name in same)
    ids = torch.tensor([[1, 2, 3, 4]])
    eager: Any = {"experts_implementation": "eager"}  # the other ways want rows of whole 16 bytes
    stock, model = AutoModelForCausalLM.from_pretrained(moe_dir, **eager), load_converted(output, **eager)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)


def test_a_pattern_that_takes_both_kinds_of_layers_is_an_error(tmp_path: Path, moe_dir: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", MLP.replace("Qwen3MLP", "Qwen3MoeMLP"), model_type="qwen3_moe")
    words = ["'model.layers.1.mlp' is a Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP"]
    check_refused(RecipeError, 3, words, recipe, moe_dir, tmp_path / "out")
