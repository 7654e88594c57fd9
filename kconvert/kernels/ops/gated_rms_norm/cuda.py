"""RMSNorm with a gate on CUDA: one Triton kernel in eager mode, and plain torch where a compiler fuses it itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.ops.gated_rms_norm.layout import GatedRMSNormLayout, gated_rms_norm_formula
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedGatedRMSNorm"]

_MOST_COLUMNS = 65536  # a program holds a whole group of a row


@cache
def _device_code() -> Callable[..., torch.Tensor]:
    from kconvert.kernels.triton.gated_rms_norm import gated_rms_norm

    return gated_rms_norm


@register_kernel
class CudaFusedGatedRMSNorm(CudaKernel):
    """RMSNorm and its gate in one kernel forward and one backward."""

    _kernel_id = "cuda_fused_gated_rmsnorm"
    layout = GatedRMSNormLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32", "float64"})

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden_states` `[..., n]` and `gate` of the same shape; the result has the stock forward's dtype and shape."""
        norm = cast("GatedRMSNormLayout", module)
        if norm.needs_reference(hidden_states, gate):
            return cast("torch.Tensor", norm.reference(hidden_states, gate))
        variant = norm.variant
        if torch.compiler.is_compiling():
            return gated_rms_norm_formula(hidden_states, gate, norm.weight, variant)
        normed = _device_code()(
            hidden_states,
            gate,
            norm.weight,
            eps=variant.eps,
            num_groups=variant.num_groups,
            is_silu=variant.activation == "silu",
            gate_first=variant.gate_first,
            cast_first=variant.cast_first,
        )
        return normed.squeeze(1) if variant.squeezes and normed.dim() == 3 else normed

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only, and groups that one program can hold."""
        norm = cast("GatedRMSNormLayout", module)
        if norm.variant.why_not is not None:
            return norm.variant.why_not
        size = norm.get_parameter("weight").shape[0] // norm.variant.num_groups
        return f"its groups of {size} are longer than {_MOST_COLUMNS}" if size > _MOST_COLUMNS else None
