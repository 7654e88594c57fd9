"""The structural check: the model that config.json describes, against the checkpoint and the packed result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kconvert import load_converted
from kconvert.errors import CheckpointError
from kconvert.manifest import load_manifest
from kconvert.names import SINGLE_NAME
from tests.support import (
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    save_tiny,
    write_checkpoint,
    write_recipe,
)
from tests.sweep.outcome import aligned

RECIPES = ["qwen3", "qwen3-fused-norm-mlp"]
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def expect_refused(source: Path, *words: str, recipe: str = "qwen3") -> None:
    check_refused(CheckpointError, 4, words, recipe, source, source.parent / "out")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[1, 2, 3]])).logits
    return found


def stock(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory)).eval()


# --- config against file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "intermediate_size",
            13,
            ["'model.layers.0.mlp.down_proj.weight' is [8, 12] in the checkpoint and [8, 13] in the model"],
        ),
        ("head_dim", 2, ["'model.layers.0.self_attn.k_norm.weight' is [4] in the checkpoint and [2] in the model"]),
        ("vocab_size", 11, ["'lm_head.weight' is [10, 8] in the checkpoint and [11, 8] in the model"]),
        ("num_hidden_layers", 3, ["'model.layers.2.self_attn.q_proj.weight'"]),
        ("attention_bias", True, ["the model needs 'model.layers.0.self_attn.o_proj.bias'", "(4 missing)"]),
    ],
)
def test_another_config(tmp_path: Path, key: str, value: Any, words: list[str]) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(**{key: value}))
    expect_refused(source, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": None}, ["config.json names no architecture"]),
        ({"architectures": []}, ["config.json names no architecture"]),
        ({"architectures": ["Qwen9ForCausalLM"]}, ["has no model class Qwen9ForCausalLM"]),
        ({"architectures": ["AutoModelForCausalLM"]}, ["has no model class AutoModelForCausalLM"]),
        ({"architectures": ["os"]}, ["has no model class os"]),
        ({"hidden_act": "no_such_thing"}, ["the model cannot be built from config.json", "no_such_thing"]),
        ({"num_hidden_layers": "two"}, ["the model cannot be built from config.json", "num_hidden_layers"]),
    ],
)
def test_a_config_of_which_no_model_can_be_built(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(**change))
    expect_refused(source, str(source), *words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_proven_goes_into_the_manifest(qwen3_dir: Path, tmp_path: Path, recipe: str) -> None:
    manifest = convert(recipe, qwen3_dir, tmp_path / "out").prepared.manifest
    assert manifest == load_manifest(tmp_path / "out")
    assert manifest.model_checked
    norm = {"Qwen3RMSNorm": {"offset": 0.0, "cast_first": True}}
    for patch in manifest.patches:
        assert patch.facts == (norm if "Qwen3RMSNorm" in patch.classes else None)


def test_without_the_check_nothing_is_claimed_to_be_known(qwen3_dir: Path, tmp_path: Path) -> None:
    checked = convert("qwen3", qwen3_dir, tmp_path / "checked")
    result = convert("qwen3", qwen3_dir, tmp_path / "out", model_check=False)
    manifest = result.prepared.manifest
    assert not manifest.model_checked
    assert [patch.facts for patch in manifest.patches] == [None] * len(manifest.patches)
    assert manifest.carried == ()
    assert manifest.tensors == checked.prepared.manifest.tensors
    assert read_raw(result.output) == read_raw(checked.output)
    assert torch.equal(logits(load_converted(result.output)), logits(load_converted(checked.output)))


# --- tied weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_head_that_is_missing_and_not_tied(tmp_path: Path, recipe: str) -> None:
    """A6 (e): stock transformers would go on with random values."""
    tensors = qwen3_tensors()
    del tensors[HEAD]
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    expect_refused(source, f"the model needs {HEAD!r}, which the checkpoint does not give (1 missing)", recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tied_head_need_not_be_stored(tmp_path: Path, recipe: str) -> None:
    """A6 (b)."""
    source = save_tiny(tmp_path / "in", "qwen3", tie=True)
    assert HEAD not in read_raw(source)
    output = convert(recipe, source, tmp_path / "out").output
    assert HEAD not in read_raw(output)
    model = load_converted(output, kernels="reference")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(stock(source)))


def test_neither_head_nor_embedding(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    del tensors[HEAD], tensors[EMBED]
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(tie_word_embeddings=True))
    expect_refused(source, "the model needs", "which the checkpoint does not give (2 missing)")


def test_a_tied_config_with_two_different_tensors(tmp_path: Path) -> None:
    """A6 (c): both are kept, and loading keeps them apart as stock transformers does."""
    tensors = qwen3_tensors()
    tensors[HEAD] = tensors[EMBED] + 1
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(tie_word_embeddings=True))
    result = convert("qwen3", source, tmp_path / "out")
    output = result.output
    assert [text for text in result.prepared.warnings if HEAD in text and EMBED in text]
    written = read_raw(output)
    assert (written[HEAD], written[EMBED]) == (raw(tensors[HEAD]), raw(tensors[EMBED]))
    assert load_manifest(output).carried == ()
    model = load_converted(output)
    assert torch.equal(model.lm_head.weight, tensors[HEAD])
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBED])


# --- tensors that the model does not have ---------------------------------------------------------------------


def test_extra_tensors_are_carried_and_listed(tmp_path: Path) -> None:
    extra = {
        "model.layers.2.mlp.gate_proj.weight": torch.randn(12, 8),  # an MTP layer: the config says two layers
        "model.layers.2.eh_proj.weight": torch.randn(8, 16).bfloat16(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 0.01]),
        "draft.scale": torch.tensor(3, dtype=torch.int32),
    }
    source = write_checkpoint(tmp_path / "in", {**extra, **qwen3_tensors()}, qwen3_config())
    output = convert("qwen3", source, tmp_path / "out").output
    written, manifest = read_raw(output), load_manifest(output)
    assert {name: written[name] for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    assert manifest.carried == tuple(sorted(extra))
    assert {name for name, record in manifest.tensors_by_target().items() if record.op == "copy"} >= set(extra)
    model = load_converted(output)
    # B18: the stored buffer is not taken for the model's own, which is computed, and nothing is left on meta
    assert torch.equal(model.model.rotary_emb.inv_freq, stock(source).model.rotary_emb.inv_freq)
    assert [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta] == []


def test_a_tensor_inside_a_claimed_module_must_have_a_place(tmp_path: Path) -> None:
    stray = "model.layers.1.mlp.router.weight"
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), stray: torch.zeros(1)}, qwen3_config())
    expect_refused(source, "layout 'gated_mlp' of 'model.layers.1.mlp' has no place for", stray)


# --- names that transformers changes ----------------------------------------------------------------------------


def test_a_base_model_checkpoint(tmp_path: Path) -> None:
    """Saved without the `model.` prefix: the output has module names, the manifest both."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in qwen3_tensors().items()}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    plain = write_checkpoint(tmp_path / "plain", qwen3_tensors(), qwen3_config())
    output = convert("qwen3", source, tmp_path / "out").output
    assert read_raw(output) == read_raw(convert("qwen3", plain, tmp_path / "out2").output)
    parts = [part for record in load_manifest(output).tensors for part in record.parts]
    assert {part.source: [origin.file_name for origin in part.origins] for part in parts} == {
        name: [name.removeprefix("model.")] for name in qwen3_tensors()
    }
    model = load_converted(output, kernels="reference")
    assert torch.equal(logits(model), logits(stock(source)))


