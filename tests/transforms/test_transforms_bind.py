"""Binding rules to modules and to the tensors that these really have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kconvert.errors import CheckpointError, RecipeError
from kconvert.kernels.specs import layout_specs
from kconvert.transforms import BoundRule, Collected, Concatenate, MappingRule, bind_mapping, bind_spec, complete_groups

SPEC = layout_specs()["gated_mlp"]
FUSED = layout_specs()["norm_gated_mlp"]
MLP = "model.layers.1.mlp"
WEIGHTS = [f"{MLP}.{name}_proj.weight" for name in ("down", "gate", "up")]
JOIN = MappingRule(
    r"(?P<g0>gate_proj.weight)|(?P<g1>up_proj.weight)",
    ("gate_proj.weight", "up_proj.weight"),
    ("both.weight",),
    (Concatenate(0),),
)


def renaming(pattern: str, target: str) -> MappingRule:
    return MappingRule(f"(?P<g0>{pattern})", (pattern,), (target,))


def joined(gate: str, up: str, target: str = f"{MLP}.both.weight") -> BoundRule:
    """What `JOIN` becomes with these names."""
    collected = (Collected("gate_proj.weight", (gate,)), Collected("up_proj.weight", (up,)))
    return BoundRule(collected, target, (Concatenate(0),), ("both.weight",))


# --- built-in layouts -------------------------------------------------------------------------------


def test_a_replacement() -> None:
    assert bind_spec(
        SPEC, [MLP], [*WEIGHTS, "model.layers.10.mlp.gate_proj.weight", "model.layers.1.mlp_gate.weight"]
    ) == (
        BoundRule.joined([WEIGHTS[1], WEIGHTS[2]], f"{MLP}.gate_up_proj.weight"),
        BoundRule.renamed(WEIGHTS[0], WEIGHTS[0]),
    )


def test_the_result_does_not_depend_on_the_order_of_names() -> None:
    assert bind_spec(SPEC, [MLP], WEIGHTS) == bind_spec(SPEC, [MLP], WEIGHTS[::-1])


def test_a_fusion_puts_everything_below_the_first_module() -> None:
    norm = "model.layers.1.post_attention_layernorm"
    bound = bind_spec(FUSED, [norm, MLP], [*WEIGHTS, f"{norm}.weight"])
    assert {rule.target: rule.sources for rule in bound} == {
        f"{norm}.norm.weight": (f"{norm}.weight",),
        f"{norm}.mlp.gate_up_proj.weight": (WEIGHTS[1], WEIGHTS[2]),
        f"{norm}.mlp.down_proj.weight": (WEIGHTS[0],),
    }


def test_biases_are_optional_one_by_one() -> None:
    biases = [f"{MLP}.gate_proj.bias", f"{MLP}.up_proj.bias"]
    bound = bind_spec(SPEC, [MLP], WEIGHTS + biases)
    assert BoundRule.joined(biases, f"{MLP}.gate_up_proj.bias") in bound
    assert not any("down_proj.bias" in rule.target for rule in bound)


@pytest.mark.parametrize("missing", WEIGHTS)
def test_a_missing_member_is_named_with_its_target(missing: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bind_spec(SPEC, [MLP], [name for name in WEIGHTS if name != missing])
    packed = f"'{MLP}.gate_up_proj.weight' needs {missing!r}, which the checkpoint does not have"
    assert (f"the checkpoint does not have {missing!r}" if "down" in missing else packed) in str(caught.value)
    assert caught.value.exit_code == 4


def test_half_an_optional_group_is_incomplete() -> None:
    with pytest.raises(CheckpointError) as caught:
        bind_spec(SPEC, [MLP], [*WEIGHTS, f"{MLP}.gate_proj.bias"])
    assert f"'{MLP}.gate_up_proj.bias' needs '{MLP}.up_proj.bias'" in str(caught.value)


@pytest.mark.parametrize(
    "stray",
    ["gate_proj.weight_scale_inv", "gate_up_proj.weight", "gate_proj.lora_A.weight", "experts.3.up_proj.weight"],
)
def test_a_tensor_inside_that_the_layout_does_not_take_is_named(stray: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bind_spec(SPEC, [MLP], [*WEIGHTS, f"{MLP}.{stray}"])
    assert f"layout 'gated_mlp' of '{MLP}' has no place for '{MLP}.{stray}'" in str(caught.value)


# --- mappings of packages ---------------------------------------------------------------------------


def test_a_mapping_joins_by_pattern_and_keeps_the_rest() -> None:
    assert set(bind_mapping([JOIN], [MLP], [*WEIGHTS[::-1], "model.layers.0.mlp.gate_proj.weight"])) == {
        joined(WEIGHTS[1], WEIGHTS[2]),
        BoundRule.renamed(WEIGHTS[0], WEIGHTS[0]),
    }


def test_renamings_apply_in_turn_and_then_one_converter() -> None:
    rules = [renaming("w1", "gate"), renaming("gate", "gate_proj"), renaming("w3", "up_proj"), JOIN]
    bound = bind_mapping(rules, [MLP], [f"{MLP}.w3.weight", f"{MLP}.w1.weight"])
    assert bound == (joined(f"{MLP}.w1.weight", f"{MLP}.w3.weight"),)


def test_a_group_of_a_pattern_goes_into_the_target() -> None:
    rule = renaming(r"expert_(\d+)", r"experts.\1")
    (bound,) = bind_mapping([rule], [MLP], [f"{MLP}.expert_12.weight"])
    assert bound == BoundRule.renamed(f"{MLP}.expert_12.weight", f"{MLP}.experts.12.weight")


def test_a_mapping_needs_the_whole_group() -> None:
    with pytest.raises(CheckpointError) as caught:
        bind_mapping([JOIN], [MLP], WEIGHTS[:2])
    assert f"'{MLP}.both.weight' needs a tensor that matches 'up_proj.weight'" in str(caught.value)


@pytest.mark.parametrize("pattern", ["experts.*.w2.weight", r"experts.*.w2\.weight", "experts.*.weight"])
def test_a_list_of_one(pattern: str) -> None:
    """The number of the list is that in the place of the `*`, whatever numbers stand before and behind it."""
    part = "w2." if "w2" in pattern else ""
    name = f"model.layers.7.experts.0.{part}weight"
    assert complete_groups("t", {pattern: [name]}, 1) == (Collected(pattern, (name,)),)
    with pytest.raises(CheckpointError, match=rf"needs 'model\.layers\.7\.experts\.0\.{part}weight'"):
        complete_groups("t", {pattern: [name.replace(".0.", ".1.")]})
    with pytest.raises(CheckpointError, match="are no list of numbered tensors"):
        complete_groups("t", {pattern: ["experts.weight"]})


def test_a_match_begins_at_the_start_of_a_segment() -> None:
    with pytest.raises(RecipeError) as caught:
        bind_mapping([renaming("proj", "x")], [MLP], WEIGHTS[:1])
    assert f"pattern 'proj' would match '{WEIGHTS[0]}' inside a name segment, at 'proj'" in str(caught.value)


def test_a_target_must_stay_in_the_first_module() -> None:
    rule = renaming(r"model\.layers\.1\.mlp\.down_proj", "elsewhere")
    with pytest.raises(RecipeError) as caught:
        bind_mapping([rule], [MLP], WEIGHTS[:1])
    assert f"'{WEIGHTS[0]}' becomes 'elsewhere.weight', outside the module '{MLP}'" in str(caught.value)


def test_two_names_must_not_become_one() -> None:
    with pytest.raises(RecipeError) as caught:
        bind_mapping([renaming("(?:gate|up)_proj", "x")], [MLP], WEIGHTS)
    assert f"both '{WEIGHTS[1]}' and '{WEIGHTS[2]}' become '{MLP}.x.weight'" in str(caught.value)
    with pytest.raises(RecipeError, match=r"makes 'model\.layers\.1\.mlp\.down_proj\.weight' twice"):
        bind_mapping([replace(JOIN, targets=("down_proj.weight",))], [MLP], WEIGHTS)


# --- rules that are applied to what they made -----------------------------------------------------------


def test_a_prefix_that_is_gone_is_not_taken_again() -> None:
    """A11: `encoder.layers` becomes `layers` once, and stays that."""
    rules = [renaming(r"encoder\.layers", "layers")]
    (once,) = bind_mapping(rules, ["model"], ["model.encoder.layers.0.weight"])
    assert once == BoundRule.renamed("model.encoder.layers.0.weight", "model.layers.0.weight")
    (twice,) = bind_mapping(rules, ["model"], [once.target])
    assert twice == BoundRule.renamed(once.target, once.target)


def test_a_suffix_that_is_in_its_own_result_is_refused_the_second_time() -> None:
    """A11: not `lm_lm_head.weight`."""
    rules = [renaming(r"head\.weight", "lm_head.weight")]
    (once,) = bind_mapping(rules, ["model"], ["model.head.weight"])
    assert once == BoundRule.renamed("model.head.weight", "model.lm_head.weight")
    with pytest.raises(
        RecipeError, match=r"would match 'model\.lm_head\.weight' inside a name segment, at 'head\.weight'"
    ):
        bind_mapping(rules, ["model"], [once.target])
