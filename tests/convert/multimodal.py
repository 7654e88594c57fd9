"""Tiny models of types that see or hear: every parameter random, and the path and class of their text MLPs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

__all__ = ["IDS", "TYPES", "logits", "text_mlp", "tiny"]

IDS = torch.tensor([[3, 9, 27, 17]])

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_BLOCKS: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def _of(text: str, tower: dict[str, Any], **kw: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, "model_type": text}, "vision_config": tower, **kw}


def _mrope(tower: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": {**_TEXT, "rope_parameters": _MROPE}, "vision_config": tower}


_CLIP = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_HEARD = {"num_mel_bins": 8, "max_source_positions": 16}

TYPES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _mrope({"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}),
    "qwen2_5_vl": _mrope({**_BLOCKS, "fullatt_block_indexes": [0], "window_size": 16}),
    "qwen3_vl": _mrope({**_BLOCKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "glm4v": _mrope({**_BLOCKS, "image_size": 8}),
    "gemma3": _of("gemma3_text", _SIGLIP, mm_tokens_per_image=4),
    "paligemma": _of("gemma", {**_SIGLIP, "projection_dim": 32}, image_token_index=60, projection_dim=32),
    "aya_vision": _of("cohere2", _SIGLIP, image_token_index=60),
    "llava": _of("llama", _CLIP, image_token_index=60),
    "llava_next": _of("llama", _CLIP, image_token_index=60),
    "vipllava": _of("llama", _CLIP, image_token_index=60, vision_feature_layers=[-1]),
    "internvl": _of(
        "qwen2",
        {**_TOWER, "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=60,
        downsample_ratio=0.5,
    ),
    "mistral3": _of("mistral", {**_TOWER, "model_type": "pixtral", "head_dim": 8}, image_token_index=60),
    "idefics3": _of("llama", _TOWER, image_token_id=60, scale_factor=2),
    "smolvlm": _of("llama", _TOWER, image_token_id=60, scale_factor=2),
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, **_HEARD
        },
        "audio_token_index": 60,
    },
    "voxtral": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **_HEARD
        },
        "audio_token_id": 60,
    },
}  # fmt: skip
"""Model type to the values of its config."""


def tiny(model_type: str, **kw: Any) -> Any:
    """A stock model in eval mode; `kw` are values of the outer config."""
    config = AutoConfig.for_model(model_type, **{**TYPES[model_type], **kw})
    named = {
        **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    model = getattr(transformers, named[model_type])(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name))
    return model


def text_mlp(model: Any) -> tuple[str, str]:
    """The path pattern of the MLPs of the text layers, and their class."""
    path = next(
        path
        for path, _ in model.named_modules()
        if path.endswith(".layers.0.mlp")
        and path.split(".")[-5:-3] in (["model", "language_model"], ["model", "text_model"])
    )
    return path.replace(".0.", ".*."), type(model.get_submodule(path)).__name__


def logits(model: Any) -> torch.Tensor:
    """Logits of text alone, without gradients."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found
