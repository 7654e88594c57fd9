"""The router of a mixture: its parameters keep names and shapes, only the forward changes."""

from kconvert.transforms import KernelEntry, LayoutSpec, rename

SPEC = LayoutSpec(
    name="topk_router",
    version=1,
    members=("router",),
    rules=(
        rename("weight"),
        rename("bias", optional=True),
        rename("e_score_correction_bias", optional=True),
    ),
    kernels=(
        KernelEntry("cuda_fused_router", "cuda"),
        KernelEntry("npu_fused_router", "npu"),
        KernelEntry("cpu_fused_router", "cpu"),
    ),
    module="kconvert.kernels.ops.topk_router.layout:TopKRouterLayout",
    summary="a router: scores, top-k and weights of the chosen experts in one kernel; weights unchanged",
)
