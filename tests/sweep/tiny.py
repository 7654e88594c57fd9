"""A tiny model of any causal-LM type of transformers, from the defaults of its own config class.

The default config is shrunk by the names of its values: sizes from one table, lists with an item per layer to one
layer of each kind, sub-configs likewise.  A few types tie values together in ways that names do not show; what
they need is in `EXTRA`.  Weights are random, norm weights and biases too.  What cannot be built is an error with
the reason; nothing is left out silently.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from kconvert.kernels.probe import sample_ids

__all__ = ["NotBuiltError", "build_tiny", "causal_types", "logits_of", "randomise", "reason_of", "shrink"]

_MAX_PARAMETERS = 4_000_000

_SIZES: Mapping[int, str] = {
    128: "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size ngram_vocab_size_base "
    "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length "
    "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab num_centroids rel_extent "
    "original_max_position_embeddings position_bias_max_distance max_source_positions prompt_mid_dim",
    32: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim input_embedding_size output_embedding_size "
    "word_embed_proj_dim attention_hidden_size lru_width hidden_size_global backbone_hidden_size dim_model_base "
    "pronunciation_embed_dim shape_embed_dim position_bias_num_buckets num_buckets input_size image_size crop_size "
    "attention_size cross_attention_hidden_size output_channels codebook_size num_mel_bins input_feat_size "
    "ext_pw_out_channel nemo_conv_channels depthwise_separable_out_channel ple_embed_dim "
    "vector_quantization_hidden_dimension",
    48: "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size dense_intermediate_size n_inner dff dim_ff "
    "encoder_ffn_dim decoder_ffn_dim feed_forward_size d_inner mlp_dim",
    24: "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size",
    16: "head_dim attention_head_size dim_head swa_head_dim kv_channels adapter_rank router_hidden_size q_lora_rank "
    "kv_lora_rank o_lora_rank hidden_size_per_layer_input laurel_rank mamba_d_head mamba_head_dim mamba_headdim "
    "sliding_window sliding_window_size attention_window_size window_size local_attention keep_window_size "
    "attention_chunk_size mamba_dt_rank time_step_rank gated_norm_rank hc_lowrank index_head_dim index_block_size "
    "codebook_dim qk_head_dim upsample_groups relative_max_distance global_window_size num_filters patch_size",
    8: "d_head qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim d_rel mamba_d_state ssm_state_size state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim block_size chunk_size mamba_chunk_size index_topk "
    "local_attn_chunk_length lsh_attn_chunk_length prompt_length prompt_types segment_types image_seq_length "
    "mm_tokens_per_image make_ngram_vocab_size_divisible_by ffn_round_up_to_multiple_of block_multiple_of "
    "vision_soft_tokens_per_image audio_soft_tokens_per_image split_ngram_parts num_quantizers",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_query_groups "
    "linear_num_value_heads linear_num_heads index_n_heads mamba_n_heads mamba_num_heads conf_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts num_codebooks zero_expert_num",
    2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads n_mamba_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_groups o_groups num_hidden_layers n_layer "
    "n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks "
    "conf_num_hidden_layers heads_per_ngram num_layers_per_stack hc_sinkhorn_iters num_random_blocks "
    "index_topk_blocks centroid_intermediate_top_k layer_group_size",
    1: "first_k_dense_replace num_dense_layers n_group topk_group num_expert_group num_nextn_predict_layers",
}
SIZES: Mapping[str, int] = {name: size for size, names in _SIZES.items() for name in names.split()}
"""Name of a config value to its tiny size; a smaller default stays."""

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_INDEX_LISTS = ("full_attn_idxs", "hybrid_layer_ids", "cross_attention_layers", "mlp_only_layers", "moe_layers")
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}

_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
_ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
EXTRA: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": _MOE,
    "dots1": _MOE,
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 16},
    "musicgen": {"num_codebooks": 2},
    "musicgen_melody": {"num_codebooks": 2},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16), "hash_seed": 0},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""Model type to values that names do not give."""


class NotBuiltError(Exception):
    """Why no tiny model of a type can be made here, in one line."""


def causal_types() -> tuple[str, ...]:
    """Every model type that transformers maps to a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def model_class_of(model_type: str) -> Any:
    """The model class that transformers names for a type."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _kept_layers(values: Mapping[str, Any]) -> tuple[str | None, int, tuple[int, ...]]:
    """The name of the number of layers, that number, and the layers to keep: one of each kind, two at least.

    Where later layers share keys and values of earlier ones, each kind is kept twice.
    """
    name = next((name for name in _NUM_LAYERS if isinstance(values.get(name), int)), None)
    total = values[name] if name is not None else 0
    lists = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == total > 2]
    kinds: dict[tuple[str, ...], int] = {}
    for number in range(total):
        kinds.setdefault(tuple(str(items[number]) for items in lists if isinstance(items[number], str)), number)
    first = sorted(kinds.values())[:4]
    if values.get("num_kv_shared_layers"):
        return name, total, tuple(first + first)
    return name, total, tuple(first if len(first) > 1 else [0, 1][:total])


