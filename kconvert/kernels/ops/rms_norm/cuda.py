"""RMSNorm on CUDA: one Triton kernel in eager mode, and plain torch operations where a compiler fuses them itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, rms_norm_formula
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedRMSNorm"]

_MOST_COLUMNS = 65536  # a program holds a whole row


@cache
def _device_code() -> tuple[Callable[..., torch.Tensor], Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    from kconvert.kernels.triton.rms_norm import add_rms_norm, rms_norm

    return rms_norm, add_rms_norm


def _weight_of(norm: Any) -> torch.Tensor:
    """The weight; eagerly a parameter is read where it is kept, which takes half the time of an attribute."""
    weight = None if torch.compiler.is_compiling() else norm._parameters.get("weight")
    return (
        cast("torch.Tensor", norm.weight) if weight is None else weight
    )  # a wrapper may have put something in its place


def _takes(mixes: bool, weight: torch.Tensor | None, hidden: torch.Tensor) -> bool:
    """Whether the kernel gives what the stock forward gives for this input."""
    return (mixes or weight is None or weight.dtype == hidden.dtype) and hidden.shape[-1] <= _MOST_COLUMNS


@register_kernel
class CudaFusedRMSNorm(CudaKernel):
    """RMSNorm, with or without a weight, in one kernel forward and one backward."""

    _kernel_id = "cuda_fused_rmsnorm"
    layout = RMSNormLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32", "float64"})

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., n]`, any float dtype; the result has the dtype that the stock forward gives."""
        norm = cast("Any", module)
        has_weight, mixes, eps, offset, cast_first = norm.kconvert_arithmetic
        weight = _weight_of(norm) if has_weight else None
        if not _takes(mixes, weight, hidden_states):
            return cast("torch.Tensor", norm.reference(hidden_states))
        run = rms_norm_formula if torch.compiler.is_compiling() else _device_code()[0]
        return run(hidden_states, weight, eps=eps, offset=offset, cast_first=cast_first)

    @staticmethod
    def add_forward(
        module: nn.Module, residual: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + hidden_states`, both `[..., n]` and of one dtype, and the norm of that, in one kernel."""
        norm = cast("Any", module)
        has_weight, mixes, eps, offset, cast_first = norm.kconvert_arithmetic
        weight = _weight_of(norm) if has_weight else None
        if torch.compiler.is_compiling() or not _takes(mixes, weight, hidden_states):
            total = residual + hidden_states
            return total, CudaFusedRMSNorm.forward(module, total)
        normed, total = _device_code()[1](
            hidden_states, residual, weight, eps=eps, offset=offset, cast_first=cast_first
        )
        return total, normed

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only, and rows that one program can hold."""
        norm = cast("RMSNormLayout", module)
        if norm.variant.why_not is not None:
            return norm.variant.why_not
        size = norm.get_parameter("weight").shape[0] if norm.variant.has_weight else 0
        return f"its rows of {size} are longer than {_MOST_COLUMNS}" if size > _MOST_COLUMNS else None
