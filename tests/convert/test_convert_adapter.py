"""transformers' rules and ops as ours: all that the installed version has, and a refusal for what it has not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import core_model_loading as stock
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from kconvert import transforms
from kconvert.convert.adapter import UnknownOpError, operations_of, rules_from_mapping
from kconvert.errors import RecipeError
from kconvert.transforms import BoundRule, Collected, Operation, bind_mapping
from tests.convert.stock_ops import CASES, Case, converted_by_stock, converted_by_us, op_names, tensors_of

MLP = "model.layers.10.mlp"
NAMES = [f"{MLP}.{name}_proj.weight" for name in ("gate", "up", "down")]
PASSED_THROUGH = {"_IdentityOp"}
"""Ops that stand in no mapping: it is the reverse of what a quantiser puts in while loading."""


def join(*sources: str, target: str = "gate_up.weight", dim: int = 0) -> Any:
    return WeightConverter(list(sources), target, operations=[Concatenate(dim=dim)])


def joined(*sources: str, dim: int = 0) -> BoundRule:
    """What `join` of the projections becomes, in the order of `sources`."""
    collected = tuple(Collected(name.rpartition("mlp.")[2], (name,)) for name in sources)
    return BoundRule(collected, f"{MLP}.gate_up.weight", (transforms.Concatenate(dim),), ("gate_up.weight",))


# --- rules ------------------------------------------------------------------------------------------


def test_a_package_mapping_binds_like_a_built_in_layout() -> None:
    mapping = [join("gate_proj.weight", "up_proj.weight"), WeightRenaming("down_proj", "down")]
    rules = rules_from_mapping(mapping, "r.yaml:5")
    assert set(bind_mapping(rules, [MLP], NAMES)) == {
        joined(NAMES[0], NAMES[1]),
        BoundRule.renamed(NAMES[2], f"{MLP}.down.weight"),
    }


def test_the_order_of_sources_is_the_order_of_parts() -> None:
    rules = rules_from_mapping([join("up_proj.weight", "gate_proj.weight")], "r.yaml:5")
    assert joined(NAMES[1], NAMES[0]) in bind_mapping(rules, [MLP], NAMES)


def test_dots_of_a_pattern_are_what_transformers_makes_of_them() -> None:
    """The compiled pattern is transformers' own, so that both match the same names."""
    mapping = [WeightRenaming(r"down_proj\.weight$", "down.weight")]
    (rule,) = rules_from_mapping(mapping, "r.yaml:5")
    for name in NAMES:
        renamed = mapping[0].rename_source_key(name)[0]
        (bound,) = bind_mapping([rule], [MLP], [name])
        assert bound.target == renamed


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_axis_is_kept(dim: int) -> None:
    (rule,) = rules_from_mapping([join("gate_proj.weight", "up_proj.weight", dim=dim)], "r.yaml:5")
    assert rule.operations == (transforms.Concatenate(dim),)


def test_numbered_tensors_become_a_list_in_numeric_order() -> None:
    experts = [f"{MLP}.experts.{number}.gate.weight" for number in (11, 2, 0, 10, 1, *range(3, 10))]
    mapping = [WeightConverter(["experts.*.gate.weight"], "experts.gate", operations=[MergeModulelist(dim=0)])]
    (bound,) = bind_mapping(rules_from_mapping(mapping, "r.yaml:5"), [MLP], experts)
    assert bound.sources == tuple(f"{MLP}.experts.{number}.gate.weight" for number in range(12))
    assert (bound.target, bound.label) == (f"{MLP}.experts.gate", "stack(0)")


def test_one_tensor_may_become_several() -> None:
    mapping = [WeightConverter(["qkv.weight"], ["q.weight", "k.weight", "v.weight"], operations=[Chunk(dim=0)])]
    (bound,) = bind_mapping(rules_from_mapping(mapping, "r.yaml:5"), ["a"], ["a.qkv.weight"])
    made = bound.arrange({"a.qkv.weight": transforms.whole("a.qkv.weight", (6, 2))})
    assert {name: each.pieces[0].source_start for name, each in made.items()} == {
        "a.q.weight": 0,
        "a.k.weight": 4,
        "a.v.weight": 8,
    }


