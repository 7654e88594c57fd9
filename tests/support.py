"""Real files for tests: tiny models with random weights, hand-made checkpoints, and raw reading of the result.

Weights are written and read without kconvert's own header code, so that a fault there cannot hide itself.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from safetensors import deserialize

from kconvert.convert import ApplyResult, Options, apply_recipe
from kconvert.errors import KconvertError
from kconvert.manifest import Manifest, sha256_digest

__all__ = [
    "LAYER_SHAPES",
    "Kind",
    "RawTensor",
    "bake_recipe",
    "check_refused",
    "convert",
    "indices_of",
    "manifest_bytes",
    "qwen3_config",
    "qwen3_tensors",
    "raw",
    "read_raw",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "unpacked",
    "write_checkpoint",
    "write_recipe",
    "write_safetensors",
]

Kind = Literal[
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "phi3",
    "granite",
    "olmo2",
    "olmo",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
]
"""Model types that `tiny_model` makes."""

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it stands in a file: safetensors' dtype name, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(tensor: np.ndarray[Any, Any] | torch.Tensor | RawTensor) -> RawTensor:
    """Any kind of tensor as a `RawTensor`."""
    if isinstance(tensor, RawTensor):
        return tensor
    made = torch.from_numpy(np.array(tensor)) if isinstance(tensor, np.ndarray) else tensor.detach()
    data = made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if made.numel() else b""
    return RawTensor(_DTYPES[made.dtype], tuple(made.shape), data)


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """One safetensors file, tensors in the order of the mapping."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, np.ndarray[Any, Any] | torch.Tensor | RawTensor],
    config: Mapping[str, Any],
    shards: Sequence[Sequence[str]] | None = None,
) -> Path:
    """A model directory: `config.json` and one `model.safetensors`, or the given shards with their index.

    Args:
        directory: made where it is missing.
        tensors: file name of each tensor to its values.
        config: the content of config.json.
        shards: tensor names per shard; every name exactly once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    made = {name: raw(tensor) for name, tensor in tensors.items()}
    if shards is None:
        write_safetensors(directory / "model.safetensors", made)
        return directory
    if sorted(name for names in shards for name in names) != sorted(made):
        raise ValueError("shards do not hold every tensor exactly once")
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file, {name: made[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(len(tensor.data) for tensor in made.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def read_raw(directory: Path, pattern: str = "*.safetensors") -> dict[str, RawTensor]:
    """Every tensor in the safetensors files of a directory; a name that two files hold is an error."""
    found: dict[str, RawTensor] = {}
    for path in sorted(directory.glob(pattern)):
        for name, fields in deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            if name in found:
                raise ValueError(f"{name} is in two files of {directory}")
            found[name] = RawTensor(str(fields["dtype"]), tuple(fields["shape"]), bytes(fields["data"]))
    return found


Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def indices_of(numbers: Sequence[int]) -> tuple[Indices, Indices]:
    """Where each element of a manifest's piece stands in the source, and where in the target."""
    source, target = (np.array([start], dtype=np.int64) for start in numbers[:2])
    for size, source_stride, target_stride in zip(numbers[2::3], numbers[3::3], numbers[4::3], strict=True):
        steps = np.arange(size, dtype=np.int64)
        source, target = (
            np.add.outer(places, steps * stride).ravel()
            for places, stride in ((source, source_stride), (target, target_stride))
        )
    return source, target


def unpacked(manifest: Manifest, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors of the source's files, cut out of the targets by the manifest alone.

    Dtypes are those of the targets.  An element that is nowhere, or in two places, is a ValueError.
    """
    parts, origins = _Cut(), _Cut()
    for record in manifest.tensors:
        stored = tensors[record.target]
        if (stored.dtype, stored.shape) != (record.dtype, record.shape):
            raise ValueError(f"{record.target} is not as the manifest says")
        for part in record.parts:
            parts.take(part.source, part.shape, part.pieces, stored)
    for part in {part.source: part for record in manifest.tensors for part in record.parts}.values():
        for origin in part.origins:
            origins.take(origin.file_name, origin.shape, origin.pieces, parts.whole(part.source))
    return {name: origins.whole(name) for name in origins.shapes}


class _Cut:
    """Tensors that are put together from pieces of others."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        self._uses: dict[str, Indices] = {}

    def take(self, name: str, shape: tuple[int, ...], pieces: Sequence[Sequence[int]], stored: RawTensor) -> None:
        """Some elements of `name` out of `stored`, which the pieces have as their target."""
        item = next(dtype.itemsize for dtype, known in _DTYPES.items() if known == stored.dtype)
        data = np.frombuffer(stored.data, dtype=f"V{item}")
        if name not in self.shapes:
            self.shapes[name], self._dtypes[name] = shape, stored.dtype
            self._values[name] = np.empty(math.prod(shape), dtype=data.dtype)
            self._uses[name] = np.zeros(math.prod(shape), dtype=np.int64)
        for piece in pieces:
            source, target = indices_of(piece)
            self._values[name][source] = data[target]
            np.add.at(self._uses[name], source, 1)

    def whole(self, name: str) -> RawTensor:
        """The tensor, of which nothing may be missing."""
        if (self._uses[name] != 1).any():
            raise ValueError(f"{name} has elements that are nowhere, or in two places")
        return RawTensor(self._dtypes[name], self.shapes[name], self._values[name].tobytes())


# --- tiny models ------------------------------------------------------------------------------------


_QWEN_MOE = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}

_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": {**_QWEN_MOE, "shared_expert_intermediate_size": 40},
    "qwen3_moe": _QWEN_MOE,
    "mixtral": {"num_local_experts": 12},
    "olmoe": {"num_experts": 12, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 12, "num_experts_per_tok": 2},
}
"""More than ten experts: their numbers in text order are not in numeric order.  The first layer is dense where it can be."""

