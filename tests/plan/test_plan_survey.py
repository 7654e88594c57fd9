"""The survey: groups of tensors, and what layouts could pack, from names, dtypes and shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.plan import Join, Packable, PackState, TensorGroup, find_packable, group_tensors, size_by_dtype
from kconvert.transforms import LayoutSpec, concatenate, rename


@dataclass(frozen=True)
class Tensor:
    dtype: str = "F32"
    shape: tuple[int, ...] = (4, 8)
    size_bytes: int = 128


def _spec(
    name: str = "mlp_pair", *, members: tuple[str, ...] = ("mlp",), joins: bool = True, takes: str = ""
) -> LayoutSpec:
    """gate, then up, in one; and down as it is, unless the layout takes named children only."""
    rules = (
        (concatenate(["gate.weight", "up.weight"], "gate_up.weight", takes_packed=True),)
        + (concatenate(["gate.bias", "up.bias"], "gate_up.bias", optional=True, takes_packed=True),)
        if joins
        else ()
    )
    rest = () if takes else (rename("down.weight"),)
    return LayoutSpec(name, 1, members, rules + rest, (), "nowhere:Layout", "", frozenset(takes.split()))


PAIR = _spec()
MLP = {"gate.weight": Tensor(), "up.weight": Tensor(), "down.weight": Tensor(shape=(8, 4))}


def _tensors(*paths: str, **more: Tensor) -> dict[str, Tensor]:
    """The MLP at every path; `more` by full name, `__` for a dot; a size of 0 takes a tensor away."""
    found = {f"{path}.{name}": tensor for path in paths for name, tensor in MLP.items()}
    found |= {name.replace("__", "."): tensor for name, tensor in more.items()}
    return {name: tensor for name, tensor in found.items() if tensor.size_bytes}


NONE = Tensor(size_bytes=0)
WEIGHTS = Join(("gate.weight", "up.weight"), "gate_up.weight")
BIASES = Join(("gate.bias", "up.bias"), "gate_up.bias")


# --- groups -------------------------------------------------------------------------------------------


def test_tensors_are_grouped_by_their_names_without_numbers() -> None:
    tensors = {
        "layers.10.w": Tensor("BF16", (7,), 12),
        "layers.2.w": Tensor("F32", (2, 3), 24),
        "layers.2x.w": Tensor(),
        "layers.0.w": Tensor("BF16", (5,), 10),
        "head": Tensor(),
    }
    assert group_tensors(tensors) == (
        TensorGroup("head", 1, ((4, 8),), ("F32",), 128),
        TensorGroup("layers.*.w", 3, ((5,), (2, 3), (7,)), ("BF16", "F32"), 46),
        TensorGroup("layers.2x.w", 1, ((4, 8),), ("F32",), 128),
    )


def test_sizes_by_dtype_begin_with_the_largest() -> None:
    tensors = {
        "a": Tensor("F32", (), 4),
        "b": Tensor("BF16", (), 100),
        "c": Tensor("F32", (), 4),
        "d": Tensor("I8", (), 8),
    }
    assert list(size_by_dtype(tensors).items()) == [("BF16", 100), ("F32", 8), ("I8", 8)]


@given(st.dictionaries(st.from_regex(r"[a-z0-9]{1,2}(\.[a-z0-9]{1,2}){0,3}", fullmatch=True), st.integers(1, 99)))
def test_groups_hold_every_tensor_once(sizes: dict[str, int]) -> None:
    groups = group_tensors({name: Tensor(size_bytes=size) for name, size in sizes.items()})
    assert sum(group.count for group in groups) == len(sizes)
    assert sum(group.size_bytes for group in groups) == sum(sizes.values())
    assert len({group.name for group in groups}) == len(groups)


# --- what could be packed -----------------------------------------------------------------------------


def test_modules_that_can_be_packed() -> None:
    found = find_packable(_tensors("m.10.mlp", "m.2.mlp", "other.mlp"), [PAIR])
    assert found == (
        Packable("mlp_pair", "m.*.mlp", ("m.2.mlp", "m.10.mlp"), PackState.READY, (WEIGHTS,), 512, None),
        Packable("mlp_pair", "other.mlp", ("other.mlp",), PackState.READY, (WEIGHTS,), 256, None),
    )


def test_biases_are_joined_too_and_make_a_group_of_their_own() -> None:
    tensors = _tensors(
        "m.0.mlp", "m.1.mlp", m__1__mlp__gate__bias=Tensor(shape=(4,)), m__1__mlp__up__bias=Tensor(shape=(4,))
    )
    plain, biased = find_packable(tensors, [PAIR])
    assert (plain.paths, plain.joins, plain.size_bytes) == (("m.0.mlp",), (WEIGHTS,), 256)
    assert (biased.paths, biased.joins, biased.size_bytes) == (("m.1.mlp",), (WEIGHTS, BIASES), 512)


def test_modules_that_are_packed_already() -> None:
    tensors = _tensors(
        "m.0.mlp",
        m__0__mlp__gate__weight=NONE,
        m__0__mlp__up__weight=NONE,
        m__0__mlp__gate_up__weight=Tensor(size_bytes=300),
    )
    (found,) = find_packable(tensors, [PAIR])
    assert (found.state, found.reason, found.size_bytes) == (PackState.PACKED, None, 300)
    assert found.joins == (Join(("gate_up.weight",), "gate_up.weight"),)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"m__1__mlp__up__weight": NONE}, ["mlp.gate_up.weight", "mlp.up.weight", "does not have"]),
        ({"m__1__mlp__down__weight": NONE}, ["mlp.down.weight", "does not have"]),
        ({"m__1__mlp__gate__bias": Tensor()}, ["mlp.gate_up.bias", "mlp.up.bias"]),
        ({"m__1__mlp__gate__weight_scale": Tensor()}, ["no place for", "mlp.gate.weight_scale"]),
        ({"m__1__mlp__gate_up__weight": Tensor()}, ["no place for", "mlp.gate_up.weight"]),
        ({"m__1__mlp__up__weight": Tensor(shape=(4, 9))}, ["gate.weight and up.weight do not join", "[4, 9]"]),
        (
            {"m__1__mlp__up__weight": Tensor("BF16")},
            ["mixed dtypes: gate.weight is F32, up.weight is BF16; `dtype:` in the patch settles it"],
        ),
        ({"m__1__mlp__up__weight": Tensor("F8_E4M3")}, ["mixed dtypes: gate.weight is F32, up.weight is F8_E4M3"]),
    ],
)
def test_modules_that_cannot_be_packed_say_why(more: dict[str, Tensor], words: list[str]) -> None:
    whole, broken = find_packable(_tensors("m.0.mlp", "m.1.mlp", **more), [PAIR])
    assert (whole.paths, whole.state) == (("m.0.mlp",), PackState.READY)
    assert (broken.paths, broken.state) == (("m.1.mlp",), PackState.REFUSED)
    assert broken.size_bytes > 0
    assert [word for word in words if word not in str(broken.reason)] == []
    assert "m.1" not in str(broken.reason)


def test_modules_under_other_names_are_named_by_their_own() -> None:
    broken = {f"m__0__{name}__up__weight": NONE for name in ("mlp", "shared")}
    found = find_packable(_tensors("m.0.mlp", "m.0.shared", **broken), [PAIR])
    assert [(one.modules, one.reason) for one in found] == [
        (f"m.*.{name}", f"'{name}.gate_up.weight' needs '{name}.up.weight', which the checkpoint does not have")
        for name in ("mlp", "shared")
    ]


def test_a_quantised_dtype_has_no_way_out() -> None:
    (found,) = find_packable(_tensors("mlp", mlp__up__weight=Tensor("F8_E4M3")), [PAIR])
    assert "`dtype:`" not in str(found.reason)


def test_what_is_wrong_in_the_same_way_is_one_group() -> None:
    tensors = _tensors("m.0.mlp", "m.1.mlp", m__0__mlp__up__weight=NONE, m__1__mlp__up__weight=NONE)
    (found,) = find_packable(tensors, [PAIR])
    assert found.paths == ("m.0.mlp", "m.1.mlp")


def test_an_obstacle_refuses_what_could_be_packed_and_nothing_else() -> None:
    tensors = _tensors("m.0.mlp", "m.1.mlp", m__1__mlp__up__weight=NONE)
    ready, broken = find_packable(tensors, [PAIR], obstacle="it is quantised")
    assert (ready.state, ready.reason, ready.joins) == (PackState.REFUSED, "it is quantised", (WEIGHTS,))
    assert "does not have" in str(broken.reason)


def test_whole_segments_only() -> None:
    """A router `gate.weight` beside no `up`, `xgate.weight`, and names that only end alike are no candidates."""
    tensors = {"m.xgate.weight": Tensor(), "m.gate.weight.more": Tensor(), "gate.weight": Tensor(), "m.gate": Tensor()}
    assert find_packable(tensors, [PAIR]) == ()


def test_a_layout_that_takes_named_children_leaves_the_others_alone() -> None:
    tensors = _tensors("m.0.mlp", m__0__mlp__norm__weight=Tensor())
    takes = _spec("named", takes="gate up gate_up")
    assert [found.state for found in find_packable(tensors, [takes])] == [PackState.READY]
    assert [found.state for found in find_packable(tensors, [PAIR])] == [PackState.REFUSED]


def test_fusions_and_layouts_that_join_nothing_are_passed_over() -> None:
    fusion = _spec("fusion", members=("mlp", "norm"))
    assert find_packable(_tensors("mlp"), [fusion, _spec("plain", joins=False)]) == ()
    assert [found.layout for found in find_packable(_tensors("mlp"), [_spec("b"), fusion, _spec("a")])] == ["b", "a"]


def test_a_finding_is_refused_with_a_reason_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="reason"):
        Packable("a", "b", ("b",), PackState.READY, (), 0, "why")
    with pytest.raises(ValueError, match="reason"):
        Packable("a", "b", ("b",), PackState.REFUSED, (), 0, None)
