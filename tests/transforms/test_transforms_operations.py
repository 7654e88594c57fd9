"""Operations: each against transformers' own op on real tensors, alone and in chains, and what each refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import core_model_loading as stock

from kconvert.kernels.rearrange import rearrange
from kconvert.transforms import (
    BoundRule,
    Chunk,
    Collected,
    Computed,
    Concatenate,
    Interleave,
    Operation,
    PermuteHeads,
    Reshape,
    ShapeError,
    SplitToShapes,
    Stack,
    StackHalves,
    Transpose,
    Unstack,
    UnstackHalves,
    whole,
)
from tests.convert.stock_ops import CASES, PREFIX, Case, converted_by_stock, converted_by_us, op_names, tensors_of

EXAMPLES = [
    pytest.param(case, id=f"{name}-{number}")
    for name, cases in CASES.items()
    if name in op_names()
    for number, case in enumerate(cases)
]


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", EXAMPLES)
def test_names_and_values_are_those_of_transformers(case: Case, dtype: torch.dtype) -> None:
    wanted = converted_by_stock(case, tensors_of(case, dtype=dtype))
    check_equal(converted_by_us(case, tensors_of(case, dtype=dtype)), wanted)


@pytest.mark.parametrize("case", EXAMPLES)
def test_so_is_the_way_back(case: Case) -> None:
    """By the reverse that transformers itself makes of the converter, with the tensors that the converter made."""
    made = converted_by_stock(case, tensors_of(case))
    back: Any = case.converter().reverse_transform()
    tensors: dict[str, list[torch.Tensor]] = {pattern: [] for pattern in back.source_patterns}
    for name, tensor in made.items():
        tensors[next(pattern for pattern in tensors if matches(pattern, name.removeprefix(PREFIX)))].append(tensor)
    wanted = converted_by_stock(case, {name: [*found] for name, found in tensors.items()}, back)
    again: Any = case.converter().reverse_transform()
    check_equal(converted_by_us(case, tensors, again), wanted)
    before = sum(tensor.numel() for found in tensors_of(case).values() for tensor in found)
    assert sum(tensor.numel() for tensor in wanted.values()) == before


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is the pattern with a number in place of its star."""
    before, star, after = pattern.partition("*")
    if not star:
        return name == pattern
    return name.startswith(before) and name.endswith(after) and name[len(before) : len(name) - len(after)].isdigit()


