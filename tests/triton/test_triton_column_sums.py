"""The sums that end a weight's gradient: against float64, for every dtype, where parts and columns fill no block."""

from __future__ import annotations

import pytest
import torch

from kconvert.kernels.triton.column_sums import column_sums
from tests.triton.norm_checks import round_as_on_devices

_RELATIVE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_on_devices(monkeypatch)


@pytest.mark.parametrize("dtype", _RELATIVE, ids=str)
@pytest.mark.parametrize(("num_parts", "num_columns"), [(1, 1), (3, 40), (128, 16), (129, 17), (264, 100)])
def test_the_sums_are_right_and_rounded_once(num_parts: int, num_columns: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    parts = torch.rand(num_parts, num_columns, generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = column_sums(parts.to(device, wide), dtype)
    assert (found.dtype, found.shape) == (dtype, (num_columns,))
    torch.testing.assert_close(found.cpu().double(), parts.sum(0), rtol=_RELATIVE[dtype], atol=0.0)


def test_no_parts_sum_to_zero(device: str) -> None:
    found = column_sums(torch.empty(0, 40, device=device), torch.bfloat16)
    assert torch.equal(found.cpu(), torch.zeros(40, dtype=torch.bfloat16))


def test_what_is_not_finite_stays_in_its_column(device: str) -> None:
    parts = torch.ones(5, 20, device=device)
    parts[2, 3], parts[4, 7], parts[1, 9] = float("nan"), float("inf"), -float("inf")
    found = column_sums(parts, torch.float32)
    expected = torch.full((20,), 5.0)
    expected[3], expected[7], expected[9] = float("nan"), float("inf"), -float("inf")
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)
