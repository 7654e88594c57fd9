"""The rotary embedding of q and k on Ascend NPU, and the norms before it, by operators."""

from __future__ import annotations

from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.rope.layout import RopeLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedRope"]


@register_kernel
class NpuFusedRope(JoinedKernel, NpuKernel):
    """The stock forward with norms and rotation of q and k by operators."""

    _kernel_id = "npu_fused_rope"
    layout = RopeLayout
    operators = ("npu_rotary_mul", "npu_rms_norm")
