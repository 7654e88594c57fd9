"""transformers' rules as ours: the same regular expressions, and a refusal for what has no byte form."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from kconvert.convert.adapter import rules_from_mapping
from kconvert.errors import RecipeError
from kconvert.transforms import BoundRule, Op, bind_mapping

MLP = "model.layers.10.mlp"
NAMES = [f"{MLP}.{name}_proj.weight" for name in ("gate", "up", "down")]


def join(*sources: str, target: str = "gate_up.weight", dim: int = 0) -> Any:
    return WeightConverter(list(sources), target, operations=[Concatenate(dim=dim)])


def test_a_package_mapping_binds_like_a_built_in_layout() -> None:
    mapping = [join("gate_proj.weight", "up_proj.weight"), WeightRenaming("down_proj", "down")]
    rules = rules_from_mapping(mapping, "r.yaml:5")
    assert set(bind_mapping(rules, [MLP], NAMES)) == {
        BoundRule(Op.CONCATENATE, (NAMES[0], NAMES[1]), f"{MLP}.gate_up.weight"),
        BoundRule(Op.RENAME, (NAMES[2],), f"{MLP}.down.weight"),
    }


def test_the_order_of_sources_is_the_order_of_parts() -> None:
    rules = rules_from_mapping([join("up_proj.weight", "gate_proj.weight")], "r.yaml:5")
    bound = bind_mapping(rules, [MLP], NAMES)
    assert BoundRule(Op.CONCATENATE, (NAMES[1], NAMES[0]), f"{MLP}.gate_up.weight") in bound


def test_dots_of_a_pattern_are_what_transformers_makes_of_them() -> None:
    """The compiled pattern is transformers' own, so that both match the same names."""
    mapping = [WeightRenaming(r"down_proj\.weight$", "down.weight")]
    (rule,) = rules_from_mapping(mapping, "r.yaml:5")
    for name in NAMES:
        renamed = mapping[0].rename_source_key(name)[0]
        (bound,) = bind_mapping([rule], [MLP], [name])
        assert bound.target == renamed


@pytest.mark.parametrize("dim", [0, 1])
def test_the_axis_is_kept(dim: int) -> None:
    (rule,) = rules_from_mapping([join("gate_proj.weight", "up_proj.weight", dim=dim)], "r.yaml:5")
    assert rule.axis == dim


@pytest.mark.parametrize(
    ("mapping", "what"),
    [
        (7, "conversion_mapping is no list of rules"),
        ([("a", "b")], "conversion rule tuple cannot be written offline"),
        ([join("gate_proj.weight")], "joins a single pattern"),
        ([WeightConverter(["e.*.w"], "e.w", operations=[MergeModulelist(dim=0)])], "MergeModulelist"),
        ([WeightConverter(["a"], ["b", "c"], operations=[Chunk(dim=0)])], "Chunk"),
        (
            [WeightConverter(["a", "b"], "c", operations=[MergeModulelist(dim=0), Concatenate(dim=1)])],
            "MergeModulelist",
        ),
    ],
)
def test_what_has_no_byte_form(mapping: Any, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        rules_from_mapping(mapping, "r.yaml:5")
    assert caught.value.where == "r.yaml:5"
    assert what in str(caught.value)
