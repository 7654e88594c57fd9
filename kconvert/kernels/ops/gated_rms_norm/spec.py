"""RMSNorm with a gate: the parameter keeps its name and shape, only the forward changes."""

from kconvert.transforms import KernelEntry, LayoutSpec, rename

SPEC = LayoutSpec(
    name="gated_rms_norm",
    version=1,
    members=("norm",),
    rules=(rename("weight"),),
    kernels=(
        KernelEntry("cuda_fused_gated_rmsnorm", "cuda"),
        KernelEntry("npu_fused_gated_rmsnorm", "npu"),
        KernelEntry("cpu_fused_gated_rmsnorm", "cpu"),
    ),
    module="kconvert.kernels.ops.gated_rms_norm.layout:GatedRMSNormLayout",
    summary="RMSNorm and its gate in one pass; weight unchanged",
)
