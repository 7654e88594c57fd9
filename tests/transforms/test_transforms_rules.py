"""Rules as data: what they refuse, and the shapes that they make."""

from __future__ import annotations

import pytest

from kconvert.kernels.specs import layout_specs
from kconvert.transforms import (
    BoundRule,
    KernelEntry,
    LayoutSpec,
    MemberTensor,
    Op,
    Rule,
    ShapeError,
    concatenate,
    nested,
    rename,
    whole,
)


def spec(*rules: Rule, members: tuple[str, ...] = ("mlp",)) -> LayoutSpec:
    return LayoutSpec("test", 1, members, rules, (KernelEntry("cpu_test", "cpu"),), "nowhere:Nothing", "a test")


def made_shape(rule: BoundRule, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the one target, out of sources with these shapes."""
    inputs = {name: whole(name, shape) for name, shape in zip(rule.sources, shapes, strict=True)}
    return rule.arrange(inputs)[rule.target].shape


def test_a_rename_has_one_source_and_a_concatenation_several() -> None:
    with pytest.raises(ValueError, match="rename to 'x' from 2 sources"):
        Rule(Op.RENAME, (MemberTensor(0, "a"), MemberTensor(0, "b")), "x")
    with pytest.raises(ValueError, match="concatenate to 'x' from 1 sources"):
        concatenate(["a"], "x")
    with pytest.raises(ValueError, match="takes a source twice"):
        concatenate(["a", "a"], "x")


def test_a_rule_of_a_layout_is_a_rename_or_a_concatenation() -> None:
    with pytest.raises(ValueError, match="no rule of a layout is a stack"):
        Rule(Op.STACK, (MemberTensor(0, "a"), MemberTensor(0, "b")), "x")
    with pytest.raises(ValueError, match=r"'x' from \('a', 'b'\) without an operation"):
        BoundRule(BoundRule.joined(["a", "b"], "x").collected, "x")


def test_a_layout_makes_each_tensor_once_and_names_its_own_members() -> None:
    with pytest.raises(ValueError, match="makes a tensor twice"):
        spec(rename("a", "x"), rename("b", "x"))
    with pytest.raises(ValueError, match="has 1 members, its rules name member"):
        spec(*nested([rename("a")], member=1, into="norm"))


@pytest.mark.parametrize(
    ("rules", "members", "changes"),
    [
        ((rename("weight"),), ("norm",), False),
        ((rename("weight", "scale"),), ("norm",), True),
        ((concatenate(["a", "b"], "c"),), ("mlp",), True),
        ((rename("weight"),), ("norm", "mlp"), True),  # a fusion moves what it does not rename
    ],
)
def test_changes_parameters(rules: tuple[Rule, ...], members: tuple[str, ...], changes: bool) -> None:
    assert spec(*rules, members=members).changes_parameters is changes


def test_nested_moves_targets_and_members_and_nothing_else() -> None:
    (made,) = nested([concatenate(["a.bias", "b.bias"], "c.bias", optional=True)], member=1, into="mlp")
    assert made == Rule(
        Op.CONCATENATE,
        (MemberTensor(1, "a.bias"), MemberTensor(1, "b.bias")),
        "mlp.c.bias",
        0,
        optional=True,
        packed=MemberTensor(1, "c.bias"),
    )


@pytest.mark.parametrize(
    ("axis", "shapes", "expected"),
    [
        (0, [(12, 8), (12, 8)], (24, 8)),
        (0, [(16, 8), (8, 8), (8, 8)], (32, 8)),
        (1, [(4, 2), (4, 3)], (4, 5)),
        (0, [(3,), (0,)], (3,)),
        (0, [(0, 8), (0, 8)], (0, 8)),
    ],
)
def test_shape_of_a_concatenation(axis: int, shapes: list[tuple[int, ...]], expected: tuple[int, ...]) -> None:
    names = [f"s{number}" for number in range(len(shapes))]
    assert made_shape(BoundRule.joined(names, "t", axis), shapes) == expected


@pytest.mark.parametrize(
    ("axis", "shapes", "what"),
    [
        (0, [(), ()], "no axis 0"),  # torch.cat refuses 0-dim tensors too
        (1, [(4,), (4,)], "no axis 1"),
        (-2, [(4,), (4,)], "no axis -2"),
        (0, [(4, 8), (4, 7)], "differ outside axis 0"),
        (0, [(4, 8), (4, 8, 1)], "differ outside axis 0"),
    ],
)
def test_shapes_that_do_not_join(axis: int, shapes: list[tuple[int, ...]], what: str) -> None:
    with pytest.raises(ShapeError, match=what):
        made_shape(BoundRule.joined(["a", "b"], "t", axis), shapes)


def test_a_rename_keeps_any_shape() -> None:
    assert made_shape(BoundRule.renamed("a", "b"), [()]) == ()
    assert made_shape(BoundRule.renamed("a", "b"), [(0, 3)]) == (0, 3)


def test_the_order_of_gate_and_up_is_gate_first_in_every_built_in_layout() -> None:
    seen = []
    for layout in layout_specs().values():
        for rule in layout.rules:
            if "gate_up_proj" in rule.target.split(".") and rule.op is Op.CONCATENATE:
                names = [source.name.split(".")[-2] for source in rule.sources]
                assert names == ["gate_proj", "up_proj"], (layout.name, rule)
                assert rule.axis == 0
                seen.append(layout.name)
    assert sorted(set(seen)) == ["decoder_layer", "gated_mlp", "norm_gated_mlp"]