RULES: dict[str, Sequence[tuple[Any, Sequence[str]]]] = {
    "WeightRenaming": [
        (("down_proj", "down"), [f"{MLP}.down_proj.weight", f"{MLP}.down_projection.weight"]),
        ((r"experts\.(\d+)\.w", r"experts.x.\1.w"), [f"{MLP}.experts.12.w"]),
        ((r"mlp\.gate$", "mlp.router"), [f"{MLP}.gate", f"{MLP}.gate.weight"]),
    ],
    "PrefixChange": [
        ((None, "old", r"model\.layers\.10\.mlp"), [f"{MLP}.old.gate.weight", f"{MLP}.older.gate.weight"]),
        (("new", None, r"model\.layers\.10\.mlp"), [f"{MLP}.gate.weight", f"{MLP}.new.up.weight"]),
    ],
    "GroupWeightRename": [
        ((["norm0", "norm1"], ["norm1", "norm2"]), [f"{MLP}.norm0.weight", f"{MLP}.norm1.weight"]),
        ((["norm0", "norm1"], ["norm1", "norm2"]), [f"{MLP}.norm1.weight", f"{MLP}.norm2.weight"]),
    ],
    "WeightConverter": [],  # by its ops, below
}


def rule_names() -> list[str]:
    """The kinds of conversion rules of the installed transformers, by introspection."""
    base = stock.WeightTransform
    kinds = [value for value in vars(stock).values() if isinstance(value, type) and issubclass(value, base)]
    return sorted(kind.__name__ for kind in kinds if kind is not base and kind.__module__ == stock.__name__)


@pytest.mark.parametrize("kind", rule_names())
def test_every_kind_of_rule_of_transformers_gives_its_names(kind: str) -> None:
    assert kind in RULES, f"{kind} is new in transformers: teach it to the adapter"
    for arguments, names in RULES[kind]:
        one, other = (getattr(stock, kind)(*arguments) for _ in range(2))
        wanted = [one.rename_source_key(name)[0] for name in names]
        bound = bind_mapping(rules_from_mapping([other], "r.yaml:5"), [MLP], names)
        assert {rule.sources[0]: rule.target for rule in bound} == dict(zip(names, wanted, strict=True))


