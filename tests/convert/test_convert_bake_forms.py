"""Baking sources of other forms and types: module names that rules match again, stacks that are apart, quantised ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kconvert.convert import apply_recipe
from kconvert.errors import CheckpointError
from kconvert.manifest import load_manifest
from tests.bake.mapped import Subject
from tests.bake.tiny import build_tiny_subject
from tests.support import Kind, bake_recipe, check_refused, raw, read_raw, save_tiny, write_checkpoint

SOURCE_NAME = "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts"


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize(
    ("label", "name", "renamed"),
    [
        (
            "axk1:AXK1ForCausalLM",
            "model.layers.1.mlp.post_mlp_layernorm.weight",
            "model.layers.1.mlp.mlp.post_mlp_layernorm.weight",
        ),
        ("deepseek_v4:DeepseekV4ForCausalLM", "model.norm.weight", "model.kv_norm.weight"),
        (
            "laguna:LagunaForCausalLM",
            "model.layers.1.mlp.shared_experts.up_proj.weight",
            "model.layers.1.mlp.shared_experts..up_proj.weight",
        ),
    ],
)
def test_module_names_that_a_rule_matches_again_stay(label: str, name: str, renamed: str, tmp_path: Path) -> None:
    """A11: a rule would make `renamed` of the model's own `name`, which the model does not have."""
    subject = Subject.from_label(label)
    model = build_tiny_subject(subject)
    model.save_pretrained(tmp_path / "in", save_original_format=False)
    assert name in read_raw(tmp_path / "in")
    assert renamed not in model.state_dict()
    output = apply_recipe(str(bake_recipe(tmp_path, subject.model_type)), tmp_path / "in", tmp_path / "out").output
    assert read_raw(output) == read_raw(tmp_path / "in")
    manifest = load_manifest(output)
    assert {record.op for record in manifest.tensors} == {"copy"}
    assert manifest.carried == ()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_transformers_loads_what_was_only_baked(kind: Kind, tmp_path: Path) -> None:
    """Under the variant, as the model is: its tensors have the names that they have there."""
    save_tiny(tmp_path / "in", kind)
    output = apply_recipe(str(bake_recipe(tmp_path, kind)), tmp_path / "in", tmp_path / "out").output
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    loaded: Any = AutoModelForCausalLM.from_pretrained(output, variant="kconvert", output_loading_info=True)
    model, info = loaded
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]
    wanted = {name: raw(tensor) for name, tensor in stock.state_dict().items()}
    assert {name: raw(tensor) for name, tensor in model.state_dict().items()} == wanted == read_raw(output)


# --- experts in two stacks ------------------------------------------------------------------------------


def test_stacks_that_are_apart_are_joined_where_the_type_has_them(tmp_path: Path) -> None:
    """B20: Step-3.7 stores gate and up of all experts as one tensor each; the model has one of both, gate first."""
    subject = Subject.from_label("step3p7:Step3p7ForConditionalGeneration")
    build_tiny_subject(subject).save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / SOURCE_NAME)
    gate, up = (stored[f"model.layers.1.moe.{name}_proj.weight"] for name in ("gate", "up"))
    assert gate.shape == up.shape == (12, 24, 32)
    output = apply_recipe(str(bake_recipe(tmp_path, "step3p7")), tmp_path / "in", tmp_path / "out").output
    target = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert read_raw(output)[target] == raw(torch.cat([gate, up], dim=1))
    assert load_manifest(output).tensors_by_target()[target].op == "concatenate(1)"


def test_stacks_that_are_apart_are_refused_where_the_type_has_them_not(tmp_path: Path) -> None:
    """B20: what transformers would not load is no source, however plain it is what was meant."""
    save_tiny(tmp_path / "in", "qwen3_moe")
    stored = load_file(tmp_path / "in" / SOURCE_NAME)
    for name in ("gate_proj", "up_proj"):
        numbered = [stored.pop(f"{EXPERTS}.{number}.{name}.weight") for number in range(12)]
        stored[f"{EXPERTS}.{name}"] = torch.stack(numbered)
    source = write_checkpoint(tmp_path / "apart", stored, config_of(tmp_path / "in"))
    words = ["the model needs", f"{EXPERTS}.gate_up_proj", "which the checkpoint does not give"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path, "qwen3_moe"), source, tmp_path / "out")


@pytest.mark.parametrize("missing", [3, 13, 23])
def test_experts_of_text_and_of_images_are_counted_together(missing: int, tmp_path: Path) -> None:
    """A2: 12 of text and 12 of images lie in one list; without the last of it, the halves would be cut elsewhere."""
    subject = Subject.from_label("ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration")
    build_tiny_subject(subject).save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / SOURCE_NAME
    prefix = f"{EXPERTS}.{missing}."
    save_file({name: value for name, value in load_file(path).items() if not name.startswith(prefix)}, path)
    words = ["text_moe.experts.", f"needs '{prefix}", "which the checkpoint does not have"]
    check_refused(
        CheckpointError, 4, words, bake_recipe(tmp_path, subject.model_type), tmp_path / "in", tmp_path / "out"
    )


# --- quantised sources ----------------------------------------------------------------------------------


def test_experts_of_a_quantised_checkpoint_are_not_stacked(tmp_path: Path) -> None:
    """Q8: their scales would have to be stacked with them; nothing is packed here, so the recipe alone allows it."""
    save_tiny(tmp_path / "in", "qwen3_moe")
    config = config_of(tmp_path / "in")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = load_file(tmp_path / "in" / SOURCE_NAME)
    for name in [name for name in stored if ".experts." in name]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.ones(1, 1)
    source = write_checkpoint(tmp_path / "fp8", stored, config)
    words = ["the checkpoint is quantised (fp8), and transformers joins or splits tensors into", f"'{EXPERTS}."]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path, "qwen3_moe"), source, tmp_path / "out")
