"""Fusions are proven by watching one forward: a norm that somebody else reads too is never fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.errors import RecipeError
from kconvert.kernels.dataflow import check_chains
from tests.support import check_refused, convert, save_tiny, write_recipe

SIZES = {
    "hidden_size": 32,
    "n_embd": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_hidden_size": 48,
    "head_dim": 8,
    "rotary_dim": 4,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def meta_model(model_type: str, **kw: Any) -> Any:
    """A causal model of two layers on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM

    default: Any = AutoConfig.for_model(model_type)
    known = {key: value for key, value in SIZES.items() if key in default.to_dict()}
    config = AutoConfig.for_model(model_type, **{**known, **kw})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "qwen2", "mistral", "gpt_neox", "gemma", "glm", "granite", "phi3"]
)
def test_norms_that_only_the_mlp_reads(model_type: str) -> None:
    model = meta_model(model_type)
    layers = "gpt_neox.layers" if model_type == "gpt_neox" else "model.layers"
    chains = [[f"{layers}.{n}.post_attention_layernorm", f"{layers}.{n}.mlp"] for n in range(2)]
    assert check_chains(model, chains) == [None, None]


@pytest.mark.parametrize(
    ("model_type", "layer", "norm"),
    [
        ("cohere", "model.layers", "input_layernorm"),
        ("cohere2", "model.layers", "input_layernorm"),
        ("phi", "model.layers", "input_layernorm"),
        ("gptj", "transformer.h", "ln_1"),
        ("codegen", "transformer.h", "ln_1"),
        ("falcon", "transformer.h", "input_layernorm"),
        ("gpt_neox", "gpt_neox.layers", "input_layernorm"),
        ("stablelm", "model.layers", "input_layernorm"),
        ("persimmon", "model.layers", "input_layernorm"),
        ("olmo2", "model.layers", "post_attention_layernorm"),
        ("gemma2", "model.layers", "post_attention_layernorm"),
        ("llama", "model.layers", "input_layernorm"),
        ("qwen3", "model.layers", "input_layernorm"),
    ],
)
def test_norms_with_another_reader(model_type: str, layer: str, norm: str) -> None:
    (reason,) = check_chains(meta_model(model_type), [[f"{layer}.1.{norm}", f"{layer}.1.mlp"]])
    assert reason == "its output has another reader"


def test_a_parallel_stablelm() -> None:
    model = meta_model("stablelm", use_parallel_residual=True)
    assert check_chains(model, [["model.layers.0.input_layernorm", "model.layers.0.mlp"]]) == [
        "its output has another reader"
    ]


def test_the_wrong_order() -> None:
    model = meta_model("qwen3")
    chains = [["model.layers.0.mlp", "model.layers.0.post_attention_layernorm"], ["model.layers.0.mlp", "model.norm"]]
    assert all(check_chains(model, chains))


def test_siblings_of_different_layers() -> None:
    model = meta_model("qwen3")
    (reason,) = check_chains(model, [["model.layers.0.post_attention_layernorm", "model.layers.1.mlp"]])
    assert reason == "its output has another reader"


def test_the_model_is_left_as_it_was() -> None:
    model = meta_model("qwen3").train()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    check_chains(model, [["model.layers.0.post_attention_layernorm", "model.layers.0.mlp"]])
    assert model.training
    assert [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks] == []
    assert {name: set(values) for name, values in before.items()} == {
        name: set(module.__dict__) for name, module in model.named_modules()
    }


class Small(nn.Module):
    """A norm, an MLP, and a forward that each case makes its own."""

    def __init__(self, forward: str) -> None:
        super().__init__()
        self.norm, self.mlp, self.embed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(8, 4)
        self.kind = forward

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        hidden = self.embed(input_ids)
        normed = self.norm(hidden)
        if self.kind == "plain":
            return hidden + self.mlp(normed)
        if self.kind == "residual":
            return normed + self.mlp(normed)
        if self.kind == "before":
            scaled = hidden * normed.mean()
            return scaled + self.mlp(normed)
        if self.kind == "view":
            flat = normed.view(-1, 4)
            return hidden + self.mlp(normed) + flat.view_as(hidden)
        if self.kind == "changed":
            return hidden + self.mlp(normed * 1)
        if self.kind == "in place":
            normed.mul_(2)
            return hidden + self.mlp(normed)
        if self.kind == "twice":
            return self.mlp(normed) + self.mlp(hidden)
        if self.kind == "again":
            return hidden + self.mlp(self.norm(normed))
        if self.kind == "late":
            out = self.mlp(normed)
            return torch.stack([out, normed])
        if self.kind == "never":
            return hidden
        raise RuntimeError("this model does not run")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain", None),
        ("residual", "its output has another reader"),
        ("before", "its output has another reader"),
        ("view", "its output has another reader"),
        ("changed", "its output has another reader"),
        ("in place", "its output has another reader"),
        ("twice", "the second module's input is not the first one's output"),
        ("again", "its output has another reader"),
        ("late", "its output has another reader"),
        ("never", "'norm' and 'mlp' were called 1 and 0 times"),
        ("broken", "the model does not run on the meta device (RuntimeError: this model does not run)"),
    ],
)
def test_one_forward_of_each_kind(kind: str, reason: str | None) -> None:
    with torch.device("meta"):
        model = Small(kind)
    assert check_chains(model, [["norm", "mlp"]]) == [reason]


def test_apply_refuses_what_is_no_fusion(qwen3_dir: Path, tmp_path: Path) -> None:
    """`input_layernorm` feeds the attention, not the MLP: same parent, right classes, and still no fusion."""
    patches = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
    recipe = write_recipe(tmp_path / "r.yaml", patches)
    words = [
        "r.yaml:5",
        "'model.layers.0.input_layernorm' and 'model.layers.0.mlp' cannot be fused: its output has another reader",
        "replace:",
    ]
    check_refused(RecipeError, 3, words, recipe, qwen3_dir, tmp_path / "out")


@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_a_path_that_the_model_keeps_in_float32(
    tmp_path: Path, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP's tensors would move below the norm's path, and so be cast on every load."""
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, attribute, ["post_attention_layernorm"])
    source = save_tiny(tmp_path / "in", "qwen3", dtype=torch.bfloat16)
    words = [
        "keeps one of 'model.layers.0.mlp.down_proj.weight' and 'model.layers.0.post_attention_layernorm.mlp.down_proj.weight'",
        "qwen3-fused-norm-mlp.yaml:",
    ]
    check_refused(RecipeError, 3, words, "qwen3-fused-norm-mlp", source, tmp_path / "out")
    assert convert("qwen3", source, tmp_path / "out").prepared.manifest.model_checked
