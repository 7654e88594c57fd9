"""RMSNorm and packed gated MLP on CUDA, without a second dispatch between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.ops.gated_mlp.cuda import CudaFusedSwiGLU
from kconvert.kernels.ops.norm_gated_mlp.layout import NormGatedMLPLayout
from kconvert.kernels.ops.rms_norm.cuda import CudaFusedRMSNorm
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedRMSNormSwiGLU"]


@register_kernel
class CudaFusedRMSNormSwiGLU(CudaKernel):
    """The CUDA kernels of both layouts in one call."""

    _kernel_id = "cuda_fused_rmsnorm_swiglu"
    layout = NormGatedMLPLayout
    default = False
    dtypes = CudaFusedSwiGLU.dtypes

    @staticmethod
    def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` `[..., hidden]` to the same shape."""
        fused = cast("Any", module)
        return CudaFusedSwiGLU.forward(fused.mlp, CudaFusedRMSNorm.forward(fused.norm, hidden_states))

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """What either kernel says."""
        fused = cast("NormGatedMLPLayout", module)
        return CudaFusedRMSNorm.supports(fused.norm) or CudaFusedSwiGLU.supports(fused.mlp)
