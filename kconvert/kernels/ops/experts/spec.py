"""The experts of a mixture, stacked as the model holds them: the parameters stay as they are, the forward changes."""

from kconvert.transforms import KernelEntry, LayoutSpec, rename

SPEC = LayoutSpec(
    name="experts",
    version=1,
    members=("experts",),
    rules=(
        rename("gate_up_proj"),
        rename("gate_up_proj_bias", optional=True),
        rename("down_proj"),
        rename("down_proj_bias", optional=True),
    ),
    kernels=(
        KernelEntry("cuda_fused_moe", "cuda"),
        KernelEntry("npu_fused_moe", "npu", by_view=True),
        KernelEntry("cpu_fused_moe", "cpu"),
    ),
    module="kconvert.kernels.ops.experts.layout:ExpertsLayout",
    summary="stacked gated experts: rows sorted by expert, one grouped GEMM for each projection; weights unchanged",
)
