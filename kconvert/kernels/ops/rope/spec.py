"""Rotary embedding: the attention module's forward changes, and none of its tensors."""

from kconvert.transforms import NOTHING, KernelEntry, LayoutSpec

SPEC = LayoutSpec(
    name="rope",
    version=1,
    members=("attention",),
    rules=(),
    kernels=(
        KernelEntry("cuda_fused_rope", "cuda"),
        KernelEntry("npu_fused_rope", "npu"),
    ),
    module="kconvert.kernels.ops.rope.layout:RopeLayout",
    summary="rotary embedding of q and k in one kernel, with their norms; tensors unchanged",
    takes=NOTHING,
)
