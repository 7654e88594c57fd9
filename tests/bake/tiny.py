"""A tiny model of any class of transformers: with images, with sound, for detection.

Configs are shrunk as `tests/sweep/tiny.py` does it, with more names of sizes; what a class ties together in ways that
names do not show is in `EXTRA`, and a sub-config that needs a package of its own gets another type in `REPLACED`.
Weights are random, norm weights and biases too.  The model need not run here: its tensors are what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.bake.mapped import Subject
from tests.sweep.tiny import EXTRA as CAUSAL_EXTRA
from tests.sweep.tiny import SIZES as CAUSAL_SIZES
from tests.sweep.tiny import NotBuiltError, randomise, reason_of, shrink

__all__ = ["build_tiny_subject", "tiny_config"]

_MAX_PARAMETERS = 6_000_000

_SIZES: Mapping[int, str] = {
    128: "text_vocab_size audio_vocab_size",
    32: "embed_dim vision_hidden_size projection_dim d_vision vision_embed_dim fpn_hidden_size out_hidden_size "
    "encoder_hidden_dim decoder_hidden_size backbone_hidden_dim downsample_hidden_size",
    12: "num_experts num_local_experts n_routed_experts moe_num_experts",
    16: "fusion_hidden_size head_hidden_size number_output_channels num_depth_bins auxiliary_channels",
    4: "decoder_num_attention_heads",
    2: "depth num_layers encoder_num_layers decoder_num_hidden_layers num_queries",
}
SIZES: Mapping[str, int] = {**CAUSAL_SIZES, **{name: size for size, names in _SIZES.items() for name in names.split()}}
"""Name of a config value to its tiny size; a smaller default stays.

