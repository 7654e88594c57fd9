"""What proofs by running a stock forward share: what an instance depends on, values for it, and when two results are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kconvert.kernels.layout import stock_class_of

__all__ = ["plain_key", "random_values", "same_bits", "same_gradients"]

_GRADIENT_TOLERANCE = 1e-3


def plain_key(module: nn.Module) -> tuple[object, ...] | None:
    """What the stock forward can depend on beside its weights, where that is plain values only; else None."""
    known = vars(nn.Module())
    own = {
        name: value for name, value in vars(module).items() if name not in known and not name.startswith("kconvert_")
    }
    if any(value is not None and type(value) not in (bool, int, float, str) for value in own.values()):
        return None
    return (
        stock_class_of(module),
        stock_class_of(module).forward,  # which somebody may have replaced since
        tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters()),
        tuple((name, buffer.dtype, tuple(buffer.shape)) for name, buffer in module.named_buffers()),
        tuple(sorted((name, repr(value)) for name, value in own.items())),
    )


def random_values(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal ones in float32, whatever the default dtype is while a model loads."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def same_bits(found: object, expected: object, *, equal_nan: bool = False) -> bool:
    """Whether both are tensors of one dtype with equal elements; `torch.equal` alone compares values across dtypes."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor) or found.shape != expected.shape:
        return False
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=equal_nan)


def same_gradients(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether gradients agree within rounding in float32."""
    return all(
        float((one - two).abs().max()) <= _GRADIENT_TOLERANCE * max(1.0, float(two.abs().max()))
        for one, two in zip(found, expected, strict=True)
    )
