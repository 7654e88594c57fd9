"""Attention projections: q, k and v in one, in that order; everything else of the module stays as it is."""

from kconvert.transforms import KernelEntry, LayoutSpec, concatenate

SPEC = LayoutSpec(
    name="qkv_proj",
    version=1,
    members=("attention",),
    rules=(
        concatenate(["q_proj.weight", "k_proj.weight", "v_proj.weight"], "qkv_proj.weight"),
        concatenate(["q_proj.bias", "k_proj.bias", "v_proj.bias"], "qkv_proj.bias", optional=True),
    ),
    kernels=(
        KernelEntry("cuda_fused_qkv", "cuda"),
        KernelEntry("npu_fused_qkv", "npu"),
        KernelEntry("cpu_fused_qkv", "cpu"),
    ),
    module="kconvert.kernels.ops.qkv_proj.layout:QKVProjLayout",
    summary="q, k and v from one packed qkv_proj",
    takes=frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj"}),
)