More than ten experts: their numbers in text order are not in numeric order.
"""

_HGNET = {
    "stem_channels": (3, 8, 8),
    "stage_in_channels": (8, 16, 16, 32),
    "stage_mid_channels": (8, 8, 8, 8),
    "stage_out_channels": (16, 16, 32, 32),
    "stage_num_blocks": (1, 1, 1, 1),
    "stage_numb_of_layers": (2, 2, 2, 2),
    "hidden_sizes": [16, 16, 32, 32],
    "depths": (1, 1, 1, 1),
    "out_indices": [2, 3, 4],
}
_RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_indices": [2, 3, 4],
}
_DETR_BACKBONE = {"model_type": "resnet", **_RESNET, "out_indices": [1, 2, 3, 4]}
_DETR = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
_DETECTION = {"encoder_in_channels": (16, 32, 32), "decoder_in_channels": (32, 32, 32)}
_DPT_NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "post_process_channels": [8, 8, 16, 16]}
_GRANITE_SPEECH = {
    "encoder_config": {"hidden_dim": 32, "input_dim": 16, "max_pos_emb": 16, "context_size": 16},
    "projector_config": {"encoder_hidden_size": 32},
    "has_lora_adapter": False,
}
_VIBEVOICE = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_SAM_MEMORY = {
    "memory_attention_hidden_size": 32,
    "memory_attention_feed_forward_hidden_size": 48,
    "memory_encoder_hidden_size": 32,
    "memory_encoder_output_channels": 16,
    "mask_downsampler_embed_dim": 32,
    "memory_fuser_embed_dim": 32,
    "memory_fuser_intermediate_dim": 48,
}

EXTRA: Mapping[str, Mapping[str, Any]] = {
    **CAUSAL_EXTRA,
    **{kind: {**CAUSAL_EXTRA[kind], "n_routed_experts": 12} for kind in ("deepseek_v2", "dots1")},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "chmv2": _DPT_NECK,
    "cohere2_vision": {"alignment_intermediate_size": 32},
    "conditional_detr": _DETR,
    "cosmos3_edge": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        }
    },
    "d_fine": {"backbone_config": _HGNET, **_DETECTION},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {"downsample_channels": [16, 32]}},
    },
    "deformable_detr": _DETR,
    "depth_pro": {
        "intermediate_hook_ids": (1, 0),
        "intermediate_feature_dims": (16, 16),
        "scaled_images_feature_dims": (16, 16, 16),
    },
    "detr": _DETR,
    "dinov3_convnext": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "emu3": {
        "vq_config": {"base_channels": 32, "channel_multiplier": (1, 1)},
        "vocabulary_map": {"<image>": 5, "<|visual token 000000|>": 6, "<|visual token 000001|>": 7},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        }
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 2, "is_decoder": False},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "glm5_next_text": {"index_kpool": 4},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "inkling_mm_model": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"n_layers": 3, "patch_size": 2},
    },
    "lw_detr": {
        "backbone_config": {
            "image_size": 64,
            "num_windows": 4,
            "window_block_indices": [0],
            "out_indices": [1, 2],
            "pretrain_image_size": 32,
        },
        "projector_scale_factors": [1.0],
    },
    "maskformer": {
        "backbone_config": {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]},
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "word_timestamp_config": {"blank_token_id": 127},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "pp_doclayout_v2": {"backbone_config": _HGNET, **_DETECTION},
    "pp_doclayout_v3": {"backbone_config": {**_HGNET, "out_indices": [1, 2, 3, 4]}, **_DETECTION, "x4_feat_dim": 16},
    "pp_doclayout_v4": {"backbone_config": {**_HGNET, "out_indices": [1, 2, 3, 4]}, **_DETECTION, "x4_feat_dim": 16},
    "qwen2_5_omni": {
        "token2wav_config": {
            "bigvgan_config": {"upsample_initial_channel": 64},
            "dit_config": {"enc_channels": (16, 16, 16, 16, 48), "num_embeds": 64, "enc_dim": 16, "enc_emb_dim": 16},
        }
    },
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": {"shared_expert_intermediate_size": 24},
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
        },
        "code2wav_config": {"decoder_dim": 64},
    },
    "qwen4_exp": {"text_config": {**CAUSAL_EXTRA.get("qwen4_exp", {}), "ple_layer_ids": [1], "eos_token_id": 2}},
    "rt_detr": {"backbone_config": _RESNET, **_DETECTION},
    "rt_detr_v2": {"backbone_config": _RESNET, **_DETECTION},
    "sam3_tracker_video": _SAM_MEMORY,
    "sam3_video": {"tracker_config": _SAM_MEMORY},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16],
            "conv_out_channels": [16],
            "scale_conv_out_channels": [8],
            "scale_final_hidden_sizes": [8, 8],
        }
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0, "classifier_dropout_rate": 0.0}},
    "tipsv2_dpt": _DPT_NECK,
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [16, 32]}}},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _VIBEVOICE, "semantic_tokenizer_encoder_config": _VIBEVOICE},
    "zoedepth": _DPT_NECK,
}
"""Model type to values that names do not give; sub-configs nested."""

REPLACED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "conditional_detr": {"backbone_config": _DETR_BACKBONE},
    "deformable_detr": {"backbone_config": _DETR_BACKBONE},
    "detr": {"backbone_config": _DETR_BACKBONE},
}
"""Model type to sub-configs of another type than the default, which asks for a package that is not installed."""


def tiny_config(subject: Subject, head_dim: int = 16) -> Any:
    """A small config of the subject's model type."""
    config_class = _config_class(subject)
    extra = EXTRA.get(subject.model_type, {})
    try:
        base = config_class()
    except (ValueError, TypeError):  # no valid defaults
        base = config_class(**extra)
    values = shrink(base, extra, head_dim, SIZES)
    known = vars(base).keys() | {"out_indices", "backbone_config", "spatial_merge_size"}
    values = {key: value for key, value in values.items() if key not in extra or key in known}
    values.update(REPLACED.get(subject.model_type, {}))
    return config_class(**values)


def _config_class(subject: Subject) -> Any:
    """The config class of the type; a part of a model names the config class of the whole."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = getattr(transformers, subject.class_name).config_class
    if config_class.model_type != subject.model_type and subject.model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[subject.model_type]
    return config_class


def randomise_buffers(model: Any, seed: int) -> None:
    """A bit more than they were, each its own: a variance stays positive."""
    generator = torch.Generator().manual_seed(seed)
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    with torch.no_grad():
        for name, buffer in model.state_dict().items():
            if name not in names and isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator))


def build_tiny_subject(subject: Subject, *, seed: int = 0) -> Any:
    """A tiny model of the class, float32, in eval mode, random everywhere.

    Raises:
        NotBuiltError: no model of a few million parameters could be made of the defaults; the first reason.
    """
    failures = []
    for head_dim in (16, 8):
        try:
            return _build(subject, head_dim, seed)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code raises, it is the reason
            failures.append(error if isinstance(error, NotBuiltError) else NotBuiltError(reason_of(error)))
    raise failures[0]


def _build(subject: Subject, head_dim: int, seed: int) -> Any:
    import transformers

    cls = getattr(transformers, subject.class_name)
    config = tiny_config(subject, head_dim)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > _MAX_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).eval()
    randomise(model, seed)
    randomise_buffers(model, seed)
    return model
