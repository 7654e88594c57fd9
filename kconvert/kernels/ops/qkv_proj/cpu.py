"""Packed attention projections on the CPU: one GEMM, then the stock forward's own attention."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedQKV"]


@register_kernel
class CpuFusedQKV(LayoutKernel):
    """The stock forward with q, k and v from one projection."""

    _kernel_id = "cpu_fused_qkv"
    _device = DeviceType.CPU
    layout = QKVProjLayout

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward takes and gives; hidden states are `[batch, tokens, hidden]`."""
        patched = cast("Any", type(module))
        if patched.kconvert_joined_from is not patched.kconvert_stock_class.forward:  # replaced after the choice
            return cast("Any", module).reference(*args, **kwargs)
        return patched.kconvert_joined_forward(module, *args, **kwargs)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Only where the stock forward could be joined into one projection."""
        return cast("type[QKVProjLayout]", type(module)).why_not_joined()
