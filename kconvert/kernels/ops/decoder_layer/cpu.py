"""A decoder layer on the CPU: the kernels of its children."""

from __future__ import annotations

from kconvert.kernels.base import DeviceType
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.decoder_layer.layout import DecoderLayerLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CpuFusedDecoderLayer"]


@register_kernel
class CpuFusedDecoderLayer(JoinedKernel):
    """The stock forward over the packed children."""

    _kernel_id = "cpu_fused_decoder_layer"
    _device = DeviceType.CPU
    layout = DecoderLayerLayout
    default = False
