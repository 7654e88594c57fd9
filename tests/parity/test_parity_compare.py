"""The comparison of two results: every tensor, NaN and infinity, structure, and what proves nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kconvert.parity.compare import Output, compare_outputs, judge, same_bits
from kconvert.parity.logits import Figures, _judged, measure
from kconvert.parity.results import LogitsResult, ModuleResult, ModulesLevel, Result, Verdict, worst

NAN, INF = math.nan, math.inf


def compare(expected: Any, found: Any) -> Any:
    return compare_outputs(Output(expected), Output(found))


def verdict(expected: Any, found: Any, limit: float = 0.0) -> tuple[Verdict, str | None]:
    return judge(compare(expected, found), limit=limit)


def test_difference_is_a_share_of_the_largest_stock_value() -> None:
    found = compare(torch.tensor([4.0, -8.0, 0.0]), torch.tensor([4.0, -8.0, 0.5]))
    assert found.relative == 0.5 / 8
    assert not found.is_equal


def test_the_limit_decides() -> None:
    expected, found = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.002])
    assert verdict(expected, found, 1e-2)[0] is Verdict.WITHIN
    assert verdict(expected, found, 1e-4)[0] is Verdict.FAILED
    assert verdict(expected, found)[0] is Verdict.FAILED
    assert verdict(expected, expected.clone())[0] is Verdict.EQUAL


def test_every_tensor_of_a_tuple_counts() -> None:
    one = torch.ones(3)
    assert verdict((one, None, {"a": one}), (one, None, {"a": one}))[0] is Verdict.EQUAL
    assert verdict((one, None, {"a": one}), (one, None, {"a": one + 1}), 1e-3)[0] is Verdict.FAILED


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.ones(2), (torch.ones(2),)),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2))),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ((torch.ones(2), 3), (torch.ones(2), 4)),
        ((torch.ones(2), torch.tensor([1, 2])), (torch.ones(2), torch.tensor([1, 3]))),
    ],
    ids=["structure", "tensor for None", "shape", "dtype", "number", "integers"],
)
def test_what_cannot_be_subtracted_fails_under_any_limit(expected: Any, found: Any) -> None:
    outcome, reason = verdict(expected, found, 1e9)
    assert outcome is Verdict.FAILED
    assert reason


@pytest.mark.parametrize(
    ("expected", "found", "outcome"),
    [
        ([1.0, NAN], [1.0, NAN], Verdict.EQUAL),
        ([1.0, INF], [1.0, INF], Verdict.EQUAL),
        ([1.0, INF], [1.0, -INF], Verdict.FAILED),
        ([1.0, NAN], [1.0, 2.0], Verdict.FAILED),
        ([1.0, 2.0], [1.0, NAN], Verdict.FAILED),
        ([1.0, 2.0], [1.0, INF], Verdict.FAILED),
        ([1.0, NAN], [1.0, INF], Verdict.FAILED),
    ],
)
def test_nan_and_infinity_are_equal_as_such(expected: list[float], found: list[float], outcome: Verdict) -> None:
    assert verdict(torch.tensor(expected), torch.tensor(found), 1e9)[0] is outcome


@pytest.mark.parametrize("values", [[0.0, 0.0], [NAN, NAN], [NAN, 0.0], [INF, INF], [-0.0, NAN]])
def test_zero_or_nan_everywhere_proves_nothing(values: list[float]) -> None:
    outcome, reason = verdict(torch.tensor(values), torch.tensor(values), 1e-3)
    assert outcome is Verdict.NO_PROOF
    assert "proves nothing" in (reason or "")


def test_one_empty_output_beside_a_full_one_proves_nothing() -> None:
    pair = (torch.ones(2), torch.zeros(2))
    assert verdict(pair, pair)[0] is Verdict.NO_PROOF


def test_something_where_stock_is_zero_fails() -> None:
    assert verdict(torch.zeros(2), torch.full((2,), 1e-30), 1e9)[0] is Verdict.FAILED


def test_no_tensor_at_all_proves_nothing() -> None:
    assert verdict((None, 3), (None, 3))[0] is Verdict.NO_PROOF


def test_the_sign_of_a_zero_is_a_bit() -> None:
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])
    assert verdict(one, two) == (Verdict.FAILED, "differs in the sign of a zero")
    assert verdict(one, two, 1e-5)[0] is Verdict.WITHIN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_same_bits_in_every_dtype(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -2.0, 0.5, NAN]).to(dtype)
    two = one.clone()
    assert same_bits(one, two)
    two[1] = -2.5
    assert not same_bits(one, two)


# --- logits -----------------------------------------------------------------------------------------


def figures(one: list[list[float]], two: list[list[float]], mask: list[int], limit: float = 0.1) -> Figures:
    return measure([torch.tensor([one])], [torch.tensor([two])], [torch.tensor([mask])], limit)


def test_figures_are_those_of_the_formulas() -> None:
    stock, other = [[math.log(0.5), math.log(0.5)], [2.0, 0.0]], [[math.log(0.75), math.log(0.25)], [2.0, 0.0]]
    found = figures(stock, other, [1, 1])
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.kl == pytest.approx(divergence / 2, rel=1e-6)  # float32 logits
    assert found.max_abs == pytest.approx(math.log(2), rel=1e-6)
    assert found.mean_abs == pytest.approx((math.log(1.5) + math.log(2)) / 4, rel=1e-6)
    assert (found.largest, found.positions, found.top1) == (2.0, 2, 1.0)


def test_divergence_is_of_the_converted_model_from_the_stock_one() -> None:
    sure, unsure = [[math.log(0.9), math.log(0.1)]], [[math.log(0.5), math.log(0.5)]]
    forth = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert figures(sure, unsure, [1]).kl == pytest.approx(forth, rel=1e-5)
    assert figures(unsure, sure, [1]).kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5.0), rel=1e-5)


def test_masked_positions_count_for_the_bits_only() -> None:
    found = figures([[1.0, 2.0], [5.0, 0.0]], [[9.0, 2.0], [5.0, 0.0]], [0, 1])
    assert (found.max_abs, found.positions, found.top1, found.largest) == (0.0, 1, 1.0, 5.0)
    assert not found.is_equal


def judged(one: list[list[float]], two: list[list[float]], limit: float) -> LogitsResult:
    return _judged(figures(one, two, [1] * len(one), limit), "float32", "auto", "some_kernel", limit)


def test_another_top_token_is_no_failure_where_stock_has_them_closer_than_the_limit() -> None:
    result = judged([[10.0, 9.95, 0.0]], [[9.96, 9.98, 0.0]], 0.01)
    assert result.verdict is Verdict.WITHIN
    assert result.top1 == 0.0


def test_another_top_token_is_a_failure_beyond_the_limit() -> None:
    # each logit is within 0.1, and together they turn over a gap of 0.15
    result = judged([[10.0, 9.85, 0.0]], [[9.91, 9.94, 0.0]], 0.01)
    assert result.verdict is Verdict.FAILED
    assert "1 of 1 positions" in (result.reason or "")


def test_logits_that_are_nan_or_zero_prove_nothing_or_fail() -> None:
    assert judged([[0.0, 0.0]], [[0.0, 0.0]], 0.1).verdict is Verdict.NO_PROOF
    assert judged([[NAN, NAN]], [[NAN, NAN]], 0.1).verdict is Verdict.NO_PROOF
    assert judged([[1.0, 2.0]], [[NAN, 2.0]], 0.1).verdict is Verdict.FAILED
    assert judged([[1.0, -INF]], [[1.0, -INF]], 0.1).verdict is Verdict.EQUAL


# --- what is a failure ------------------------------------------------------------------------------


def result(outcome: Verdict, difference: float | None = 0.0, dtype: str = "bfloat16", limit: float = 0.01) -> Result:
    reason = None if difference is not None else "gives something else"
    return Result(dtype, "auto", "some_kernel", outcome, difference, limit, reason)


def level(*modules: list[Result], from_source: bool = True, stopped: str | None = None) -> ModulesLevel:
    made = (ModuleResult((f"layers.{n}",), ("C",), "l", tuple(results)) for n, results in enumerate(modules))
    return ModulesLevel(tuple(made), "bfloat16", from_source, stopped, {})


def test_no_proof_fails_without_a_source_and_is_no_pass_with_one() -> None:
    results = [result(Verdict.NO_PROOF)], [result(Verdict.EQUAL)]
    assert [item.where for item in level(*results, from_source=False).failures()] == ["layers.0"]
    assert level(*results).failures() == ()
    assert level(*results).num_proven == 1


def test_no_proof_in_another_dtype_is_no_failure() -> None:
    results = [result(Verdict.EQUAL), result(Verdict.NO_PROOF, dtype="float16")]
    assert level(results, from_source=False).failures() == ()


def test_nothing_proven_is_a_failure() -> None:
    assert "none is reached" in level([], []).failures()[0].what
    assert "it broke" in level([], stopped="it broke").failures()[0].what
    assert "zero and NaN" in level([result(Verdict.NO_PROOF)]).failures()[0].what


def test_failures_come_worst_first_and_a_difference_that_is_none_is_the_worst() -> None:
    found = level(
        [result(Verdict.WITHIN, 0.009)],
        [result(Verdict.FAILED, 0.02)],
        [result(Verdict.FAILED, None)],
        [result(Verdict.FAILED, 0.5)],
    ).failures()
    assert [item.where for item in found] == ["layers.2", "layers.3", "layers.1"]


def test_no_proof_is_worse_than_any_pass() -> None:
    empty, near = result(Verdict.NO_PROOF), result(Verdict.WITHIN, 0.009)
    assert worst([near, empty]) is empty
    failed = result(Verdict.FAILED, 0.02)
    assert worst([failed, empty]) is failed


def test_worst_is_the_one_nearest_to_its_limit() -> None:
    near, far = result(Verdict.WITHIN, 9e-6, "float32", 1e-5), result(Verdict.WITHIN, 1e-3, "bfloat16", 1e-1)
    assert worst([far, near]) is near
