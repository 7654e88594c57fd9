"""Drafted recipes: which modules they name, by which patterns, and what they leave out and say why."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kconvert.convert import DraftRecipe, draft_recipe
from kconvert.convert.draft import _grouped, _Place, _without_overlap
from kconvert.convert.resolve import resolve_recipe
from kconvert.errors import RecipeError, UsageError
from kconvert.kernels import apply_default_kernels
from kconvert.kernels.specs import layout_specs
from kconvert.patterns import PathPattern
from kconvert.recipe import find_recipe, load_recipe, parse_recipe
from kconvert.runtime import load_converted
from tests.support import convert, tiny_model

SWIGLU = ("cuda_fused_swiglu", "npu_fused_swiglu", "cpu_fused_swiglu")
GEGLU = ("cuda_fused_geglu", "npu_fused_geglu", "cpu_fused_geglu")
IDS = torch.arange(18).reshape(2, 9)


def entries(draft: DraftRecipe, layout: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Pattern to class and kernels."""
    return {entry.pattern: (entry.class_name, entry.kernels) for entry in draft.entries if entry.layout == layout}


def test_the_draft_of_a_plain_model_is_the_shipped_recipe() -> None:
    draft = draft_recipe(tiny_model("qwen3"), name="mine")
    shipped = load_recipe(find_recipe("qwen3"))
    drafted = parse_recipe(draft.to_yaml(), "draft")
    assert (drafted.name, drafted.model_type) == ("mine", ("qwen3",))

    def as_set(recipe: Any) -> set[Any]:
        return {(patch.kernels, patch.targets[0].class_name, patch.targets[0].path.text) for patch in recipe.patches}

    assert as_set(drafted) == as_set(shipped)
    assert draft.left_out == ()
    assert "Left out" not in draft.to_yaml()


def odd_model() -> Any:
    """Six layers; the MLPs of 1 and 4 have gelu, that of 3 has a hook on a part, that of 5 an odd activation."""
    model = tiny_model("llama", num_hidden_layers=6)
    layers = model.model.layers
    for number in (1, 4):
        layers[number].mlp.act_fn = nn.GELU(approximate="tanh")
    layers[3].mlp.up_proj.register_forward_hook(lambda *_: None)
    layers[5].mlp.act_fn = nn.Tanh()
    return model


def test_modules_that_differ_get_number_sets_and_kernels_of_their_own() -> None:
    draft = draft_recipe(odd_model())
    assert entries(draft, "gated_mlp") == {
        "model.layers.{0,2}.mlp": ("LlamaMLP", SWIGLU),
        "model.layers.{1,4}.mlp": ("LlamaMLP", GEGLU),
        "model.layers.5.mlp": ("LlamaMLP", SWIGLU + GEGLU),
    }
    assert list(entries(draft, "qkv_proj")) == ["model.layers.*.self_attn"]
    (odd,) = [entry for entry in draft.entries if entry.not_supported]
    assert odd.modules == ("model.layers.5.mlp",)
    assert odd.not_supported == "its forward is not down(act(gate) * up) with silu, gelu or gelu_tanh"
    (left,) = draft.left_out
    assert (left.layout, left.class_name, left.pattern) == ("gated_mlp", "LlamaMLP", "model.layers.3.mlp")
    assert left.reason == "has hooks on its parts"


def test_the_text_says_what_was_left_out_and_why() -> None:
    text = draft_recipe(odd_model()).to_yaml()
    lines = text.splitlines()
    assert lines[-2:] == [
        "# Left out:",
        '#   gated_mlp at "model.layers.3.mlp": LlamaMLP has hooks on its parts.',
    ]
    comment = "  # The reference runs here, no kernel does: its forward is not down(act(gate) * up) with silu, gelu or gelu_tanh."
    assert lines[lines.index(comment) + 2] == '    replace: {class: LlamaMLP, path: "model.layers.5.mlp"}'
    parsed = parse_recipe(text, "draft")
    assert len(resolve_recipe(parsed).entries) == len(draft_recipe(odd_model()).entries)