def shrink(config: Any, extra: Mapping[str, Any], head_dim: int, sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """The constructor arguments of a tiny config; sub-configs as dicts."""
    fields = {field.name for field in dataclasses.fields(config) if field.init}
    values = {key: value for key, value in vars(config).items() if key in fields and not key.startswith("_")}
    made: dict[str, Any] = {}
    count_name, total, layers = _kept_layers(values)
    for key, value in values.items():
        if _is_config(value):
            made[key] = {"model_type": value.model_type, **shrink(value, extra.get(key, {}), head_dim, sizes)}
        elif isinstance(value, bool):
            made.update({key: True} if key == "is_decoder" else {})
        elif key == count_name:
            made[key] = len(layers)
        elif key in _SPECIAL_IDS:
            made[key] = value if value is None or (key == "pad_token_id" and value < 0) else _SPECIAL_IDS[key]
        elif isinstance(value, int) and key in sizes:
            made[key] = min(value, sizes[key])
        elif key in _INDEX_LISTS and isinstance(value, list | tuple):
            made[key] = [number for number in value if number < len(layers)]
        elif isinstance(value, list | tuple) and len(value) == total > 2 and not isinstance(value[0], list | tuple):
            made[key] = [_item(key, value[number], sizes) for number in layers]
    if "mlp_only_layers" in fields:
        made["mlp_only_layers"] = [0]
    _relate(values, made, head_dim)
    if values.get("num_kv_shared_layers"):
        made["num_kv_shared_layers"] = len(layers) // 2
    made.update({key: value for key, value in extra.items() if not isinstance(made.get(key), dict)})
    return made


def _item(key: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """One layer's item of a list."""
    size = sizes.get(key.removesuffix("_per_layer"))
    return value if size is None or not isinstance(value, int) else min(value, size)


def _relate(values: Mapping[str, Any], made: dict[str, Any], head_dim: int) -> None:
    """Keep what the defaults have in common: as many key as query heads, the same head size under two names."""
    for heads, kv_heads in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if heads in made and kv_heads in made and values[heads] == values[kv_heads]:
            made[kv_heads] = made[heads]
    if "head_dim" in made:
        made["head_dim"] = head_dim
        for name in ("qk_rope_head_dim", "qk_head_dim", "v_head_dim"):
            if name in made and values.get(name) == values["head_dim"]:
                made["head_dim"] = made[name]
                break


def build_tiny(model_type: str, *, seed: int = 0) -> Any:
    """A tiny model of the type, float32, in eval mode, all of it random; it runs on token IDs alone.

    Raises:
        NotBuiltError: no config of a few million parameters could be made of the defaults, or the model does not run.
    """
    failures = []
    for head_dim in (16, 8):
        try:
            return _build(model_type, head_dim, seed)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code raises, it is the reason
            failures.append(error if isinstance(error, NotBuiltError) else NotBuiltError(reason_of(error)))
    raise failures[0]


def reason_of(error: Exception) -> str:
    """An error in one short line; a config class says on its last line what is wrong."""
    if isinstance(error, ImportError):
        named = re.findall(r"requires the (\w+) library|No module named '(\w+)'", str(error))
        # the last one: those before it are what it needs itself, and are named only where they are not installed
        return f"it needs {''.join(named[-1]) if named else 'a package'}, which kconvert does not"
    text = " ".join(str(error).strip().splitlines()[-1:]).strip()
    return f"{type(error).__name__}: {text}"[:160]


def _build(model_type: str, head_dim: int, seed: int) -> Any:
    cls = model_class_of(model_type)
    extra = EXTRA.get(model_type, {})
    try:
        base = cls.config_class()
    except StrictDataclassError:  # one has no valid defaults
        base = cls.config_class(**extra)
    config = cls.config_class(**shrink(base, extra, head_dim))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > _MAX_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).eval()
    randomise(model, seed)
    found = logits_of(model)
    if not torch.isfinite(found).all():
        raise NotBuiltError("its logits are not finite")
    if not torch.equal(found, logits_of(model)):
        raise NotBuiltError("its logits differ from run to run")
    return model


def randomise(model: Any, seed: int) -> None:
    """Random values everywhere: matrices anew, vectors (norm weights, biases) around what they were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                known = torch.where(parameter.isfinite() & (parameter.abs() < 100), parameter, torch.zeros(()))
                parameter.copy_(known + 0.1 * noise)


def logits_of(model: Any) -> torch.Tensor:
    """The logits on a few random tokens, without a cache where the model can do without."""
    ids = sample_ids(model, batch=2, tokens=9, seed=1)
    with torch.no_grad():
        try:
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        except Exception:  # noqa: BLE001 - the model's own code; what it raises without the argument counts
            found = model(input_ids=ids).logits
    return found
