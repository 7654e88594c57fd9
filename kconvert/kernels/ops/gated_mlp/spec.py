"""Gated MLP: gate and up in one projection, gate rows first."""

from kconvert.transforms import KernelEntry, LayoutSpec, concatenate, rename

SPEC = LayoutSpec(
    name="gated_mlp",
    version=1,
    members=("mlp",),
    rules=(
        concatenate(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", takes_packed=True),
        concatenate(["gate_proj.bias", "up_proj.bias"], "gate_up_proj.bias", optional=True, takes_packed=True),
        rename("down_proj.weight"),
        rename("down_proj.bias", optional=True),
    ),
    kernels=(
        KernelEntry("cuda_fused_swiglu", "cuda"),
        KernelEntry("liger_swiglu", "cuda"),
        KernelEntry("npu_fused_swiglu", "npu"),
        KernelEntry("cpu_fused_swiglu", "cpu"),
        KernelEntry("cuda_fused_geglu", "cuda"),
        KernelEntry("liger_geglu", "cuda"),
        KernelEntry("npu_fused_geglu", "npu"),
        KernelEntry("cpu_fused_geglu", "cpu"),
    ),
    module="kconvert.kernels.ops.gated_mlp.layout:GatedMLPLayout",
    summary="act(gate) * up from one packed gate_up_proj; act is silu (swiglu) or gelu, exact or tanh (geglu)",
)
