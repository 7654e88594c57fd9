"""A whole decoder layer: its norms, packed attention projections and packed gated MLP, all at the layer's path."""

from kconvert.kernels.ops.gated_mlp.spec import SPEC as GATED_MLP
from kconvert.kernels.ops.qkv_proj.spec import SPEC as QKV_PROJ
from kconvert.kernels.ops.rms_norm.spec import SPEC as RMS_NORM
from kconvert.transforms import KernelEntry, LayoutSpec, below, rename

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Children that are norms; a layer need not have all of them."""

_KEPT = ("o_proj.weight", "o_proj.bias", "q_norm.weight", "k_norm.weight", "sinks")
"""What attention has beside its projections, as it is."""

SPEC = LayoutSpec(
    name="decoder_layer",
    version=1,
    members=("layer",),
    rules=(
        *(rule for norm in NORMS for rule in below(RMS_NORM.rules, norm, optional=True)),
        *below(QKV_PROJ.rules, "self_attn"),
        *(rename(f"self_attn.{name}", optional=True) for name in _KEPT),
        *below(GATED_MLP.rules, "mlp"),
    ),
    kernels=(
        KernelEntry("cuda_fused_decoder_layer", "cuda"),
        KernelEntry("npu_fused_decoder_layer", "npu"),
        KernelEntry("cpu_fused_decoder_layer", "cpu"),
    ),
    module="kconvert.kernels.ops.decoder_layer.layout:DecoderLayerLayout",
    summary="a decoder layer: residual add and norm as one, packed qkv_proj and gate_up_proj",
    is_proposed=False,
)
