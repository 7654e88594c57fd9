"""A decoder layer on Ascend NPU: the kernels of its children, and each residual add in one operator with the norm behind it."""

from __future__ import annotations

from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.decoder_layer.layout import DecoderLayerLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["NpuFusedDecoderLayer"]


@register_kernel
class NpuFusedDecoderLayer(JoinedKernel, NpuKernel):
    """The stock forward with adds and norms joined; where a gradient is needed they stay apart."""

    _kernel_id = "npu_fused_decoder_layer"
    layout = DecoderLayerLayout
    default = False
    operators = ("npu_rms_norm", "npu_add_rms_norm")
