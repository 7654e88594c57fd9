"""Path patterns: parsing, matching whole paths, and equality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.errors import PatternError, RecipeError
from kconvert.patterns import NumberSet, PathPattern, braced


@pytest.mark.parametrize(
    ("pattern", "path", "taken"),
    [
        ("model.norm", "model.norm", ()),
        ("model.layers.*.mlp", "model.layers.7.mlp", ("7",)),
        ("model.layers.*.mlp", "model.layers.x.mlp", ("x",)),
        ("model.layers.{0-3,7}.mlp", "model.layers.7.mlp", ("7",)),
        ("*.{1}.*", "a.1.b", ("a", "1", "b")),
        ("a.{ 0 , 2 }", "a.2", ("2",)),
        ("*", "a", ("a",)),
    ],
)
def test_match(pattern: str, path: str, taken: tuple[str, ...]) -> None:
    assert PathPattern.parse(pattern).match(path) == taken


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("model.layers.*.mlp", "model.layers.7.mlp.act"),
        ("model.layers.*.mlp", "xmodel.layers.7.mlp"),
        ("model.layers.*.mlp", "model.layers.7.mlp2"),
        ("model.layers.*.mlp", "model.layers.7.8.mlp"),
        ("model.layers.*.mlp", "model.layers..mlp"),
        ("model.layers.*.mlp", "modelxlayers.7.mlp"),
        ("*", ""),
        ("a.{0-3,7}", "a.4"),
        ("a.{0-3,7}", "a.03"),
        ("a.{0-3,7}", "a.-1"),
        ("a.{0-3,7}", "a.³"),
        ("a.{0-3,7}", "a.٣"),
        ("a.{0-3,7}", "a.0\n"),
        ("a.{0-3,7}", "a." + "9" * 5000),
        ("a", "a\n"),
    ],
)
def test_no_match(pattern: str, path: str) -> None:
    assert PathPattern.parse(pattern).match(path) is None


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("", "empty"),
        (" a", "blanks around it"),
        ("a\n", "blanks around it"),
        (".a", "segment ''"),
        ("a.", "segment ''"),
        ("a..b", "segment ''"),
        ("a.**", r"segment '\*\*'"),
        ("a.b*", r"segment 'b\*'"),
        ("a.b c", "segment 'b c'"),
        ("a.[0]", "is not literal"),
        ("a.é", "is not literal"),
        ("a.{}", "'' in '{}' is no range"),
        ("a.{0,}", "is no range"),
        ("a.{*}", "is no range"),
        ("a.{-1}", "is no range"),
        ("a.{1-2-3}", "is no range"),
        ("a.{٣}", "is no range"),
        ("a.{0-9999999999}", "is no range"),
        ("a.{3-1}", "range '3-1' runs backwards"),
        ("a.{0-3", "is not literal"),
        ("a.{0.3}", "is not literal"),
        ("a.{0}x", "is not literal"),
    ],
)
def test_refused(pattern: str, what: str) -> None:
    with pytest.raises(PatternError, match=what) as caught:
        PathPattern.parse(pattern)
    assert isinstance(caught.value, RecipeError)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_backwards_range_shows_the_right_one() -> None:
    with pytest.raises(PatternError, match="write 1-3"):
        PathPattern.parse("a.{3-1}")


def test_equality_is_by_meaning() -> None:
    assert PathPattern.parse("a.{7,0-1,2-3}") == PathPattern.parse("a.{0-3,7}")
    assert hash(PathPattern.parse("a.{2,0-1}")) == hash(PathPattern.parse("a.{0-2}"))
    assert PathPattern.parse("a.*") != PathPattern.parse("a.{0-3}")
    assert PathPattern.parse("a.{7,0-1}").text == "a.{7,0-1}"


def test_number_sets_are_sorted_and_disjoint() -> None:
    assert PathPattern.parse("{5,0-3,2-4,9}").segments == (NumberSet(((0, 5), (9, 9))),)


def test_parent_and_last() -> None:
    first, second = PathPattern.parse("a.*.norm"), PathPattern.parse("a.*.mlp")
    assert first.parent == second.parent
    assert (first.last, second.last) == ("norm", "mlp")
    assert PathPattern.parse("a.*").last is None
    assert PathPattern.parse("a.{0}").last is None
    assert PathPattern.parse("norm").parent == ()


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 45))
def test_a_number_set_holds_what_was_listed(numbers: set[int], number: int) -> None:
    pattern = PathPattern.parse("a.{" + ",".join(map(str, numbers)) + "}.b")
    assert (pattern.match(f"a.{number}.b") is not None) is (number in numbers)


@given(st.lists(st.from_regex(r"[A-Za-z0-9_\-]{1,5}", fullmatch=True), min_size=1, max_size=5))
def test_a_literal_pattern_matches_itself_only(parts: list[str]) -> None:
    path = ".".join(parts)
    pattern = PathPattern.parse(path)
    assert pattern.match(path) == ()
    assert pattern.match(path + ".x") is None
    assert pattern.match("x." + path) is None
    assert PathPattern.parse(".".join("*" for _ in parts)).match(path) == tuple(parts)


@given(st.text(alphabet="ab.*{}0123-, \n", max_size=20), st.text(alphabet="ab.0123-", max_size=20))
def test_nothing_but_pattern_errors(text: str, path: str) -> None:
    try:
        pattern = PathPattern.parse(text)
    except PatternError:
        return
    taken = pattern.match(path)
    assert taken is None or "" not in taken


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([7], "7"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2,5"), ([10, 9, 2, 0, 1], "0-2,9-10"), ([0, 2, 4], "0,2,4")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert str(NumberSet.of(numbers)) == f"{{{text}}}"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["model.norm"], ["model.norm"]),
        (["model.layers.10.mlp", "model.layers.2.mlp", "model.layers.3.mlp"], ["model.layers.{2-3,10}.mlp"]),
        (["layers.0.a", "norm", "layers.0.b", "layers.1.a"], ["layers.{0-1}.a", "norm", "layers.{0}.b"]),
        # only the first number becomes a set: both as sets would show paths that were not matched
        (["h.0.e.3", "h.0.e.4", "h.1.e.3"], ["h.{0-1}.e.3", "h.{0}.e.4"]),
        (["0", "1"], ["{0-1}"]),
    ],
)
def test_paths_in_brace_notation(paths: list[str], shown: list[str]) -> None:
    assert braced(paths) == shown