@st.composite
def chains(draw: st.DrawFn) -> Case:
    """Several tensors stacked or joined, then turned, then dealt out or cut."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 4, 6]), min_size=2, max_size=2)))
    num_patterns, num_each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    links: list[tuple[str, tuple[int, ...]]] = [("MergeModulelist", (draw(st.integers(0, 2)),))]
    links += [("Concatenate", (draw(st.integers(-3, 2)),))] if num_patterns > 1 else []
    for kind in draw(st.lists(st.sampled_from(["Transpose", "Interleave"]), max_size=3)):
        axes = (draw(st.integers(0, 2)), draw(st.integers(0, 2))) if kind == "Transpose" else (draw(st.integers(0, 2)),)
        links.append((kind, axes))
    return Case(
        lambda: [getattr(stock, name)(*arguments) for name, arguments in links],
        {f"experts.*.{number}.weight": [shape] * num_each for number in range(num_patterns)},
        ["experts.all"],
    )


@settings(max_examples=150, deadline=None)
@given(chains())
def test_any_chain(case: Case) -> None:
    try:
        wanted = converted_by_stock(case, tensors_of(case))
    except RuntimeError:  # an axis of odd size cannot be dealt out to two
        with pytest.raises(ShapeError, match="interleave"):
            converted_by_us(case, tensors_of(case))
        return
    check_equal(converted_by_us(case, tensors_of(case)), wanted)


# --- what an operation refuses, and how it is called ----------------------------------------------------------


def run(operation: Operation, shapes: dict[str, list[tuple[int, ...]]], *targets: str) -> dict[str, tuple[int, ...]]:
    """The shapes of what it makes of tensors with these shapes."""
    names = {pattern: [f"{pattern}#{number}" for number in range(len(found))] for pattern, found in shapes.items()}
    inputs = {
        name: whole(name, shape)
        for pattern, found in shapes.items()
        for name, shape in zip(names[pattern], found, strict=True)
    }
    collected = tuple(Collected(pattern, tuple(found)) for pattern, found in names.items())
    made = BoundRule(collected, targets[0], (operation,), targets).arrange(inputs)
    return {name: arrangement.shape for name, arrangement in made.items()}


@pytest.mark.parametrize(
    ("operation", "shapes", "targets", "said"),
    [
        (Concatenate(), {"a": [(2, 3)], "b": [(2, 4)]}, ["c"], r"concatenate\(0\): shapes .* differ outside axis 0"),
        (Concatenate(), {"a": [(2, 3)], "b": [(2, 3)]}, ["c", "d"], "one tensor cannot be all of c, d"),
        (Stack(), {"a.*": [(2, 3), (3, 2)]}, ["c"], r"stack\(0\): shapes .* cannot be stacked"),
        (Chunk(), {"a": [(4, 2)], "b": [(4, 2)]}, ["c", "d"], r"chunk\(0\): one tensor is wanted, and there are 2"),
        (Chunk(), {"a": [(4, 2)]}, ["c", "d", "e"], "does not make 3 parts"),
        (Chunk(2), {"a": [(4, 2)]}, ["c", "d"], "no axis 2"),
        (Interleave(), {"a": [(5, 2)]}, ["b"], r"interleave\(0\): axis 0 of shape \[5, 2\] has no 2 equal groups"),
        (Interleave(0, inverse=True), {"a": [(5, 2)]}, ["b"], r"interleave\(0, inverse\): .* has no 2 equal groups"),
        (Transpose(0, 2), {"a": [(5, 2)]}, ["b"], r"transpose\(0, 2\): no axis 2"),
        (Transpose(), {"a": [(5, 2)], "b": [(5, 2)]}, ["c"], "one tensor is wanted, and there are 2"),
        (PermuteHeads(4), {"a": [(12, 2)]}, ["b"], "12 rows are no 4 heads of pairs"),
        (Reshape((-1,), 5), {"a": [(2, 3, 4)]}, ["b"], r"shape \[2, 3, 4\] has not 5 axes"),
        (SplitToShapes(), {"a": [(4, 2)]}, ["b", "c"], "the model has no 'b' that says how large its part is"),
        (StackHalves(), {"a.*": [(2, 3), (3, 2)]}, ["b"], "cannot be stacked"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    operation: Operation, shapes: dict[str, list[tuple[int, ...]]], targets: Sequence[str], said: str
) -> None:
    with pytest.raises(ShapeError, match=said):
        run(operation, shapes, *targets)


def test_parts_that_do_not_add_up_to_the_models_shapes() -> None:
    rule = BoundRule((Collected("a", ("a",)),), "x.b", (SplitToShapes(),), ("b", "c"))
    shapes = {"x.b": (3, 2), "x.c": (1, 2)}
    made = rule.arrange({"a": whole("a", (4, 2))}, shapes.get)
    assert {name: each.shape for name, each in made.items()} == shapes
    with pytest.raises(ShapeError, match=r"split\(0\): sizes \[3, 1\] do not add up to axis 0"):
        rule.arrange({"a": whole("a", (5, 2))}, shapes.get)


def test_a_chain_that_is_left_with_a_list() -> None:
    rule = BoundRule((Collected("a.*", ("a.0", "a.1")),), "b", (PermuteHeads(1, only=("none",)),), ("b",))
    with pytest.raises(ShapeError, match="'b' is left with 2 tensors"):
        rule.arrange({name: whole(name, (4,)) for name in ("a.0", "a.1")})


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Concatenate(1), "concatenate(1)"),
        (Stack(0), "stack(0)"),
        (Unstack(0), "unstack(0)"),
        (Chunk(-1), "chunk(-1)"),
        (SplitToShapes(1), "split(1)"),
        (Interleave(1), "interleave(1)"),
        (Interleave(1, inverse=True), "interleave(1, inverse)"),
        (Transpose(1, 2), "transpose(1, 2)"),
        (PermuteHeads(32), "permute(32 heads)"),
        (PermuteHeads(32, inverse=True), "permute(32 heads, inverse)"),
        (Reshape((3, 2, 2), 2), "reshape(3, 2, 2)"),
        (StackHalves(0, 1), "stack(0), concatenate(1)"),
        (UnstackHalves(0, 1), "chunk(1), unstack(0)"),
        (Computed("Dequantise", None), "compute(Dequantise)"),
    ],
)
def test_how_people_read_it(operation: Operation, text: str) -> None:
    assert str(operation) == text
    rule = BoundRule((Collected("a", ("a",)),), "b", (operation, Transpose(0, 1)))
    assert rule.label == f"{text}, transpose(0, 1)"


def test_a_transpose_that_only_turns_what_does_not_fit() -> None:
    rule = BoundRule((Collected("a", ("a",)),), "b", (Transpose(0, 1, unless_fits=True),))
    for shape, stays in (((3, 5), True), ((5, 3), False)):
        made = rule.arrange({"a": whole("a", (3, 5))}, {"b": shape}.get)["b"]
        assert (made.shape, made.is_whole((3, 5))) == (shape, stays)


def test_gate_and_up_that_lie_in_turn_by_value() -> None:
    """A4: x = [1, -1], gate = I, up = 2 I, stored as g0 u0 g1 u1; cut in halves the same tensor gives other values."""
    gate, up = torch.eye(2), 2 * torch.eye(2)
    stored = {"gate_up": torch.stack([gate, up], dim=1).reshape(4, 2)}
    assert stored["gate_up"].tolist() == [[1, 0], [2, 0], [0, 1], [0, 2]]

    def result(*operations: Operation) -> list[float]:
        rule = BoundRule((Collected("gate_up", ("gate_up",)),), "gate", operations, ("gate", "up"))
        made = rule.arrange({"gate_up": whole("gate_up", (4, 2))}, lambda name: None)
        rows = {name: rearrange(arrangement, stored) for name, arrangement in made.items()}
        hidden = torch.tensor([1.0, -1.0])
        return (torch.nn.functional.silu(rows["gate"] @ hidden) * (rows["up"] @ hidden)).tolist()

    assert result(Interleave(0), Chunk(0)) == pytest.approx([1.4621, 0.5379], abs=1e-4)
    assert result(Chunk(0)) == pytest.approx([-0.7311, -3.5232], abs=1e-4)
