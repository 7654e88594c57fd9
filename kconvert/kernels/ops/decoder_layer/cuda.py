"""A decoder layer on CUDA: the kernels of its children, and each residual add in one kernel with the norm behind it."""

from __future__ import annotations

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.joined_layout import JoinedKernel
from kconvert.kernels.ops.decoder_layer.layout import DecoderLayerLayout
from kconvert.kernels.registry import register_kernel

__all__ = ["CudaFusedDecoderLayer"]


@register_kernel
class CudaFusedDecoderLayer(JoinedKernel, CudaKernel):
    """The stock forward with adds and norms joined."""

    _kernel_id = "cuda_fused_decoder_layer"
    layout = DecoderLayerLayout
    default = False
