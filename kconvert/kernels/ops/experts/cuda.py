"""Stacked experts on CUDA: rows sorted on the device, grouped GEMMs, the gate in the first one's epilogue.

Where a compiler traces the model, torch's own `grouped_mm` runs, which it knows in bfloat16; in other dtypes the
reference does.  The reference also runs what is not the plain case: tokens in another dtype than the parameters
(autocast among them), or in more than two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.grouped_mm import grouped_mm_reason
from kconvert.kernels.ops.experts.layout import ExpertsCall, ExpertsLayout, plain_call, prove_experts
from kconvert.kernels.ops.experts.plain import grouped_experts
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedMoE"]


@cache
def _device_code() -> Callable[..., torch.Tensor]:
    from kconvert.kernels.triton.experts import experts

    return experts


def _grouped_mm_reason(call: ExpertsCall) -> str | None:
    return grouped_mm_reason(call.hidden_states, call.params.gate_up, call.params.down)


@register_kernel
class CudaFusedMoE(CudaKernel):
    """All experts of a mixture in two grouped GEMMs."""

    _kernel_id = "cuda_fused_moe"
    layout = ExpertsLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32", "float64"})

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward is proven to be the layout's formula with a gate that is known."""
        return prove_experts(cast("ExpertsLayout", module))

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tokens `[T, n]`, indices `[T, k]` and weights `[T, k]`, under the stock names, to `[T, n]`."""
        call = plain_call(module, args, kwargs)
        is_compiling = torch.compiler.is_compiling()
        if call is None or (is_compiling and _grouped_mm_reason(call) is not None):
            return cast("torch.Tensor", cast("ExpertsLayout", module).reference(*args, **kwargs))
        if is_compiling:
            return grouped_experts(call)
        *inputs, params, variant = call
        return _device_code()(*inputs, params, variant.gate, is_transposed=variant.is_transposed)
