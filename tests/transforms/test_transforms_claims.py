"""What an entry takes of a module: whole segments below it, and nothing beside it."""

from __future__ import annotations

import pytest

from kconvert.kernels.specs import layout_specs
from kconvert.transforms import (
    BoundRule,
    KernelEntry,
    LayoutSpec,
    Rule,
    bind_spec,
    claims_overlap,
    concatenate,
    is_taken,
    nested,
    rename,
)

QKV = layout_specs()["qkv_proj"]
ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "takes", "taken"),
    [
        ("a.attn.q.weight", (), True),
        ("a.attn.q", (), True),
        ("a.attn", (), False),  # the module itself is the claim, not below it
        ("a.attn2.q", (), False),
        ("a", (), False),
        ("a.attn.q.weight", ("q",), True),
        ("a.attn.q", ("q",), True),
        ("a.attn.q_norm.weight", ("q",), False),
        ("a.attn.norm.q", ("q",), False),
        ("b.attn.q", ("q",), False),
        ("a.attn.", (), True),
    ],
)
def test_is_taken(name: str, takes: tuple[str, ...], taken: bool) -> None:
    assert is_taken(name, "a.attn", takes) is taken


@pytest.mark.parametrize(
    ("one", "one_takes", "two", "two_takes", "overlap"),
    [
        ("a", (), "a", (), True),
        ("a", ("x",), "a", ("y",), True),
        ("a", (), "a.b", (), True),
        ("a", ("b",), "a.b", (), True),
        ("a", ("b",), "a.b.c", (), True),
        ("a", ("c",), "a.b", (), False),
        ("a", ("c",), "a.b.c", (), False),
        ("a", (), "ab", (), False),
        ("a.b", (), "a.c", (), False),
    ],
)
def test_claims_overlap(
    one: str, one_takes: tuple[str, ...], two: str, two_takes: tuple[str, ...], overlap: bool
) -> None:
    assert claims_overlap(one, one_takes, two, two_takes) is overlap
    assert claims_overlap(two, two_takes, one, one_takes) is overlap


@pytest.mark.parametrize(
    ("rules", "members"),
    [
        ([concatenate(["a.weight", "b.weight"], "ab.weight")], ("attention",)),  # `ab` is not taken
        ([rename("c.weight", "a.weight")], ("attention",)),
        ([rename("a.weight", "c.weight")], ("attention",)),
        (nested([rename("a.weight")], member=0, into="a"), ("norm", "mlp")),
    ],
)
def test_a_layout_takes_what_its_rules_name_and_is_of_one_module(rules: list[Rule], members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes \['a', 'b'\], its rules name"):
        LayoutSpec(
            "test",
            1,
            members,
            tuple(rules),
            (KernelEntry("cpu_test", "cpu"),),
            "nowhere:Nothing",
            "a test",
            takes=frozenset({"a", "b"}),
        )


def test_the_order_is_q_k_v_and_only_they_are_taken() -> None:
    """B10."""
    names = [f"{ATTENTION}.{name}_proj.{kind}" for name in "voqk" for kind in ("weight", "bias")]
    others = [f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.sinks", "model.layers.10.self_attn.q_proj.weight"]
    bound = bind_spec(QKV, [ATTENTION], names + others)
    assert bound == tuple(
        BoundRule.joined([f"{ATTENTION}.{name}_proj.{kind}" for name in "qkv"], f"{ATTENTION}.qkv_proj.{kind}")
        for kind in ("weight", "bias")
    )
    assert QKV.takes == {"q_proj", "k_proj", "v_proj", "qkv_proj"}
    assert QKV.changes_parameters
    assert not QKV.is_fusion
