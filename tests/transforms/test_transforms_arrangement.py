"""Arrangements against numpy: every op on arrays of element numbers, chains of ops, and what they may cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.transforms import Arrangement, Dim, Piece, ShapeError, invert, runs_of, whole
from kconvert.transforms import arrangement as ops
from tests.support import indices_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def values_of(made: Arrangement, sources: Mapping[str, Array]) -> Array:
    """The tensor that `made` describes, by its pieces; each target element has to be in exactly one of them."""
    found = np.zeros(made.size, dtype=np.int64)
    uses = np.zeros(made.size, dtype=np.int64)
    for piece in made.pieces:
        source, target = indices_of(piece.numbers())
        assert piece.size == len(source)
        if piece.size:
            assert (piece.source_end, piece.target_end) == (source.max() + 1, target.max() + 1)
        found[target] = sources[piece.source].ravel()[source]
        np.add.at(uses, target, 1)
    assert (uses == 1).all()
    return found.reshape(made.shape)


def check(made: Arrangement, wanted: Array, sources: Mapping[str, Array]) -> None:
    """The right elements, by pieces and by runs, in pieces that are in normal form."""
    assert made.shape == wanted.shape
    assert (values_of(made, sources) == wanted).all()
    end, found = 0, []
    for run in runs_of(made.pieces):
        assert run.target_start == end
        assert run.size > 0
        found.append(sources[run.source].ravel()[run.source_start : run.source_start + run.size])
        end += run.size
    assert end == made.size
    assert (np.concatenate([np.zeros(0, dtype=np.int64), *found]) == wanted.ravel()).all()
    for piece in made.pieces:
        assert Piece.from_numbers(piece.source, piece.numbers()) == piece


@dataclass
class Chain:
    """A tensor that grows by one op after another, beside what numpy makes of it."""

    made: Arrangement
    wanted: Array
    sources: dict[str, Array] = field(default_factory=dict)

    def source(self, shape: tuple[int, ...]) -> tuple[Arrangement, Array]:
        """A new tensor whose elements are numbers that no other has."""
        name, start = f"s{len(self.sources)}", sum(array.size for array in self.sources.values())
        self.sources[name] = np.arange(start, start + prod(shape)).reshape(shape)
        return whole(name, shape), self.sources[name]

    @property
    def axes(self) -> range:
        return range(len(self.made.shape))


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def np_interleave(array: Array, groups: int, axis: int) -> Array:
    before, size, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    return np.swapaxes(array.reshape(*before, size // groups, groups, *after), axis, axis + 1).reshape(array.shape)


def grow_concatenate(chain: Chain, draw: st.DrawFn) -> None:
    axis = draw(st.sampled_from(chain.axes))
    shape = list(chain.made.shape)
    shape[axis] = draw(st.integers(0, 5))
    other, array = chain.source(tuple(shape))
    first = draw(st.booleans())
    pair = [(chain.made, chain.wanted), (other, array)][:: 1 if first else -1]
    spelled = axis - (len(shape) if draw(st.booleans()) else 0)
    chain.made = ops.concatenate([made for made, _ in pair], spelled)
    chain.wanted = np.concatenate([wanted for _, wanted in pair], axis)


def grow_stack(chain: Chain, draw: st.DrawFn) -> None:
    axis = draw(st.integers(0, len(chain.made.shape)))
    other, array = chain.source(chain.made.shape)
    chain.made, chain.wanted = ops.stack([other, chain.made], axis), np.stack([array, chain.wanted], axis)


def grow_narrow(chain: Chain, draw: st.DrawFn) -> None:
    axis = draw(st.sampled_from(chain.axes))
    start = draw(st.integers(0, chain.made.shape[axis]))
    size = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, max(chain.made.shape[axis] - start, 1)))
    if start + size > chain.made.shape[axis]:
        return
    chain.made = ops.narrow(chain.made, axis, start, size)
    chain.wanted = np.take(chain.wanted, range(start, start + size), axis)


def grow_permute(chain: Chain, draw: st.DrawFn) -> None:
    order = draw(st.permutations(list(chain.axes)))
    chain.made, chain.wanted = ops.permute(chain.made, order), np.transpose(chain.wanted, order)


def grow_transpose(chain: Chain, draw: st.DrawFn) -> None:
    one, two = (draw(st.sampled_from(chain.axes)) for _ in range(2))
    chain.made = ops.transpose(chain.made, one, two - len(chain.axes))
    chain.wanted = np.swapaxes(chain.wanted, one, two)


def grow_reshape(chain: Chain, draw: st.DrawFn) -> None:
    left, shape = chain.made.size, list[int]()
    while left > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from(divisors(left))))
        left //= shape[-1]
    shape.append(left)
    chain.made, chain.wanted = ops.reshape(chain.made, tuple(shape)), chain.wanted.reshape(shape)


def grow_interleave(chain: Chain, draw: st.DrawFn) -> None:
    axis = draw(st.sampled_from(chain.axes))
    groups = draw(st.sampled_from(divisors(chain.made.shape[axis]) or [1]))
    chain.made = ops.interleave(chain.made, groups, axis)
    chain.wanted = np_interleave(chain.wanted, groups, axis)


def grow_chunks(chain: Chain, draw: st.DrawFn) -> None:
    """Cut into chunks that are joined in another order, maybe along another axis."""
    axis, onto = (draw(st.sampled_from(chain.axes)) for _ in range(2))
    count = draw(st.sampled_from(divisors(chain.made.shape[axis]) or [1]))
    if not chain.made.shape[axis]:
        return
    order = draw(st.permutations(range(count)))
    cut, wanted = ops.chunk(chain.made, count, axis), np.split(chain.wanted, count, axis)
    chain.made = ops.concatenate([cut[place] for place in order], onto)
    chain.wanted = np.concatenate([wanted[place] for place in order], onto)


def grow_split(chain: Chain, draw: st.DrawFn) -> None:
    axis = draw(st.sampled_from(chain.axes))
    at = draw(st.integers(0, chain.made.shape[axis]))
    one, two = ops.split(chain.made, [at, chain.made.shape[axis] - at], axis)
    front, back = np.split(chain.wanted, [at], axis)
    chain.made, chain.wanted = ops.concatenate([two, one], axis), np.concatenate([back, front], axis)


GROWERS: Sequence[Callable[[Chain, st.DrawFn], None]] = (
    grow_concatenate,
    grow_stack,
    grow_narrow,
    grow_permute,
    grow_transpose,
    grow_reshape,
    grow_interleave,
    grow_chunks,
    grow_split,
)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Chain:
    made = Chain(whole("none", ()), np.zeros((), dtype=np.int64))
    if shape is None:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    made.made, made.wanted = made.source(shape)
    for grow in draw(st.lists(st.sampled_from(GROWERS), min_size=1, max_size=6)):
        if prod(made.made.shape) <= 2000 and len(made.made.shape) <= 4:
            grow(made, draw)
    return made


@settings(max_examples=300, deadline=None)
@given(chains())
def test_any_chain_of_ops_gives_numpys_elements(chain: Chain) -> None:
    check(chain.made, chain.wanted, chain.sources)


@settings(max_examples=150, deadline=None)
@given(chains())
def test_the_inverse_gives_every_source_and_its_inverse_is_the_arrangement(chain: Chain) -> None:
    used = {name for name in chain.made.sources if chain.sources[name].size}
    shapes = {name: array.shape for name, array in chain.sources.items()}
    back = invert({"t": chain.made}, shapes)
    all_there = {name: set(chain.sources[name].ravel().tolist()) for name in used}
    inside = set(chain.wanted.ravel().tolist())
    if any(not numbers <= inside for numbers in all_there.values()):
        assert back is None
        return
    assert back is not None
    for name, made in back.items():
        check(made, chain.sources[name], {"t": chain.wanted})
    if not chain.made.size:
        return
    again = invert(back, {"t": chain.made.shape})
    assert again is not None
    assert again["t"].shape == chain.made.shape
    one, two = (sorted(repr(piece) for piece in made.pieces if piece.size) for made in (again["t"], chain.made))
    assert one == two


@settings(max_examples=150, deadline=None)
@given(chains(), st.data())
def test_transposing_and_interleaving_twice_changes_nothing(chain: Chain, data: st.DataObject) -> None:
    made = chain.made
    axis = data.draw(st.sampled_from(chain.axes))
    other = data.draw(st.sampled_from(chain.axes))
    twice = ops.transpose(ops.transpose(made, axis, other), axis, other)
    assert (values_of(twice, chain.sources) == chain.wanted).all()
    groups = data.draw(st.sampled_from(divisors(made.shape[axis]) or [1]))
    if made.shape[axis]:
        back = ops.interleave(ops.interleave(made, groups, axis), made.shape[axis] // groups, axis)
        assert (values_of(back, chain.sources) == chain.wanted).all()


@settings(max_examples=300, deadline=None)
@given(chains(), st.data())
def test_a_chain_told_by_what_its_sources_are_made_of(inner: Chain, data: st.DataObject) -> None:
    outer = data.draw(chains(inner.made.shape))
    parts = {name: whole(f"other {name}", array.shape) for name, array in outer.sources.items()}
    sources = {f"other {name}": array + 1_000_000 for name, array in outer.sources.items()}
    made = ops.compose(outer.made, {**parts, "s0": inner.made})
    array_of = {name: sources[f"other {name}"] for name in outer.sources} | {"s0": inner.wanted}
    check(made, values_of(outer.made, array_of), {**sources, **inner.sources})


def test_composing_steps_between_each_other() -> None:
    piece = Piece("p", 1, 0, (Dim(2, 3, 3), Dim(3, 2, 1)))  # of 1 3 5 and 4 6 8
    made = ops.compose(Arrangement((6,), (piece,)), {"p": ops.transpose(whole("a", (2, 5)), 0, 1)})
    assert (values_of(made, {"a": np.arange(10)}) == [5, 6, 7, 2, 3, 4]).all()


def test_composing_is_one_piece_for_each_part_of_stacked_experts() -> None:
    inner = ops.chunk(whole("gate_up", (2 * 8, 4)), 2)
    packed = ops.concatenate([whole("gate", (8, 4)), whole("up", (8, 4))])
    made = ops.compose(packed, {"gate": inner[1], "up": inner[0]})
    assert [piece.numbers() for piece in made.pieces] == [(32, 0, 32, 1, 1), (0, 32, 32, 1, 1)]


# --- fixed values -----------------------------------------------------------------------------------


def test_gate_rows_then_up_rows() -> None:
    """A3: the order of the parts is the order of the list, in elements."""
    gate, up = whole("gate", (12, 8)), whole("up", (12, 8))
    made = ops.concatenate([gate, up])
    assert made.shape == (24, 8)
    assert [(piece.source, piece.numbers()) for piece in made.pieces] == [
        ("gate", (0, 0, 96, 1, 1)),
        ("up", (0, 96, 96, 1, 1)),
    ]
    assert [run.source for run in runs_of(ops.concatenate([up, gate]).pieces)] == ["up", "gate"]
    assert made.sources == ("gate", "up")


def test_columns_that_are_dealt_out_are_read_apart() -> None:
    """A4: columns g0 u0 g1 u1; interleaved first, the halves are the gates and the ups."""
    packed = np.array([[10, 20, 11, 21, 12, 22], [30, 40, 31, 41, 32, 42]])
    gate, up = ops.chunk(ops.interleave(whole("packed", (2, 6)), 2, 1), 2, 1)
    assert values_of(gate, {"packed": packed}).tolist() == [[10, 11, 12], [30, 31, 32]]
    assert values_of(up, {"packed": packed}).tolist() == [[20, 21, 22], [40, 41, 42]]
    assert [piece.numbers() for piece in gate.pieces] == [(0, 0, 6, 2, 1)]
    wrong, _ = ops.chunk(whole("packed", (2, 6)), 2, 1)
    assert values_of(wrong, {"packed": packed}).tolist() == [[10, 20, 11], [30, 40, 31]]


def test_halves_become_dealt_out_columns() -> None:
    halves = np.array([[10, 11, 12, 20, 21, 22]])
    made = ops.interleave(whole("h", (1, 6)), 3, 1)
    assert values_of(made, {"h": halves}).tolist() == [[10, 20, 11, 21, 12, 22]]


def test_interleaved_transposed_experts_and_their_bias() -> None:
    """A4, gpt-oss: [E, H, 2 I] with g0 u0 g1 u1 to [E, 2 I, H] with gates first, and the bias with it."""
    experts, hidden, inner = 2, 3, 2
    weight = np.array(
        [[[100 * e + 10 * h + 2 * i + g for i in range(inner) for g in (0, 1)] for h in range(3)] for e in range(2)]
    )
    made = ops.transpose(ops.interleave(whole("w", (experts, hidden, 2 * inner)), 2, 2), 1, 2)
    assert values_of(made, {"w": weight})[1].tolist() == [
        [100, 110, 120],
        [102, 112, 122],
        [101, 111, 121],
        [103, 113, 123],
    ]
    bias = ops.interleave(whole("b", (experts, 2 * inner)), 2, 1)
    assert values_of(bias, {"b": np.array([[0, 1, 2, 3], [4, 5, 6, 7]])}).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_a_transpose_is_one_piece_with_strides() -> None:
    made = ops.transpose(whole("a", (3, 5)), 0, 1)
    assert (made.shape, [piece.numbers() for piece in made.pieces]) == ((5, 3), [(0, 0, 5, 1, 3, 3, 5, 1)])
    assert (made.pieces[0].run_size, made.pieces[0].source_end) == (1, 15)
    assert ops.transpose(made, 0, 1) == whole("a", (3, 5))


def test_an_axis_of_one_place_can_be_moved_for_free() -> None:
    assert ops.transpose(whole("a", (4, 1, 5)), 0, 1).pieces == whole("a", (4, 1, 5)).pieces


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [(7, 3, [3, 3, 1]), (6, 3, [2, 2, 2]), (5, 3, [2, 2, 1]), (1, 1, [1]), (10, 4, [3, 3, 3, 1])],
)
def test_chunks_are_those_of_torch(size: int, count: int, expected: list[int]) -> None:
    import torch

    cut = ops.chunk(whole("a", (2, size)), count, 1)
    assert [part.shape[1] for part in cut] == expected
    theirs = torch.chunk(torch.arange(2 * size).reshape(2, size), count, dim=1)
    source = {"a": np.arange(2 * size).reshape(2, size)}
    assert [values_of(part, source).tolist() for part in cut] == [part.tolist() for part in theirs]


@pytest.mark.parametrize(("size", "count"), [(4, 3), (2, 3), (6, 4), (0, 2)])
def test_a_number_of_chunks_that_torch_does_not_make(size: int, count: int) -> None:
    import torch

    assert len(torch.chunk(torch.zeros(size), count)) != count or size == 0
    with pytest.raises(ShapeError, match=f"does not make {count} parts"):
        ops.chunk(whole("a", (size,)), count)


def test_a_scalar() -> None:
    scalar = whole("a", ())
    assert (scalar.size, scalar.shape, [piece.numbers() for piece in scalar.pieces]) == (1, (), [(0, 0)])
    assert list(runs_of(scalar.pieces)) == [(0, 0, 1, "a")]
    assert ops.stack([scalar, whole("b", ())]).shape == (2,)
    assert ops.permute(scalar, []) == scalar
    assert ops.reshape(scalar, (1, 1)).pieces == scalar.pieces
    with pytest.raises(ShapeError, match="no axis 0"):
        ops.concatenate([scalar, scalar])


def test_tensors_of_no_elements() -> None:
    empty = whole("a", (0, 3))
    assert (empty.size, [piece.numbers() for piece in empty.pieces]) == (0, [(0, 0, 0, 0, 0)])
    assert list(runs_of(empty.pieces)) == []
    joined = ops.concatenate([empty, whole("b", (2, 3)), whole("c", (0, 3))])
    assert joined.shape == (2, 3)
    assert set(joined.sources) == {"a", "b", "c"}
    assert [run.source for run in runs_of(joined.pieces)] == ["b"]
    assert [piece.numbers() for piece in joined.pieces if not piece.size] == [(0, 0, 0, 0, 0)] * 2
    back = invert({"t": joined}, {"a": (0, 3), "b": (2, 3), "c": (0, 3)})
    assert back is not None
    assert {name: made.shape for name, made in back.items()} == {"a": (0, 3), "b": (2, 3), "c": (0, 3)}
    assert ops.transpose(empty, 0, 1).shape == (3, 0)
    assert ops.stack([empty, empty], 1).shape == (0, 2, 3)
    assert [part.shape for part in ops.chunk(ops.concatenate([empty, empty], 1), 2, 1)] == [(0, 3), (0, 3)]


def test_what_does_not_fit_is_said_with_shapes() -> None:
    a, b = whole("a", (2, 3)), whole("b", (2, 4))
    for make, said in (
        (lambda: ops.concatenate([a, b]), r"shapes \[\[2, 3\], \[2, 4\]\] differ outside axis 0"),
        (lambda: ops.concatenate([]), "no axis 0"),
        (lambda: ops.concatenate([a, b], 2), "no axis 2"),
        (lambda: ops.stack([a, b]), r"shapes \[\[2, 3\], \[2, 4\]\] cannot be stacked"),
        (lambda: ops.stack([a, a], 3), "no axis 3"),
        (lambda: ops.narrow(a, 1, 2, 2), r"no places 2 to 4 along axis 1 of shape \[2, 3\]"),
        (lambda: ops.narrow(a, 1, -1, 2), "no places -1 to 1"),
        (lambda: ops.split(a, [1, 1], 1), r"sizes \[1, 1\] do not add up to axis 1"),
        (lambda: ops.permute(a, [0, 0]), r"\[0, 0\] is no order of the axes"),
        (lambda: ops.reshape(a, (5,)), r"shape \[2, 3\] cannot become \[5\]"),
        (lambda: ops.interleave(a, 2, 1), "has no 2 equal groups"),
        (lambda: ops.interleave(a, 0, 1), "has no 0 equal groups"),
        (lambda: ops.transpose(a, 0, 2), "no axis 2"),
    ):
        with pytest.raises(ShapeError, match=said):
            make()


def test_there_is_no_inverse_where_elements_are_lost_or_twice() -> None:
    a = whole("a", (4, 2))
    assert invert({"t": ops.narrow(a, 0, 0, 3)}, {"a": (4, 2)}) is None
    assert invert({"t": ops.concatenate([a, a])}, {"a": (4, 2)}) is None
    halves = {"one": ops.narrow(a, 0, 0, 3), "two": ops.narrow(a, 0, 3, 1)}
    back = invert(halves, {"a": (4, 2)})
    assert back is not None
    values = {"one": np.arange(6), "two": np.arange(6, 8)}
    assert values_of(back["a"], values).tolist() == np.arange(8).reshape(4, 2).tolist()


def test_whole_is_one_tensor_unchanged() -> None:
    a = whole("a", (4, 6))
    assert a.is_whole((4, 6))
    assert not a.is_whole((6, 4))
    assert not ops.transpose(a, 0, 1).is_whole((6, 4))
    assert not ops.transpose(whole("a", (4, 4)), 0, 1).is_whole((4, 4))
    assert not ops.interleave(a, 2, 1).is_whole((4, 6))
    assert not ops.narrow(a, 0, 0, 2).is_whole((4, 6))
    assert not ops.reshape(a, (6, 4)).is_whole((4, 6))
    assert not ops.concatenate([a, a]).is_whole((4, 6))
    assert ops.concatenate(ops.split(a, [4])).is_whole((4, 6))


# --- what it costs ------------------------------------------------------------------------------------


def experts(count: int, inner: int, hidden: int) -> Arrangement:
    """Gate and up of every expert stacked, then joined: [E, 2 I, H], as transformers merges a mixture of experts."""
    gate, up = (
        ops.stack([whole(f"{number}.{name}", (inner, hidden)) for number in range(count)]) for name in ("gate", "up")
    )
    return ops.concatenate([gate, up], 1)


def test_stacked_experts_are_one_piece_for_each_tensor() -> None:
    made = experts(128, 768, 2048)
    assert (made.shape, len(made.pieces)) == ((128, 1536, 2048), 256)
    assert [run.source for run in runs_of(made.pieces)][:4] == ["0.gate", "0.up", "1.gate", "1.up"]
    assert {piece.run_size for piece in made.pieces} == {768 * 2048}


def test_what_is_done_to_stacked_experts_stays_in_few_pieces() -> None:
    made = experts(128, 768, 2048)
    assert len(ops.transpose(made, 1, 2).pieces) == 256
    assert len(ops.interleave(made, 768, 1).pieces) == 256
    assert [len(part.pieces) for part in ops.chunk(made, 2, 1)] == [128, 128]
    back = invert({"t": made}, dict.fromkeys(made.sources, (768, 2048)))
    assert back is not None
    assert {len(each.pieces) for each in back.values()} == {1}


def test_dealt_out_experts_are_one_piece_for_each_half() -> None:
    """gpt-oss: [E, 2 I, H] with rows g0 u0 g1 u1."""
    made = ops.interleave(whole("w", (32, 5760, 2880)), 2, 1)
    assert [len(part.pieces) for part in ops.chunk(made, 2, 1)] == [1, 1]
    turned = ops.transpose(whole("w", (32, 2880, 5760)), 1, 2)
    assert [len(part.pieces) for part in ops.chunk(ops.interleave(turned, 2, 1), 2, 1)] == [1, 1]


def test_rows_of_heads_are_one_piece() -> None:
    """Rotary pairs to halves: [heads, half, 2] exchanged, then back to rows."""
    apart = ops.reshape(whole("q", (4096, 4096)), (32, 64, 2, 4096))
    assert len(ops.reshape(ops.transpose(apart, 1, 2), (4096, 4096)).pieces) == 1