_OWN_HEAD_DIM = ("phi3", "olmoe", "deepseek_v3")
"""Types that derive the size of a head from other values."""


def tiny_config(kind: Kind, *, tie: bool = False, **kw: Any) -> Any:
    """A config of two layers, hidden 32, four heads of 16 (not hidden / heads), two kv heads; `kw` overrides.

    Phi-3 and OLMoE have no head_dim of their own and keep hidden / heads.  Gemma 3 with images has a vision tower of one layer;
    `kw` is for its text part.
    """
    from transformers import AutoConfig

    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **_EXPERTS.get(kind, {}),
        **kw,
    }
    if kind in _OWN_HEAD_DIM:
        values.pop("head_dim", None)
    if kind == "phi3":
        values.update(original_max_position_embeddings=64)
    if kind == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        return AutoConfig.for_model(
            kind,
            text_config=values,
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            tie_word_embeddings=tie,
            image_token_index=60,
            boi_token_index=61,
            eoi_token_index=62,
        )
    return AutoConfig.for_model(kind, **values)


def tiny_model(kind: Kind, *, dtype: torch.dtype = torch.float32, tie: bool = False, seed: int = 0, **kw: Any) -> Any:
    """A stock causal model in eval mode; every parameter is random, norm weights too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if kind == "gemma3" else AutoModelForCausalLM
    model: Any = auto.from_config(tiny_config(kind, tie=tie, **kw))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.25 * values if "norm" in name else 0.2 * values)
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # float32 in any model, as transformers loads it
            values = 0.2 * torch.randn(module.e_score_correction_bias.shape, generator=generator)
            module.e_score_correction_bias = values
    return model.eval()


def save_tiny(
    directory: Path,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str = "50GB",
    tie: bool = False,
    seed: int = 0,
    **kw: Any,
) -> Path:
    """Save a `tiny_model` with transformers; `kw` overrides config values.  Gives `directory`."""
    model = tiny_model(kind, dtype=dtype, tie=tie, seed=seed, **kw)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def convert(recipe: str | Path, source: Path, output: Path, **kw: Any) -> ApplyResult:
    """`apply_recipe` for a shipped recipe's name or a recipe file; `kw` may hold what `Options` does."""
    options = Options(**{field.name: kw.pop(field.name) for field in fields_of(Options) if field.name in kw})
    return apply_recipe(str(recipe), source, output, options=options, **kw)


def check_refused(
    error: type[KconvertError],
    exit_code: int,
    words: Sequence[str],
    recipe: str | Path,
    source: Path,
    output: Path,
    **kw: Any,
) -> KconvertError:
    """A conversion that must fail: with this kind of error, one line that holds `words`, and nothing written."""
    before = sorted(path.name for path in output.parent.iterdir())
    with pytest.raises(error) as caught:
        convert(recipe, source, output, **kw)
    text = str(caught.value)
    assert caught.value.exit_code == exit_code, text
    assert [word for word in words if word not in text] == [], text
    assert "\n" not in text
    assert sorted(path.name for path in output.parent.iterdir()) == before
    return caught.value


def manifest_bytes(*sidecars: str, written_by: str = "apply") -> bytes:
    """A manifest that is whole and says nothing but which sidecars belong to the directory."""
    return Manifest(
        kconvert_version="0",
        transformers_version="0",
        model_type="",
        architecture="",
        config_digest="",
        recipe_name="",
        recipe_text="",
        device=None,
        devices=("cpu", "cuda", "npu"),
        view_devices=(),
        model_checked=False,
        patches=(),
        tensors=(),
        carried=(),
        omitted=(),
        sidecars=sidecars,
        sidecar_digests=dict.fromkeys(sidecars, sha256_digest(b"")),
        weight_files=(),
        source_files=(),
        source_headers=None,
        source_headers_digest=None,
        written_by=written_by,
        digests=None,
    ).to_bytes()


def write_recipe(path: Path, patches: str, *, model_type: str = "qwen3", name: str = "test") -> Path:
    """A recipe file; `patches` is the text below `patches:`, which begins on line 5."""
    path.write_text(f"recipe: 1\nname: {name}\nmodel_type: [{model_type}]\npatches:\n{patches}", encoding="utf-8")
    return path


def bake_recipe(folder: Path, model_type: str = "qwen3_moe") -> Path:
    """A recipe file in `folder` that bakes and patches nothing."""
    path = folder / f"bake-{model_type}.yaml"
    text = f"recipe: 1\nname: bake\nmodel_type: [{json.dumps(model_type)}]\nbake: true\npatches: []\n"
    path.write_text(text, encoding="utf-8")
    return path


# --- hand-made checkpoints --------------------------------------------------------------------------

LAYER_SHAPES: Mapping[str, tuple[int, ...]] = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (16, 8),
    "self_attn.k_proj.weight": (8, 8),
    "self_attn.v_proj.weight": (8, 8),
    "self_attn.o_proj.weight": (8, 16),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
"""A Qwen3 layer: hidden 8, intermediate 12, four heads of 4, two kv heads."""


def qwen3_config(layers: int = 2, **kw: Any) -> dict[str, Any]:
    """The config.json that fits `qwen3_tensors`, as data."""
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return {**values, **kw}


def qwen3_tensors(layers: int = 2, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors whose values say where they belong: tensor number * 1000 + row number * 8 + column, as far as dtype goes."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, 8)}
    for layer in range(layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()})
    shapes.update({"model.norm.weight": (8,), "lm_head.weight": (10, 8)})
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        count = int(np.prod(shape))
        tensors[name] = (torch.arange(count, dtype=torch.float32) + 1000 * number).reshape(shape).to(dtype)
    return tensors
