"""A10: one model's weights under every prefix that its checkpoints use, against what stock transformers makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kconvert import load_converted
from kconvert.errors import CheckpointError, RecipeError
from kconvert.manifest import load_manifest
from tests.convert.multimodal import TYPES, logits, text_mlp, tiny
from tests.support import RawTensor, check_refused, convert, raw, read_raw, write_checkpoint, write_recipe


@dataclass(frozen=True)
class Model:
    """A tiny model, its tensors by module name and as saved, and a recipe in module names."""

    model_type: str
    stock: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    path: str
    class_name: str

    def write(self, directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
        return write_checkpoint(directory, tensors, self.config)

    def recipe(self, folder: Path, *, path: str | None = None, class_name: str | None = None) -> Path:
        target = f'{{class: {class_name or self.class_name}, path: "{path or self.path}"}}'
        patch = f"  - kernel: cpu_fused_swiglu\n    replace: {target}\n"
        return write_recipe(folder / "r.yaml", patch, model_type=self.model_type)

    def load(self, source: Path) -> tuple[Any, bool]:
        """The stock model, and whether every tensor found its place."""
        model, info = type(self.stock).from_pretrained(source, output_loading_info=True)
        return model, not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])


def make(model_type: str, folder: Path) -> Model:
    stock = tiny(model_type)
    stock.save_pretrained(folder)
    tied = stock.all_tied_weights_keys
    tensors = {name: tensor.clone() for name, tensor in stock.state_dict().items() if name not in tied}
    config = json.loads((folder / "config.json").read_text())
    return Model(model_type, stock, config, tensors, load_file(folder / "model.safetensors"), *text_mlp(stock))


@pytest.fixture
def qwen(tmp_path: Path) -> Model:
    return make("qwen2_5_vl", tmp_path / "saved")


TEXTS = {
    "model.language_model.": ("model.{}.", "lm_head."),
    "model.": ("model.", "lm_head."),
    "language_model.model.": ("{}.model.", "{}.lm_head."),
    "language_model.": ("{}.", "lm_head."),
}
"""Prefix of the text weights, and of the head; `{}` is `language_model`, in some types `text_model`."""

VISIONS = {
    "model.visual.": "model.{}",
    "visual.": "{}",
    "model.language_model.visual.": "model.language_model.{}",
}
"""What is not text, `visual.blocks...` for one, stands at `{}`."""


def renamed(tensors: dict[str, torch.Tensor], text: str, vision: str) -> dict[str, torch.Tensor]:
    """Tensors by module name, under other prefixes: keys of `TEXTS` and `VISIONS`."""
    own = "text_model" if any(name.startswith("model.text_model.") for name in tensors) else "language_model"
    prefix, head = (template.format(own) for template in TEXTS[text])

    def name_of(name: str) -> str:
        if name.startswith("lm_head."):
            return head + name.removeprefix("lm_head.")
        if name.startswith(f"model.{own}."):
            return prefix + name.removeprefix(f"model.{own}.")
        return VISIONS[vision].format(name.removeprefix("model."))

    return {name_of(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("model_type", TYPES)
def test_what_stock_takes_is_converted_alike_and_what_it_does_not_is_refused(tmp_path: Path, model_type: str) -> None:
    """One recipe in module names.  A name that stock has no place for is also one that the model then lacks."""
    model = make(model_type, tmp_path / "saved")
    recipe = model.recipe(tmp_path)
    forms = {"saved": model.saved}
    for text in TEXTS:
        for vision in VISIONS:
            forms[f"{text} {vision}"] = renamed(model.tensors, text, vision)
    accepted: dict[str, dict[str, RawTensor]] = {}
    for number, (form, tensors) in enumerate(forms.items()):
        source, output = model.write(tmp_path / f"in{number}", tensors), tmp_path / f"out{number}"
        stock, whole = model.load(source)
        if not whole:
            check_refused(CheckpointError, 4, ["which the checkpoint does not"], recipe, source, output)
            continue
        result = convert(recipe, source, output)
        assert load_manifest(output).carried == ()
        assert len(result.prepared.plan.claims) == 2
        accepted[form] = read_raw(output)
        if len(accepted) <= 2:  # the files are the same, so one load for both kinds of names is enough
            assert torch.equal(logits(load_converted(output, kernels="reference")), logits(stock))
            assert torch.equal(logits(stock), logits(model.stock))
    assert {"saved", "model.language_model. model.visual."} <= accepted.keys()
    assert len(accepted) >= 3
    assert [form for form, written in accepted.items() if written != accepted["saved"]] == []


def test_the_old_names_of_the_qwen_family(tmp_path: Path, qwen: Model) -> None:
    """`model.layers` and `visual.blocks`, as the published checkpoints have them, by value."""
    old = renamed(qwen.tensors, "model.", "visual.")
    assert old.keys() == qwen.saved.keys()
    output = convert(qwen.recipe(tmp_path), qwen.write(tmp_path / "in", old), tmp_path / "out").output
    gate, up = (old[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    written = read_raw(output)
    assert written["model.language_model.layers.1.mlp.gate_up_proj.weight"] == raw(torch.cat([gate, up]))
    record = load_manifest(output).tensors_by_target()["model.language_model.layers.1.mlp.gate_up_proj.weight"]
    assert [(part.source, *(origin.file_name for origin in part.origins)) for part in record.parts] == [
        (f"model.language_model.layers.1.mlp.{name}_proj.weight", f"model.layers.1.mlp.{name}_proj.weight")
        for name in ("gate", "up")
    ]
    load_converted(output).save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == {name: raw(tensor) for name, tensor in old.items()}
    stock, whole = qwen.load(tmp_path / "again")
    assert whole
    assert torch.equal(logits(stock), logits(qwen.stock))


def test_vision_is_not_caught_by_a_pattern_for_text(tmp_path: Path, qwen: Model) -> None:
    """Both towers have an `mlp.gate_proj`, and each recipe takes its own."""
    vision = {name: tensor for name, tensor in qwen.tensors.items() if ".visual.blocks.0.mlp." in name}
    assert "model.visual.blocks.0.mlp.gate_proj.weight" in vision
    source = qwen.write(tmp_path / "in", qwen.saved)
    text_out = convert(qwen.recipe(tmp_path), source, tmp_path / "text").output
    written = read_raw(text_out)
    assert {name: written[name] for name in vision} == {name: raw(tensor) for name, tensor in vision.items()}
    assert [claim for patch in load_manifest(text_out).patches for claim in patch.modules] == [
        (f"model.language_model.layers.{layer}.mlp",) for layer in (0, 1)
    ]
    recipe = qwen.recipe(tmp_path, path="model.visual.blocks.*.mlp", class_name="Qwen2_5_VLMLP")
    written = read_raw(convert(recipe, source, tmp_path / "vision").output)
    for kind in ("weight", "bias"):
        parts = [vision[f"model.visual.blocks.0.mlp.{name}_proj.{kind}"] for name in ("gate", "up")]
        assert written[f"model.visual.blocks.0.mlp.gate_up_proj.{kind}"] == raw(torch.cat(parts))
    assert "model.language_model.layers.0.mlp.gate_proj.weight" in written


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("model.layers.*.mlp", "did you mean model.language_model.layers.*.mlp"),
        ("model.language_model.layer.*.mlp", "did you mean model.language_model.layers.*.mlp"),
        ("language_model.model.layers.*.mlp", "did you mean model.language_model.layers.*.mlp"),
        ("visual.blocks.*.mlp", "did you mean model.visual.blocks.*.mlp"),
        ("model.*.mlp", "did you mean"),
        ("*.layers.*.mlp", "the model has lm_head, model, model.language_model, model.visual"),
        ("model.*.*.layers.*.mlp", "did you mean model.language_model.layers.*.mlp"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_near_misses(tmp_path: Path, qwen: Model, path: str, near: str) -> None:
    source = qwen.write(tmp_path / "in", qwen.saved)
    words = ["r.yaml:6", f"path pattern {path!r} matches no module", near]
    check_refused(RecipeError, 3, words, qwen.recipe(tmp_path, path=path), source, tmp_path / "out")


def test_a_star_is_one_segment(tmp_path: Path, qwen: Model) -> None:
    source = qwen.write(tmp_path / "in", qwen.saved)
    one = convert(qwen.recipe(tmp_path, path="model.*.layers.*.mlp"), source, tmp_path / "one").output
    two = convert(qwen.recipe(tmp_path), source, tmp_path / "two").output
    assert read_raw(one) == read_raw(two)
    words = ["'model.visual.blocks.0.mlp' is a Qwen2_5_VLMLP, the recipe names Qwen2MLP"]
    recipe = qwen.recipe(tmp_path, path="model.*.*.*.mlp")
    check_refused(RecipeError, 3, words, recipe, source, tmp_path / "out")


def test_a_second_copy_under_a_prefix_that_has_no_place_is_carried(tmp_path: Path, qwen: Model) -> None:
    """Nothing is lost: what stock would drop without a word is listed, and comes along bit for bit."""
    vision = {name: tensor + 1 for name, tensor in qwen.tensors.items() if ".visual." in name}
    extra = renamed(vision, "model.language_model.", "model.language_model.visual.")
    source = qwen.write(tmp_path / "in", {**qwen.saved, **extra})
    output = convert(qwen.recipe(tmp_path), source, tmp_path / "out").output
    assert load_manifest(output).carried == tuple(sorted(extra))
    written = read_raw(output)
    assert {name: written[name] for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    assert torch.equal(logits(load_converted(output, kernels="reference")), logits(qwen.stock))


def test_two_prefixes_for_one_module_name(tmp_path: Path, qwen: Model) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    doubled = {**qwen.saved, name.replace("model.", "model.language_model."): qwen.saved[name] + 1}
    words = [f"{name!r} and", "are both 'model.language_model.layers.0.mlp.gate_proj.weight' in the model"]
    source = qwen.write(tmp_path / "in", doubled)
    with pytest.raises(CheckpointError) as caught:
        convert(qwen.recipe(tmp_path), source, tmp_path / "out")
    assert [word for word in words[1:] if word not in str(caught.value)] == []
    assert name in str(caught.value)
