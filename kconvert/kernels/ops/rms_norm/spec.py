"""RMSNorm: the parameter, where there is one, keeps its name and shape, only the forward changes."""

from kconvert.transforms import KernelEntry, LayoutSpec, rename

SPEC = LayoutSpec(
    name="rms_norm",
    version=1,
    members=("norm",),
    rules=(rename("weight", optional=True),),
    kernels=(
        KernelEntry("cuda_fused_rmsnorm", "cuda"),
        KernelEntry("liger_rmsnorm", "cuda"),
        KernelEntry("npu_fused_rmsnorm", "npu"),
        KernelEntry("cpu_fused_rmsnorm", "cpu"),
    ),
    module="kconvert.kernels.ops.rms_norm.layout:RMSNormLayout",
    summary="RMSNorm in one pass; weight unchanged",
)
