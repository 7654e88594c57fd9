"""RMSNorm and the gated MLP behind it as one module: both layouts, side by side, at the norm's path."""

from dataclasses import replace

from kconvert.kernels.ops.gated_mlp.spec import SPEC as GATED_MLP
from kconvert.kernels.ops.rms_norm.spec import SPEC as RMS_NORM
from kconvert.transforms import KernelEntry, LayoutSpec, nested

SPEC = LayoutSpec(
    name="norm_gated_mlp",
    version=1,
    members=("norm", "mlp"),
    # a norm without a weight has a place of its own
    rules=tuple(replace(rule, optional=False) for rule in nested(RMS_NORM.rules, member=0, into="norm"))
    + nested(GATED_MLP.rules, member=1, into="mlp"),
    kernels=(
        KernelEntry("cuda_fused_rmsnorm_swiglu", "cuda"),
        KernelEntry("npu_fused_rmsnorm_swiglu", "npu"),
        KernelEntry("cpu_fused_rmsnorm_swiglu", "cpu"),
    ),
    module="kconvert.kernels.ops.norm_gated_mlp.layout:NormGatedMLPLayout",
    summary="RMSNorm and packed gated MLP as one module",
    is_proposed=False,
)
