"""Kernels without a layout: a class with only a forward, on modules that keep their parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.convert import prepare
from kconvert.errors import KconvertError, KernelRefusedError, RecipeError
from kconvert.manifest import load_manifest
from kconvert.parity import verify
from tests.packages.helpers import NORM_LAYOUT, failure, fuse, load, logits, replace, run_recipe, stock, write_package
from tests.support import read_raw, write_recipe

KERNEL = "./package:Norm"
BODY = """
class Norm(nn.Module):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)
"""


def _convert(directory: Path, source: Path, body: str = BODY, patches: str | None = None, **kw: Any) -> Path:
    write_package(directory, body)
    return run_recipe(directory, patches or replace(KERNEL), source, **kw)


def test_no_tensor_changes(tmp_path: Path, qwen3_dir: Path) -> None:
    output = _convert(tmp_path, qwen3_dir)
    assert read_raw(output) == read_raw(qwen3_dir)
    manifest = load_manifest(output)
    assert manifest.patches[0].layout.name == "Norm"
    assert all(part.source == record.target for record in manifest.tensors for part in record.parts)


def test_the_kernel_runs_on_this_model_only(tmp_path: Path, qwen3_dir: Path) -> None:
    model = load(_convert(tmp_path, qwen3_dir, BODY.replace("return self", "return 2 * self")))
    first = model.model.layers[0]
    values = torch.randn(3, 32)
    plain = stock(qwen3_dir).model.layers[0]
    assert torch.allclose(first.input_layernorm(values), 2 * plain.input_layernorm(values))
    assert torch.equal(first.post_attention_layernorm(values), plain.post_attention_layernorm(values))
    assert model.kconvert_report.to_dict()["kernels"] == {KERNEL: 2}
    assert isinstance(first.input_layernorm, type(plain.input_layernorm))
    assert dict(model.named_parameters()).keys() == dict(stock(qwen3_dir).named_parameters()).keys()
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))


def test_reference_is_the_stock_forward(tmp_path: Path, qwen3_dir: Path) -> None:
    output = _convert(tmp_path, qwen3_dir, BODY.replace("return self", "return 2 * self"))
    assert torch.equal(logits(load(output, kernels="reference")), logits(stock(qwen3_dir)))


def test_buffers_of_the_stock_module_are_computed(tmp_path: Path, qwen3_dir: Path) -> None:
    """A module without a tensor in the file, whose only data is a buffer that is not stored."""
    body = """
