"""Patterns against modules, and claims against each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from kconvert.errors import RecipeError
from kconvert.manifest import LayoutRecord
from kconvert.patterns import PathPattern
from kconvert.plan import Claim, Entry, Pair, check_conflicts, match_entries, module_paths_of

PATHS = [f"model.layers.{number}{rest}" for number in range(12) for rest in ("", ".mlp", ".mlp.act_fn", ".norm")]
CLASSES = {
    path: {"mlp": "MLP", "norm": "Norm", "act_fn": "Act"}.get(path.rpartition(".")[2], "Layer") for path in PATHS
}


def entry(number: int, *pairs: tuple[str, str], takes: Collection[str] = ()) -> Entry:
    return Entry(
        number=number,
        where=f"r.yaml:{10 * number + 5}",
        kind="fuse" if len(pairs) > 1 else "replace",
        pairs=tuple(
            Pair(name, PathPattern.parse(path), f"r.yaml:{10 * number + 6 + line}")
            for line, (name, path) in enumerate(pairs)
        ),
        kernels=("cpu_test",),
        layout=LayoutRecord("test", 1),
        changes_parameters=True,
        bind=lambda paths, names: (),
        takes=frozenset(takes),
    )


def claims(
    *entries: Entry, paths: Sequence[str] = PATHS, classes: Mapping[str, str] | None = CLASSES
) -> tuple[Claim, ...]:
    return match_entries(entries, paths, classes)[0]


def expect_refused(
    *entries: Entry, paths: Sequence[str] = PATHS, classes: Mapping[str, str] | None = CLASSES
) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        check_conflicts(entries, claims(*entries, paths=paths, classes=classes))
    assert caught.value.exit_code == 3
    return caught.value


def test_paths_that_tensor_names_imply() -> None:
    assert module_paths_of(["a.2.b.w", "a.10.w", "top"]) == ("a", "a.2", "a.2.b", "a.10")


def test_every_number_is_claimed_once_with_its_own_sibling() -> None:
    found = claims(entry(0, ("Norm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp")))
    assert found == tuple(Claim(0, (f"model.layers.{n}.norm", f"model.layers.{n}.mlp")) for n in range(12))


def test_number_sets_take_numbers_and_not_prefixes() -> None:
    found = claims(entry(0, ("MLP", "model.layers.{0-1,10}.mlp")), entry(1, ("MLP", "model.layers.{2-9,11}.mlp")))
    assert [int(claim.paths[0].split(".")[2]) for claim in found] == [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9, 11]
    check_conflicts([entry(0, ("MLP", "a")), entry(1, ("MLP", "b"))], found)


def test_a_number_set_with_numbers_that_the_model_lacks() -> None:
    error = expect_refused(entry(2, ("MLP", "model.layers.{0,11-99}.mlp")))
    assert error.where == "r.yaml:26"
    assert "names 12, and no module is there" in str(error)
    assert "the numbers that match are 0, 11" in str(error)


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("model.layers.*.mpl", "model.layers.*.mlp"),
        ("model.layer.*.mlp", "model.layers.*.mlp"),
        ("layers.*.mlp", "model.layers.*.mlp"),
    ],
)
def test_no_match_lists_near_misses(pattern: str, near: str) -> None:
    error = expect_refused(entry(2, ("MLP", pattern)))
    assert error.where == "r.yaml:26"
    assert error.what == f"path pattern {pattern!r} matches no module"
    assert near in str(error.fix)


@pytest.mark.parametrize(
    "pattern", ["model.layers.mlp", "model.*.mlp", "model.layers.{12}.mlp", "model.layers.*.*.mlp"]
)
def test_a_wildcard_is_exactly_one_segment(pattern: str) -> None:
    assert "matches no module" in expect_refused(entry(0, ("MLP", pattern))).what


def test_another_class() -> None:
    error = expect_refused(entry(1, ("Norm", "model.layers.*.mlp")))
    assert error.where == "r.yaml:16"
    assert error.what == "'model.layers.0.mlp' is a MLP, the recipe names Norm"
    assert error.fix == "write class: MLP, narrow the path, or pass such modules over with optional: true"


def test_a_fused_sibling_that_is_missing() -> None:
    less = [path for path in PATHS if path != "model.layers.7.mlp"]
    fuse = entry(0, ("Norm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp"))
    error = expect_refused(fuse, paths=less)
    assert (error.where, error.what) == (
        "r.yaml:7",
        "'model.layers.7.norm' has no sibling for 'model.layers.*.mlp'",
    )
    less = [path for path in PATHS if path != "model.layers.7.norm"]
    assert expect_refused(fuse, paths=less).what == "'model.layers.7.mlp' has no sibling for 'model.layers.*.norm'"


def test_a_module_taken_twice() -> None:
    error = expect_refused(entry(0, ("MLP", "model.layers.*.mlp")), entry(1, ("MLP", "model.layers.{11}.mlp")))
    assert error.where == "r.yaml:15"
    assert error.what == "'model.layers.11.mlp' is already taken by the entry at r.yaml:5"


def test_one_entry_cannot_take_a_module_twice_either() -> None:
    error = expect_refused(entry(0, ("MLP", "model.layers.0.mlp"), ("MLP", "model.layers.0.mlp")))
    assert "'model.layers.0.mlp' is already taken" in error.what


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_module_and_a_part_of_it(order: tuple[int, int]) -> None:
    patterns = [("Layer", "model.layers.{3}"), ("Act", "model.layers.*.mlp.act_fn")]
    error = expect_refused(*(entry(number, patterns[index]) for number, index in enumerate(order)))
    assert "'model.layers.3.mlp.act_fn' is already taken by the entry at" in error.what
    assert {str(error.where), error.what.rpartition(" ")[2]} == {"r.yaml:5", "r.yaml:15"}


def test_neighbours_with_a_common_prefix_do_not_overlap() -> None:
    paths = ["a.mlp", "a.mlp_norm", "a.mlp2.x"]
    entries = [entry(number, ("X", path)) for number, path in enumerate(paths)]
    found = claims(*entries, paths=paths, classes=None)
    check_conflicts(entries, found)
    assert [claim.paths[0] for claim in found] == paths


def test_traces_hold_every_pattern_with_what_it_matched() -> None:
    _, traces = match_entries([entry(0, ("Norm", "model.layers.{1,2}.norm"), ("MLP", "model.layers.{1-2}.mlp"))], PATHS)
    assert [(trace.class_name, trace.pattern, trace.matched) for trace in traces] == [
        ("Norm", "model.layers.{1,2}.norm", ("model.layers.1.norm", "model.layers.2.norm")),
        ("MLP", "model.layers.{1-2}.mlp", ("model.layers.1.mlp", "model.layers.2.mlp")),
    ]


# --- layouts that take named children -----------------------------------------------------------------

ATTENTION = [
    f"layers.{number}{rest}" for number in range(2) for rest in ("", ".attn", ".attn.q", ".attn.q.lora", ".attn.norm")
]
QKV = ("q", "k", "v", "qkv")


def attention(number: int, path: str = "layers.*.attn", takes: Collection[str] = QKV) -> Entry:
    return entry(number, ("X", path), takes=takes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_a_layout_does_not_take_belongs_to_another_entry(order: tuple[int, int]) -> None:
    entries = [attention(0), entry(1, ("X", "layers.*.attn.norm"))]
    entries = [replace(entries[place], number=number) for number, place in enumerate(order)]
    found = claims(*entries, paths=ATTENTION, classes=None)
    check_conflicts(entries, found)
    assert sorted(claim.paths[0] for claim in found) == [
        "layers.0.attn",
        "layers.0.attn.norm",
        "layers.1.attn",
        "layers.1.attn.norm",
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("path", "takes", "disputed"),
    [
        ("layers.*.attn", QKV, "layers.0.attn"),  # the same kernel twice
        ("layers.{1}.attn", ("norm",), "layers.1.attn"),  # two layouts on one module would both change its class
        ("layers.*.attn", (), "layers.0.attn"),  # a package on the same module
        ("layers.*.attn.q", (), "layers.0.attn.q"),  # a projection by itself
        ("layers.*.attn.q.lora", (), "layers.0.attn.q.lora"),  # and what is below it
        ("layers.{1}", (), "layers.1.attn"),  # a package above
        ("layers.{1}", ("attn",), "layers.1.attn"),
    ],
)
def test_what_a_layout_takes_belongs_to_no_other_entry(
    path: str, takes: tuple[str, ...], disputed: str, order: tuple[int, int]
) -> None:
    both = [attention(0), attention(1, path, takes)]
    entries = [replace(both[place], number=number) for number, place in enumerate(order)]
    error = expect_refused(*entries, paths=ATTENTION, classes=None)
    assert error.what.startswith(f"{disputed!r} is already taken by the entry at ")
    assert {str(error.where), error.what.rpartition(" ")[2]} == {"r.yaml:5", "r.yaml:15"}


def test_a_layout_above_that_takes_another_child() -> None:
    entries = [attention(0), attention(1, "layers.*", ("mlp",))]
    found = claims(*entries, paths=ATTENTION, classes=None)
    check_conflicts(entries, found)
    assert len(found) == 4


def test_the_nearest_name_is_no_name() -> None:
    """`q` is not `q_norm`."""
    paths = ["attn", "attn.q", "attn.q_norm", "attn.qkv2"]
    entries = [attention(0, "attn"), entry(1, ("X", "attn.q_norm")), entry(2, ("X", "attn.qkv2"))]
    check_conflicts(entries, claims(*entries, paths=paths, classes=None))


MIXED = {**CLASSES, **{f"model.layers.{number}.mlp": "Experts" for number in range(3, 12)}}
"""Dense layers 0 to 2, experts in the others."""


def optional(*pairs: tuple[str, str], number: int = 0) -> Entry:
    return replace(entry(number, *pairs), optional=True)


def test_an_optional_entry_takes_the_modules_of_its_class() -> None:
    dense = optional(("MLP", "model.layers.*.mlp"))
    assert claims(dense, classes=MIXED) == tuple(Claim(0, (f"model.layers.{n}.mlp",)) for n in range(3))
    strict = expect_refused(entry(0, ("MLP", "model.layers.*.mlp")), classes=MIXED)
    assert "'model.layers.3.mlp' is a Experts, the recipe names MLP" in str(strict)
    assert "optional: true" in str(strict)


def test_an_optional_fusion_takes_whole_rows_only() -> None:
    fused = optional(("Norm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp"))
    found = claims(fused, classes=MIXED)
    assert found == tuple(Claim(0, (f"model.layers.{n}.norm", f"model.layers.{n}.mlp")) for n in range(3))


def test_an_optional_entry_may_take_nothing_beside_others() -> None:
    norms = entry(0, ("Norm", "model.layers.*.norm"))
    for pair in (("MLP", "model.layers.*.shared"), ("Other", "model.layers.*.mlp")):
        assert {claim.entry for claim in claims(norms, optional(pair, number=1))} == {0}


def test_an_optional_entry_that_means_nothing_in_the_model_is_refused() -> None:
    norms = entry(0, ("Norm", "model.layers.*.norm"))
    error = expect_refused(norms, optional(("MLPx", "model.layers.*.mpl"), number=1))
    assert "path pattern 'model.layers.*.mpl' matches no module, and the model has no MLPx" in str(error)
    assert "did you mean model.layers.*.mlp" in str(error)
    assert error.where == "r.yaml:16"


def test_a_recipe_of_optional_entries_that_take_nothing_is_refused() -> None:
    error = expect_refused(optional(("Other", "model.layers.*.mlp")))
    assert "no entry of the recipe matches a module" in str(error)
