"""Small checkpoints and what kconvert prepares from them; imports no torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kconvert.checkpoint import build_header, build_index
from kconvert.convert.prepare import prepare

__all__ = ["prepared_manifests", "write_model"]

_HIDDEN, _INNER = 4, 6
_LAYER = {
    "input_layernorm.weight": (_HIDDEN,),
    "self_attn.q_proj.weight": (8, _HIDDEN),
    "self_attn.k_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.v_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.o_proj.weight": (_HIDDEN, 8),
    "self_attn.q_norm.weight": (2,),
    "self_attn.k_norm.weight": (2,),
    "post_attention_layernorm.weight": (_HIDDEN,),
    "mlp.gate_proj.weight": (_INNER, _HIDDEN),
    "mlp.up_proj.weight": (_INNER, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _INNER),
}


def write_model(directory: Path, *, num_shards: int = 1, config: Mapping[str, Any] | None = None) -> Path:
    """A Qwen3 of two layers, bfloat16, whose bytes count up; tensors dealt out to the shards in turn."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _LAYER.items()}
    shapes["scale"] = ()
    directory.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **(config or {})}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        file = "model.safetensors" if num_shards == 1 else f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        names = list(shapes)[number::num_shards]
        sizes = []
        for name in names:
            size = 2
            for dim in shapes[name]:
                size *= dim
            sizes.append((name, "BF16", shapes[name], size))
        total = sum(size for *_, size in sizes)
        (directory / file).write_bytes(
            build_header(sizes, {"format": "pt"}) + bytes(place % 251 for place in range(total))
        )
        weight_map |= dict.fromkeys(names, file)
    if num_shards > 1:
        (directory / "model.safetensors.index.json").write_text(build_index(weight_map, 0), encoding="utf-8")
    return directory


@cache
def prepared_manifests() -> tuple[bytes, ...]:
    """The manifests of two small conversions, of one file and of three shards."""
    with tempfile.TemporaryDirectory() as folder:
        models = [write_model(Path(folder) / str(num_shards), num_shards=num_shards) for num_shards in (1, 3)]
        return tuple(prepare("qwen3", model, model_check=False).manifest.to_bytes() for model in models)
