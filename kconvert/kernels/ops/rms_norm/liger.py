"""RMSNorm by Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.liger import LigerKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["LigerRMSNorm"]

_MOST_COLUMNS = 65536


@cache
def _device_code() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return cast("Callable[..., torch.Tensor]", LigerRMSNormFunction.apply)


@register_kernel
class LigerRMSNorm(LigerKernel):
    """RMSNorm with or without a weight; its gradient is written to memory of its own."""

    _kernel_id = "liger_rmsnorm"
    layout = RMSNormLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32"})

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., n]`; the result has the dtype that the stock forward gives."""
        norm = cast("Any", module)
        has_weight, _, eps, offset, cast_first = norm.kconvert_arithmetic
        weight = norm.weight if has_weight else None
        # weights of another dtype are rounded elsewhere there
        is_other = weight is not None and weight.dtype != hidden_states.dtype
        if is_other or not hidden_states.numel() or hidden_states.shape[-1] > _MOST_COLUMNS:
            return cast("torch.Tensor", norm.reference(hidden_states))
        mode = "llama" if cast_first else "gemma"
        # with its default it would overwrite the gradient that it is given, which others may still read
        return _device_code()(hidden_states, weight, eps, offset, mode, False)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only."""
        return cast("RMSNormLayout", module).variant.why_not
