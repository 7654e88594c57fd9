"""The rotary embedding of q and k on CUDA: one Triton kernel in eager mode, the stock forward where a compiler fuses it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.rope.layout import RopeLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedRope"]


@register_kernel
class CudaFusedRope(JoinedKernel, CudaKernel):
    """The stock forward with norms and rotation of q and k in one kernel."""

    _kernel_id = "cuda_fused_rope"
    layout = RopeLayout

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward takes and gives."""
        if torch.compiler.is_compiling():
            return cast("Any", module).reference(*args, **kwargs)
        return JoinedKernel.forward(module, *args, **kwargs)
