"""A package and packed attention projections in one recipe: beside each other, never on the same module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kconvert.errors import RecipeError
from tests.packages.helpers import load, logits, replace, run_recipe, stock, write_package
from tests.support import check_refused, read_raw, write_recipe

QKV = '  - kernel: cpu_fused_qkv\n    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}\n'
PACKAGE = """
class Norm:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale * wide.to(hidden_states.dtype)

class NormLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"q_norm\\.weight", "q_norm.scale")]

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
"""
NORM = "./package:Norm"


@pytest.mark.parametrize("qkv_first", [True, False])
def test_a_norm_inside_packed_attention_may_have_a_package(tmp_path: Path, qwen3_dir: Path, qkv_first: bool) -> None:
    write_package(tmp_path, PACKAGE)
    norm = replace(NORM, "model.layers.*.self_attn.q_norm")
    output = run_recipe(tmp_path, QKV + norm if qkv_first else norm + QKV, qwen3_dir)
    before, after = read_raw(qwen3_dir), read_raw(output)
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        parts = [before[f"{attention}.{name}_proj.weight"].data for name in "qkv"]
        assert after[f"{attention}.qkv_proj.weight"].data == b"".join(parts)
        assert after[f"{attention}.q_norm.scale"] == before[f"{attention}.q_norm.weight"]
        assert after[f"{attention}.k_norm.weight"] == before[f"{attention}.k_norm.weight"]
    expected = logits(stock(qwen3_dir))
    model = load(output)
    assert {item.path.rpartition(".")[2]: item.kernel for item in model.kconvert_report.modules} == {
        "self_attn": "cpu_fused_qkv",
        "q_norm": NORM,
    }
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), expected)
    model.save_pretrained(tmp_path / "stock")
    assert read_raw(tmp_path / "stock") == before


@pytest.mark.parametrize("qkv_first", [True, False])
@pytest.mark.parametrize(
    ("path", "name", "disputed"),
    [
        ("model.layers.*.self_attn", "Qwen3Attention", "model.layers.0.self_attn"),
        ("model.layers.{1}", "Qwen3DecoderLayer", "model.layers.1.self_attn"),
        ("model", "Qwen3Model", "model.layers.0.self_attn"),
        ("model.layers.*.self_attn.q_proj", "Linear", "model.layers.0.self_attn.q_proj"),
        ("model.layers.{1}.self_attn.v_proj", "Linear", "model.layers.1.self_attn.v_proj"),
    ],
)
@pytest.mark.parametrize("model_check", [True, False])
def test_a_package_on_what_is_packed_is_refused(
    tmp_path: Path, qwen3_dir: Path, path: str, name: str, disputed: str, qkv_first: bool, model_check: bool
) -> None:
    write_package(tmp_path, PACKAGE)
    package = replace(NORM, path, name)
    recipe = write_recipe(tmp_path / "recipe.yaml", QKV + package if qkv_first else package + QKV)
    second = 7 if qkv_first else 8
    found = check_refused(
        RecipeError,
        3,
        [f"{disputed!r} is already taken by the entry at "],
        recipe,
        qwen3_dir,
        tmp_path / "out",
        trust_remote_code=True,
        model_check=model_check,
    )
    named = {str(found.where), found.what.rpartition(" ")[2]}
    assert named == {f"{recipe}:5", f"{recipe}:{second}"}


def test_the_same_attention_in_two_entries_is_refused(tmp_path: Path, qwen3_dir: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", QKV + QKV.replace("*", "{1}"))
    words = ["'model.layers.1.self_attn' is already taken by the entry at", "recipe.yaml:5", "recipe.yaml:7"]
    check_refused(RecipeError, 3, words, recipe, qwen3_dir, tmp_path / "out")
