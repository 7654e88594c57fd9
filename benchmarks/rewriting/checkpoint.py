"""Makes the checkpoints that the rewrite benchmark converts: the form of Qwen3, bf16, random values, in shards.

Only the standard library is used, and a block at a time is in memory: what the benchmark itself holds would show in the
peak memory of the processes that it starts.  A checkpoint is made once, and is found again by its shape.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["GB", "Shape", "make_checkpoint", "weight_bytes"]

GB = 10**9
_BF16_BYTES = 2
_BLOCK_BYTES = 1 << 20
_HEADS, _KV_HEADS = 16, 8


@dataclass(frozen=True)
class Shape:
    """A Qwen3 of `num_layers` layers: hidden 2048, intermediate 6144, vocabulary 32,000, shards of at most 1 GB.

    `scale` divides hidden, intermediate, head and vocabulary sizes, and shards by its square, so that a small model
    has the same tensors in the same shards.  It has to divide 32.
    """

    num_layers: int
    scale: int = 1

    @staticmethod
    def of_size(size_bytes: float, *, scale: int = 1) -> Shape:
        """The shape whose weights come nearest to `size_bytes`; those of scale 1 are meant, whatever `scale` is."""
        full = Shape(1)
        layer = sum(full._bytes_of(name) for name in full.tensors() if name.startswith("model.layers."))
        rest = sum(full._bytes_of(name) for name in full.tensors()) - layer
        return Shape(max(1, round((size_bytes - rest) / layer)), scale)

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return 2048 // self.scale

    @property
    def intermediate(self) -> int:
        """The intermediate size."""
        return 6144 // self.scale

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return 128 // self.scale

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return 32_000 // self.scale

    @property
    def shard_bytes(self) -> int:
        """The most that a shard holds."""
        return GB // self.scale**2

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"qwen3-{self.num_layers}x{self.hidden}"

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, in the order of the model."""
        query, key = _HEADS * self.head_dim, _KV_HEADS * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (key, self.hidden),
            "self_attn.v_proj.weight": (key, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.num_layers):
            found.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
        return {**found, "model.norm.weight": (self.hidden,)}

    def shards(self) -> list[list[str]]:
        """The tensors of each shard: the next one begins where a tensor does not fit."""
        shards: list[list[str]] = [[]]
        filled = 0
        for name in self.tensors():
            size = self._bytes_of(name)
            if shards[-1] and filled + size > self.shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        return shards

    @property
    def size_bytes(self) -> int:
        """The size of all weights."""
        return sum(_BF16_BYTES * prod(shape) for shape in self.tensors().values())

    def _bytes_of(self, name: str) -> int:
        return _BF16_BYTES * prod(self.tensors()[name])


def make_checkpoint(folder: Path, shape: Shape) -> Path:
    """The checkpoint of `shape` in `folder`, made where it is not there yet."""
    target = folder / shape.name
    if target.is_dir():
        return target
    unfinished = folder / f"{shape.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    shards, weight_map = shape.shards(), {}
    values = _random_values()
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        with (unfinished / file).open("wb") as out:
            _write_shard(out, {name: shape.tensors()[name] for name in names}, values)
            os.fsync(out.fileno())
    index = {"metadata": {"total_size": shape.size_bytes}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (unfinished / "config.json").write_text(json.dumps(shape.config(), indent=2), encoding="utf-8")
    unfinished.rename(target)
    return target


def _random_values() -> memoryview:
    """A block of bf16 values of either sign between 2**-7 and 2**-5: random bits could be infinite."""
    block = bytearray(random.Random(0).randbytes(_BLOCK_BYTES))
    block[1::2] = block[1::2].translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    return memoryview(bytes(block) * 2)


def _write_shard(out: BinaryIO, shapes: dict[str, tuple[int, ...]], values: memoryview) -> None:
    """Writes a file of safetensors; each tensor begins at another place of the block, so no two are equal."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _BF16_BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    starts = random.Random(out.name.encode())
    for name in shapes:
        first, last = header[name]["data_offsets"]
        begin = _BF16_BYTES * starts.randrange(_BLOCK_BYTES // _BF16_BYTES)
        for size in _blocks(last - first):
            out.write(values[begin : begin + size])


def _blocks(size_bytes: int) -> Iterator[int]:
    for start in range(0, size_bytes, _BLOCK_BYTES):
        yield min(_BLOCK_BYTES, size_bytes - start)


def weight_bytes(folder: Path) -> int:
    """The size of all tensors in the safetensors files of `folder`, as their headers and sizes say."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - struct.unpack("<Q", file.read(8))[0]
    return total
