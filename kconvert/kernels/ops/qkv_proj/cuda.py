"""Packed attention projections on CUDA: one GEMM, then norms and rotation of q and k in one Triton kernel.

Where a compiler traces the model, or the forward has no rotary embedding that is known, only the projections are joined.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedQKV"]


@register_kernel
class CudaFusedQKV(JoinedKernel, CudaKernel):
    """The stock forward with q, k and v from one projection, and q and k normed and rotated in one kernel."""

    _kernel_id = "cuda_fused_qkv"
    layout = QKVProjLayout

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward takes and gives; hidden states are `[batch, tokens, hidden]`."""
        if torch.compiler.is_compiling():
            return JoinedKernel.forward(module, *args, **kwargs)
        patched = cast("Any", type(module))
        rotating = patched.kconvert_rope_forward
        if rotating is None:
            return JoinedKernel.forward(module, *args, **kwargs)
        if patched.kconvert_joined_from is not patched.kconvert_stock_class.forward:  # replaced after the choice
            return cast("Any", module).reference(*args, **kwargs)
        return rotating(module, *args, **kwargs)
