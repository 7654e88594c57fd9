"""Stacked experts on CUDA: rows sorted on the device, grouped GEMMs, the gate in the first one's epilogue.

Where a compiler traces the model, torch's own `grouped_mm` runs, which it knows in bfloat16; in other dtypes the
reference does.  The reference also runs what is not the plain case: tokens in another dtype than the parameters
(autocast among them), or in more than two dimensions.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.grouped_mm import grouped_mm_reason
from kconvert.kernels.ops.experts.layout import ExpertsLayout, is_plain_call, prove_experts
from kconvert.kernels.ops.experts.plain import grouped_experts
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedMoE"]


@cache
def _device_code() -> Any:
    from kconvert.kernels.triton import experts

    return experts


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
        experts = cast("ExpertsLayout", module)
        inputs, (variant, _) = experts.kconvert_inputs(args, kwargs), experts.kconvert_variant
        parameters = module._parameters  # getattr finds one slowly
        gate_up, down = (cast("torch.Tensor", parameters[name]) for name in ("gate_up_proj", "down_proj"))
        if inputs is None or variant is None or not is_plain_call(inputs, gate_up):
            return cast("torch.Tensor", experts.reference(*args, **kwargs))
        if torch.compiler.is_compiling():
            if grouped_mm_reason(inputs[0], gate_up, down) is None:
                return grouped_experts(experts, variant, *inputs)
            return cast("torch.Tensor", experts.reference(*args, **kwargs))
        code = _device_code()
        params = code.ExpertWeights(
            gate_up, down, parameters.get("gate_up_proj_bias"), parameters.get("down_proj_bias")
        )
        return cast(
            "torch.Tensor",
            code.experts(*inputs, params, variant.gate, is_transposed=variant.is_transposed),
        )
