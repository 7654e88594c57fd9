"""What the tests of both norms share: tolerances, a comparison that takes NaN as NaN, and outputs that start as NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["TOLERANCES", "Poisoned", "assert_near", "round_as_on_devices", "rounded"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest value; the narrow types are allowed one step of it, no more."""


def round_as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off at 16 bits where it makes bfloat16; every device rounds to the nearest."""
    cast_impl = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, source, dtype)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(values.view(torch.uint16).numpy().reshape(source.data.shape), dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


class Poisoned:
    """Stands for `torch` in a module under test: what `empty` and `empty_like` give is full of NaN, so that unwritten elements show."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.empty`, filled."""
        return torch.empty(*args, **kwargs).fill_(float("nan"))

    @staticmethod
    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.empty_like`, filled."""
        return torch.empty_like(*args, **kwargs).fill_(float("nan"))


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value`, float64, with the values that it has in `dtype`; its gradient passes unrounded."""
    return value + (value.detach().to(dtype).double() - value.detach())


def assert_near(
    found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float, *, scale: float = 0.0
) -> None:
    """NaN and infinities in the same places, and everything else within `tolerance` of the largest value.

    `scale` is the size of what the values are differences of, where these may cancel out.
    """
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    wide, other = found.detach().double(), expected.detach().double()
    assert torch.equal(wide.isnan(), other.isnan())
    assert torch.equal(wide.isposinf(), other.isposinf())
    assert torch.equal(wide.isneginf(), other.isneginf())
    is_finite = wide.isfinite()
    wide, other = wide[is_finite], other[is_finite]
    if wide.numel():
        allowed = tolerance * max(float(other.abs().max()), scale, 1e-30)
        assert float((wide - other).abs().max()) <= allowed, f"{float((wide - other).abs().max())} > {allowed}"