def test_a_base_model_class(tmp_path: Path) -> None:
    """The other way: `Qwen3Model` has no prefix, whatever the file says, and the recipe is told so."""
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(architectures=["Qwen3Model"]))
    with pytest.raises(ValueError, match=r"did you mean layers\.\*\.input_layernorm") as caught:
        convert("qwen3", source, tmp_path / "out")
    assert getattr(caught.value, "exit_code", None) == 3
    patch = '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", patch)
    output = convert(recipe, source, tmp_path / "out").output
    written = read_raw(output)
    assert "layers.1.mlp.gate_up_proj.weight" in written
    assert load_manifest(output).carried == (HEAD,)
    assert type(load_converted(output)).__name__ == "Qwen3Model"


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = {**qwen3_tensors(), "norm.weight": torch.zeros(8)}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    expect_refused(source, "tensors 'model.norm.weight' and 'norm.weight' are both 'model.norm.weight' in the model")


def test_a_type_whose_experts_transformers_joins(tmp_path: Path) -> None:
    """Mixtral's file names are not its module names: w1 is gate and w3 is up, and both are in the stack of all experts."""
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    layer = "model.layers.0"
    tensors = {name: torch.ones(10, 8) for name in (EMBED, HEAD)}
    tensors |= {f"{layer}.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"}
    tensors |= {
        f"{name}.weight": torch.ones(8)
        for name in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    }
    tensors[f"{layer}.block_sparse_moe.gate.weight"] = torch.ones(2, 8)
    for expert in range(2):
        for name, shape in (("w1", (12, 8)), ("w2", (8, 12)), ("w3", (12, 8))):
            value = float(name[1:]) + 10 * expert
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = torch.full(shape, value)
    source = write_checkpoint(tmp_path / "in", tensors, config)
    assert torch.isfinite(logits(stock(source))).all()  # transformers itself loads it
    patch = '  - kernel: cpu_fused_rmsnorm\n    replace: {class: MixtralRMSNorm, path: "model.norm"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", patch, model_type="mixtral")
    output = convert(recipe, source, tmp_path / "out").output
    written = load_file(output / SINGLE_NAME)
    gate_up, down = (written[f"{layer}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert gate_up[:, :12].flatten(1).unique(dim=1).tolist() == [[1], [11]]
    assert gate_up[:, 12:].flatten(1).unique(dim=1).tolist() == [[3], [13]]
    assert down.flatten(1).unique(dim=1).tolist() == [[2], [12]]
    assert not [name for name in written if "block_sparse_moe" in name]
    model = load_converted(output, kernels="reference")
    assert torch.equal(logits(aligned(model)), logits(aligned(stock(source))))
    model.save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == {name: raw(tensor) for name, tensor in tensors.items()}


# --- other structures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_biases_are_packed_too(tmp_path: Path, kernels: str) -> None:
    source = save_tiny(tmp_path / "in", "llama", mlp_bias=True, attention_bias=True)
    before = read_raw(source)
    output = convert("llama", source, tmp_path / "out").output
    packed = read_raw(output)["model.layers.1.mlp.gate_up_proj.bias"]
    gate, up = (before[f"model.layers.1.mlp.{name}_proj.bias"] for name in ("gate", "up"))
    assert (packed.shape, packed.data) == ((96,), gate.data + up.data)
    assert packed.data != bytes(len(packed.data))
    torch.testing.assert_close(
        logits(load_converted(output, kernels=kernels)), logits(stock(source)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_gives_the_stock_logits(qwen3_sharded_dir: Path, tmp_path: Path, recipe: str) -> None:
    output = convert(recipe, qwen3_sharded_dir, tmp_path / "out").output
    assert torch.equal(logits(load_converted(output, kernels="reference")), logits(stock(qwen3_sharded_dir)))


def test_the_index_may_be_named_by_the_config(tmp_path: Path) -> None:
    names = list(qwen3_tensors())
    config = qwen3_config(transformers_weights="mine.safetensors.index.json")
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config, [names[:9], names[9:]])
    (source / "model.safetensors.index.json").rename(source / "mine.safetensors.index.json")
    output = convert("qwen3", source, tmp_path / "out").output
    assert not list(output.glob("*.index.json"))
    weight_map = json.loads((output / "model.safetensors.index.kconvert.json").read_bytes())["weight_map"]
    assert set(weight_map) == set(read_raw(output))
    assert torch.equal(load_converted(output).lm_head.weight, qwen3_tensors()[HEAD])
