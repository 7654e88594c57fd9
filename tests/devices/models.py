"""What the tests of whole models on a device's kernels share."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kconvert.kernels import apply_kernel
from kconvert.kernels.layout import is_patched

__all__ = ["assert_close", "patched"]


def patched(stock: Any, kernels: tuple[str, ...]) -> Any:
    """A copy with kernels that may not give way."""
    model = copy.deepcopy(stock)
    for kernel in kernels:
        apply_kernel(kernel, model=model)
    for module in model.modules():
        if is_patched(module):
            module.kconvert_dispatch.strict = True
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-5) -> None:
    """Within `tolerance` of the largest value, or of 1."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)