def test_a_kind_of_rule_that_transformers_might_add_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may match in another way than what it derives from."""
    for base, arguments in ((WeightRenaming, ("a", "b")), (WeightConverter, ("a", "b", [Transpose()]))):
        kind = type("SuffixChange", (base,), {"__module__": stock.__name__})
        with pytest.raises(RecipeError, match="conversion rule SuffixChange cannot be written offline"):
            rules_from_mapping([kind(*arguments)], "r.yaml:5")


@pytest.mark.parametrize(
    ("mapping", "what"),
    [
        (7, "conversion_mapping is no list of rules"),
        ([("a", "b")], "conversion rule tuple cannot be written offline"),
    ],
)
def test_what_is_no_rule(mapping: Any, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        rules_from_mapping(mapping, "r.yaml:5")
    assert caught.value.where == "r.yaml:5"
    assert what in str(caught.value)


# --- ops --------------------------------------------------------------------------------------------

EXPECTED: dict[str, Sequence[tuple[dict[str, Any], tuple[Operation, ...]]]] = {
    "Chunk": [
        ({"dim": 1}, (transforms.Chunk(1),)),
        ({"dim": 0, "num_shards_attribute": "num_hidden_layers"}, (transforms.Chunk(0, 7),)),
    ],
    "Concatenate": [({"dim": 1}, (transforms.Concatenate(1),))],
    "Conv3dToLinear": [({"in_channels": 3, "kernel_size": (2, 4, 4)}, (transforms.Reshape((-1,), 5),))],
    "LinearToConv3d": [({"in_channels": 3, "kernel_size": (2, 4, 4)}, (transforms.Reshape((3, 2, 4, 4), 2),))],
    "ErnieFuseAndSplitTextVisionExperts": [({"stack_dim": 0, "concat_dim": 2}, (transforms.StackHalves(0, 2),))],
    "ErnieSplitAndDecoupleTextVisionExperts": [({"stack_dim": 0, "concat_dim": 2}, (transforms.UnstackHalves(0, 2),))],
    "Interleave": [
        ({"dim": 2}, (transforms.Interleave(2),)),
        ({"dim": 2, "inverse": True}, (transforms.Interleave(2, inverse=True),)),
    ],
    "MergeModulelist": [({"dim": 1}, (transforms.Stack(1),))],
    "SplitModulelist": [({"dim": 1}, (transforms.Unstack(1),))],
    "PermuteForRope": [
        ({}, (transforms.PermuteHeads(5),)),
        ({"inverse": True}, (transforms.PermuteHeads(5, inverse=True),)),
        (
            {"subconfig_key": "vision_config", "permute_layer_names": ["q"]},
            (transforms.PermuteHeads(3, only=("q",)),),
        ),
        ({"subconfig_key": "absent"}, (transforms.PermuteHeads(5),)),
    ],
    "Split": [({"dim": 1}, (transforms.SplitToShapes(1),))],
    "Transpose": [
        ({"dim0": 1, "dim1": 2}, (transforms.Transpose(1, 2),)),
        ({"dim0": 1, "dim1": 2, "check_dims": True}, (transforms.Transpose(1, 2, unless_fits=True),)),
    ],
    "VisionFuseAndPermuteForRope": [
        (
            {"dim": 1, "permute_layer_names": ["q"]},
            (transforms.PermuteHeads(3, inverse=True, only=("q",)), transforms.Concatenate(1)),
        )
    ],
    "VisionUnfuseAndPermuteForRope": [
        ({"dim": 1, "permute_layer_names": ["q"]}, (transforms.Chunk(1), transforms.PermuteHeads(3, only=("q",))))
    ],
}
CONFIG = SimpleNamespace(
    num_attention_heads=5,
    vision_config=SimpleNamespace(num_attention_heads=3),
    get_text_config=lambda: SimpleNamespace(num_hidden_layers=7),
)


@pytest.mark.parametrize("name", op_names())
def test_every_op_of_transformers_is_known(name: str) -> None:
    if name in PASSED_THROUGH:
        return
    assert name in CASES, f"{name} is new in transformers: teach it to the adapter, and give it a case"
    assert name in EXPECTED, f"{name} is new in transformers: teach it to the adapter"
    kind = getattr(stock, name)
    for arguments, expected in EXPECTED[name]:
        operation = kind(
            **{key: value for key, value in arguments.items() if key in inspect.signature(kind).parameters}
        )
        assert operations_of(SimpleNamespace(operations=[operation]), lambda: CONFIG) == expected
    for case in CASES[name]:
        wanted, found = (
            converted_by_stock(case, tensors_of(case, seed=1)),
            converted_by_us(case, tensors_of(case, seed=1)),
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_argument_of_an_op_is_told_apart(name: str) -> None:
    """An argument that a newer transformers adds may change what an op does, and would be lost without a word."""
    if name not in op_names():
        pytest.skip("not in this transformers")
    known = {key for arguments, _ in EXPECTED[name] for key in arguments}
    unused = {"num_shards_attribute", "inverse"}  # of Concatenate, whose sources are all there, and of the vision ones
    assert {*inspect.signature(getattr(stock, name)).parameters} - known <= unused


def test_chains_keep_their_order() -> None:
    converter = WeightConverter(
        ["e.*.a", "e.*.b"], "c", operations=[MergeModulelist(0), Concatenate(1), Transpose(1, 2)]
    )
    assert operations_of(converter, lambda: None) == (
        transforms.Stack(0),
        transforms.Concatenate(1),
        transforms.Transpose(1, 2),
    )


def test_an_op_that_is_not_known_is_named() -> None:
    class Shuffle(ConversionOps):
        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    converter = SimpleNamespace(operations=[Concatenate(0), Shuffle()])
    with pytest.raises(UnknownOpError, match=f"Shuffle of {__name__}"):
        operations_of(converter, lambda: None)


def test_an_op_of_transformers_that_is_not_told_here_is_left_to_it() -> None:
    """The whole converter, as what comes before such an op has to be computed as well."""
    converter = SimpleNamespace(operations=[Concatenate(0), stock._IdentityOp()])
    (operation,) = operations_of(converter, lambda: None)
    assert isinstance(operation, transforms.Computed)
    assert (operation.name, operation.converter) == ("_IdentityOp", converter)


def test_an_op_that_an_author_derives_from_a_known_one_is_not_known() -> None:
    derived = type("Concatenate", (Concatenate,), {"__module__": "mine"})
    rule = WeightConverter(["a", "b"], "c", operations=[derived(0)])
    with pytest.raises(RecipeError, match="conversion op Concatenate of mine is not known"):
        rules_from_mapping([rule], "r.yaml:5")


def test_a_case_that_is_wrong_would_show() -> None:
    """The comparison with transformers can fail."""
    case = CASES["Transpose"][0]
    other = Case(lambda: [stock.Transpose(0, 1)], {"a": [(5, 3)]}, ["b"])
    (one,), (two,) = (converted(case, tensors_of(case)).values() for converted in (converted_by_stock, converted_by_us))
    (three,) = converted_by_us(other, tensors_of(other)).values()
    assert torch.equal(one, two)
    assert one.shape != three.shape
