"""The experts of a mixture, stored the other way round: each weight as `[experts, inputs, outputs]`.

So the grouped matmul of Ascend NPUs wants them.  Other devices run the same kernels as on `experts`, over what is stored.
"""

from kconvert.transforms import KernelEntry, LayoutSpec, rename, transpose

SPEC = LayoutSpec(
    name="experts_transposed",
    version=1,
    members=("experts",),
    rules=(
        transpose("gate_up_proj", "gate_up_proj_transposed"),
        rename("gate_up_proj_bias", optional=True),
        transpose("down_proj", "down_proj_transposed"),
        rename("down_proj_bias", optional=True),
    ),
    kernels=(
        KernelEntry("npu_fused_moe_transposed", "npu"),
        KernelEntry("cuda_fused_moe_transposed", "cuda", by_view=True),
        KernelEntry("cpu_fused_moe_transposed", "cpu", by_view=True),
    ),
    module="kconvert.kernels.ops.experts_transposed.layout:TransposedExpertsLayout",
    summary="stacked gated experts, each weight transposed: as the grouped matmul of Ascend NPUs takes them",
    is_proposed=False,
)