def test_a_draft_converts_and_gives_the_stock_logits(tmp_path: Path) -> None:
    """Number sets in place of `*` where only some modules qualify."""
    model = tiny_model("llama", num_hidden_layers=4)
    model.save_pretrained(tmp_path / "source")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    draft = draft_recipe(model)
    assert list(entries(draft, "gated_mlp")) == ["model.layers.{0,2-3}.mlp"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(draft.to_yaml(), encoding="utf-8")
    convert(recipe, tmp_path / "source", tmp_path / "out")
    loaded = load_converted(tmp_path / "out", kernels="reference")
    patched = {module.path for module in loaded.kconvert_report.modules}
    assert patched == {path for entry in draft.entries for path in entry.modules}
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_the_same_model_gives_the_same_draft_and_is_left_alone() -> None:
    model = odd_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    random_state = torch.random.get_rng_state()
    first, second = draft_recipe(model), draft_recipe(model)
    assert first == second
    assert first.to_yaml() == second.to_yaml()
    assert torch.random.get_rng_state().equal(random_state)
    assert [type(module) for module in model.modules()] == classes
    assert model.training
    assert model.state_dict().keys() == before.keys()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_layernorm_gains_nothing_and_is_left_out() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(32, bias=False)
    draft = draft_recipe(model)
    assert "model.layers.*.input_layernorm" not in entries(draft, "rms_norm")
    (left,) = draft.left_out
    assert (left.class_name, left.pattern) == ("LayerNorm", "model.layers.*.input_layernorm")
    assert left.reason.startswith("gains nothing: ")


class Grid(nn.Module):
    """Norms under two numbers; those at the points of `tied` share one weight, so that they cannot be replaced."""

    def __init__(self, rows: int, columns: int, tied: set[tuple[int, int]]) -> None:
        super().__init__()
        self.config = LlamaConfig()
        self.rows = nn.ModuleList(nn.ModuleList(LlamaRMSNorm(8) for _ in range(columns)) for _ in range(rows))
        shared = nn.Parameter(torch.ones(8))
        for row, column in tied:
            norm: Any = self.rows[row][column]  # type: ignore[index]
            norm.weight = shared


@pytest.mark.parametrize(
    ("tied", "patterns"),
    [
        (set(), ["rows.*.*"]),
        ({(1, 0), (1, 1), (1, 2)}, ["rows.{0,2-3}.*"]),
        ({(row, 1) for row in range(4)}, ["rows.*.{0,2}"]),
        ({(0, 0), (2, 0)}, ["rows.{0,2}.{1-2}", "rows.{1,3}.*"]),
        ({(0, 0), (1, 1), (2, 2)}, ["rows.0.{1-2}", "rows.1.{0,2}", "rows.2.{0-1}", "rows.3.*"]),
    ],
)
def test_two_numbers_in_a_path(tied: set[tuple[int, int]], patterns: list[str]) -> None:
    model = Grid(4, 3, tied)
    draft = draft_recipe(model)
    assert sorted(entries(draft, "rms_norm")) == patterns
    taken = [path for entry in draft.entries for path in entry.modules]
    assert sorted(taken) == sorted(f"rows.{a}.{b}" for a, b in product(range(4), range(3)) if (a, b) not in tied)
    left = {path for item in draft.left_out for path in item.modules}
    assert left == {f"rows.{a}.{b}" for a, b in tied}
    assert {item.reason for item in draft.left_out} <= {"shares parameters with another module"}
    found = {item.pattern: item.modules for item in draft.entries} | {
        item.pattern: item.modules for item in draft.left_out
    }
    for pattern, modules in found.items():
        paths = [path for path, _ in model.named_modules() if PathPattern.parse(pattern).match(path) is not None]
        assert paths == list(modules)


def test_a_star_never_takes_a_name_that_is_no_number() -> None:
    """`*` matches any segment, so `rows.*` would take `rows.last` too."""
    places = [_Place(f"rows.{number}", "Norm", ("k",), None, "", None) for number in range(3)]
    ((_, pattern, taken),) = _grouped(places, ["rows", "rows.0", "rows.1", "rows.2", "rows.last"])
    assert (pattern, taken) == ("rows.{0-2}", ("rows.0", "rows.1", "rows.2"))
    ((_, pattern, _),) = _grouped(places, ["rows", "rows.0", "rows.1", "rows.2"])
    assert pattern == "rows.*"


def test_modules_of_a_class_that_compute_different_things_get_entries_of_their_own() -> None:
    facts = ("{'offset': 0.0}", "{'offset': 1.0}", "{'offset': 0.0}")
    places = [_Place(f"rows.{number}", "Norm", ("k",), None, each, None) for number, each in enumerate(facts)]
    found = [pattern for _, pattern, _ in _grouped(places, ["rows", "rows.0", "rows.1", "rows.2"])]
    assert found == ["rows.{0,2}", "rows.1"]


@pytest.mark.parametrize(
    ("path", "owner", "reason"),
    [
        ("layers.0.mlp", "layers.0.mlp", "overlaps with gated_mlp"),
        ("layers.0.mlp.norm", "layers.0.mlp", "overlaps with gated_mlp"),
        ("layers.0.mlp2", "layers.0.mlp", None),
        ("layers.0.attn.q_norm", "layers.0.attn", None),
        ("layers.0.attn.qkv_proj.norm", "layers.0.attn", "overlaps with qkv_proj"),
    ],
)
def test_a_place_that_another_layout_has_taken_is_left_out(path: str, owner: str, reason: str | None) -> None:
    specs = layout_specs()
    owners = {owner: specs["qkv_proj" if owner.endswith("attn") else "gated_mlp"]}
    place = _Place(path, "Norm", ("k",), None, "", None)
    found = _without_overlap(place, specs["rms_norm"], owners)
    assert found.reason == reason
    assert found.kernels == (() if reason else ("k",))


def test_nothing_qualifies() -> None:
    model = tiny_model("llama").to("meta")
    draft = draft_recipe(model)
    assert draft.entries == ()
    assert {item.reason for item in draft.left_out} == {"has parameters that are not in memory"}
    assert {item.layout for item in draft.left_out} == {"gated_mlp", "qkv_proj", "rms_norm"}
    with pytest.raises(RecipeError, match="no module of the LlamaForCausalLM can have a built-in layout") as caught:
        draft.to_yaml()
    assert "not in memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_stock_transformers_model_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no config with a model_type"):
        draft_recipe(nn.Linear(2, 2))
    model = apply_default_kernels(tiny_model("llama"), "cpu_fused_swiglu")
    with pytest.raises(UsageError, match="patched already"):
        draft_recipe(model)
