"""Norms without a weight: on a live model, and through a recipe, where no tensor of the checkpoint names them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm

from kconvert import load_converted
from kconvert.convert import draft_recipe
from kconvert.errors import RecipeError
from kconvert.export import export_package
from kconvert.kernels import apply_kernel
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.manifest import load_manifest
from tests.support import convert, write_recipe

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
NORMS = """  - kernel: [cuda_fused_rmsnorm, npu_fused_rmsnorm, cpu_fused_rmsnorm]
    replace: {class: NanoChatRMSNorm, path: "model.layers.*.input_layernorm"}
  - kernel: [cuda_fused_rmsnorm, npu_fused_rmsnorm, cpu_fused_rmsnorm]
    replace: {class: NanoChatRMSNorm, path: "model.layers.*.self_attn.q_norm"}
"""


def _model() -> Any:
    from transformers import NanoChatConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(NanoChatConfig(**SIZES)).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


def test_on_a_live_model() -> None:
    model = _model()
    expected = _logits(model)
    apply_kernel("cpu_fused_rmsnorm", model=model)
    assert model.kconvert_report.to_dict()["kernels"] == {"cpu_fused_rmsnorm": 9}
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)
    for module in model.modules():
        if is_patched(module):
            assert not list(module.parameters())
            assert torch.equal(module.reference(torch.ones(2, 3, 5)), torch.ones(2, 3, 5) * (1 + 1e-6) ** -0.5)


def test_the_report_has_them_where_the_model_is() -> None:
    model = apply_kernel("cpu_fused_rmsnorm", model=_model()).to("meta")
    assert {module["device"] for module in model.kconvert_report.to_dict()["modules"]} == {"meta"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nanochat") / "source"
    _model().save_pretrained(directory)
    return directory


def test_through_a_recipe_and_back(source: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", NORMS, model_type="nanochat")
    output = tmp_path / "out"
    convert(recipe, source, output)
    manifest = load_manifest(output)
    assert [len(patch.modules) for patch in manifest.patches] == [2, 2]
    assert [patch.facts for patch in manifest.patches] == [{"NanoChatRMSNorm": {"has_weight": False}}] * 2
    stock = AutoModelForCausalLM.from_pretrained(source).eval()
    reference = load_converted(output, kernels="reference").eval()
    assert torch.equal(_logits(reference), _logits(stock))
    model = load_converted(output).eval()
    assert model.kconvert_report.to_dict()["kernels"] == {"cpu_fused_rmsnorm": 4}
    torch.testing.assert_close(_logits(model), _logits(stock), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "stock")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert torch.equal(_logits(again), _logits(stock))
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert torch.equal(_logits(load_converted(tmp_path / "packed", kernels="reference").eval()), _logits(stock))


def test_without_the_model_there_is_nothing_to_find_them_by(source: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", NORMS, model_type="nanochat")
    with pytest.raises(RecipeError, match=r"path pattern 'model\.layers\.\*\.input_layernorm' matches no module"):
        convert(recipe, source, tmp_path / "out", model_check=False)


def test_a_drafted_recipe_has_them_and_converts(source: Path, tmp_path: Path) -> None:
    draft = draft_recipe(_model())
    norms = {entry.pattern: len(entry.modules) for entry in draft.entries if entry.layout == "rms_norm"}
    assert sum(norms.values()) == 9
    recipe = tmp_path / "drafted.yaml"
    recipe.write_text(draft.to_yaml(), encoding="utf-8")
    convert(recipe, source, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(source).eval()
    assert torch.equal(_logits(load_converted(tmp_path / "out", kernels="reference").eval()), _logits(stock))


def test_they_are_not_fused_with_an_mlp() -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    mlp = LlamaMLP(LlamaConfig(**SIZES))
    assert NormGatedMLPLayout.unfit([Llama4TextL2Norm(), mlp]) == "its norm has no weight"


def test_exported_as_a_package_of_kernels(source: Path, tmp_path: Path) -> None:
    patches = NORMS.partition("  - kernel")[1] + NORMS.split("  - kernel")[1]
    output = tmp_path / "out"
    convert(write_recipe(tmp_path / "r.yaml", patches, model_type="nanochat"), source, output)
    layers = export_package(output, tmp_path / "package").directory / "build" / "torch-cpu" / "layers.py"
    found = runpy.run_path(str(layers))
    stock = NanoChatRMSNorm(eps=1e-5)
    module = found["FusedNanoChatRMSNormLayout"](stock)
    hidden = 1e-3 * torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(hidden), stock(hidden))