class Rotary(nn.Module):
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
"""
    patches = replace("./package:Rotary", "model.rotary_emb", "Qwen3RotaryEmbedding")
    model = load(_convert(tmp_path, qwen3_dir, body, patches))
    assert model.kconvert_report.to_dict()["kernels"] == {"./package:Rotary": 1}
    assert torch.equal(logits(model), logits(stock(qwen3_dir)))


def test_saved_stock_and_packed(tmp_path: Path, qwen3_dir: Path) -> None:
    model = load(_convert(tmp_path, qwen3_dir))
    model.save_pretrained(tmp_path / "stock")
    assert read_raw(tmp_path / "stock") == read_raw(qwen3_dir)
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert load(tmp_path / "packed").kconvert_report.to_dict()["kernels"] == {KERNEL: 2}


def test_verify_compares_it(tmp_path: Path, qwen3_dir: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good = _convert(tmp_path / "good", qwen3_dir)
    assert verify(good, source=qwen3_dir, levels=["modules", "logits"], trust_remote_code=True).failures == ()
    bad = _convert(tmp_path / "bad", qwen3_dir, BODY.replace("return self", "return 2 * self"))
    assert verify(bad, source=qwen3_dir, trust_remote_code=True).failures


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_kernel_without_a_backward_is_for_inference(has_backward: bool, tmp_path: Path, qwen3_dir: Path) -> None:
    body = BODY.replace("    def forward", f"    has_backward = {has_backward}\n\n    def forward")
    report = load(_convert(tmp_path, qwen3_dir, body)).kconvert_report.to_dict()
    assert report["kernels"] == {KERNEL: 2}
    assert {module["training_kernel"] for module in report["modules"]} == {KERNEL if has_backward else "reference"}


@pytest.mark.parametrize("can_compile", [True, False])
def test_a_kernel_that_cannot_be_compiled_gives_way(
    can_compile: bool, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = BODY.replace("return self", "return 2 * self")
    if can_compile:
        body = body.replace("    def forward", "    can_torch_compile = True\n\n    def forward")
    norm = load(_convert(tmp_path, qwen3_dir, body)).model.layers[0].input_layernorm
    values = torch.randn(3, 32)
    plain = stock(qwen3_dir).model.layers[0].input_layernorm(values)
    assert torch.allclose(norm(values), 2 * plain)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(norm(values), (2 if can_compile else 1) * plain)


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (BODY.replace("(nn.Module)", ""), RecipeError, "so Norm has to be stateless, and it is no torch.nn.Module"),
        (BODY + "\n    def __init__(self):\n        super().__init__()\n", RecipeError, "it has its own __init__"),
        (BODY + "\n    def helper(self):\n        pass\n", RecipeError, "it has helper beside its forward"),
        (BODY + "\n    scale = 2\n", RecipeError, "it has scale beside its forward"),
        (BODY.replace("def forward", "def other"), RecipeError, "it has other beside its forward"),
        ("\nclass Norm(nn.Module):\n    pass\n", RecipeError, "class Norm has no forward"),
        (BODY + "\nNormLayout = 3\n", RecipeError, "no torch.nn.Module class NormLayout"),
        (
            BODY.replace("(self, hidden_states)", "(self, hidden_states, residual=None)"),
            KernelRefusedError,
            "it takes (hidden_states, residual=None), the stock forward (hidden_states",
        ),
        (
            BODY.replace("(self, hidden_states)", "(self, *hidden_states)"),
            KernelRefusedError,
            "*hidden_states is variadic positional",
        ),
    ],
)
def test_each_violation_is_one_line(
    body: str, error: type[KconvertError], words: str, tmp_path: Path, qwen3_dir: Path
) -> None:
    with pytest.raises(error) as caught:
        _convert(tmp_path, qwen3_dir, body)
    code, text = failure(caught.value)
    assert code == (3 if error is RecipeError else 8)
    assert words in text
    assert not (tmp_path / "out").exists()


def test_names_of_several_inputs_count(tmp_path: Path, qwen3_dir: Path) -> None:
    """The model passes some of them by name."""
    body = """
class Attention(nn.Module):
    def forward(self, hidden_states, rope, attention_mask, past_key_values=None, **kwargs):
        return hidden_states, None
"""
    patches = replace("./package:Attention", "model.layers.*.self_attn", "Qwen3Attention")
    with pytest.raises(KernelRefusedError) as caught:
        _convert(tmp_path, qwen3_dir, body, patches)
    assert "does not fit Qwen3Attention: its parameter rope is called position_embeddings" in str(caught.value)


def test_a_fusion_needs_a_layout(tmp_path: Path, qwen3_dir: Path) -> None:
    with pytest.raises(RecipeError, match=r"no torch\.nn\.Module class NormLayout beside Norm"):
        _convert(tmp_path, qwen3_dir, patches=fuse(KERNEL))


def test_a_dtype_has_nothing_to_be_for(tmp_path: Path, qwen3_dir: Path) -> None:
    patches = replace(KERNEL).replace("    trust", "    dtype: float32\n    trust")
    with pytest.raises(RecipeError, match="'dtype' beside layout 'Norm', which joins no tensors"):
        _convert(tmp_path, qwen3_dir, patches=patches)


def test_a_layout_beside_it_makes_it_a_two_class_package(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, BODY.replace("self.weight", "self.scale").replace("variance_epsilon", "eps") + NORM_LAYOUT)
    recipe = write_recipe(tmp_path / "recipe.yaml", replace(KERNEL))
    manifest = prepare(str(recipe), qwen3_dir, trust_remote_code=True).manifest
    assert manifest.patches[0].layout.name == "NormLayout"
    assert "model.layers.0.input_layernorm.scale" in manifest.tensors_by_target()


def test_without_a_model_check_the_signature_is_looked_at_when_it_loads(tmp_path: Path, qwen3_dir: Path) -> None:
    output = _convert(
        tmp_path, qwen3_dir, BODY.replace("(self, hidden_states)", "(self, *hidden_states)"), model_check=False
    )
    with pytest.raises(KernelRefusedError, match="variadic positional"):
        load(output)
