"""Random checkpoints with recipes, and their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from kconvert.checkpoint import open_checkpoint
from kconvert.convert.resolve import resolve_recipe
from kconvert.plan import Entry, Plan, Step, build_plan
from kconvert.recipe import parse_recipe
from kconvert.transforms import runs_of
from tests.support import LAYER_SHAPES

__all__ = ["FUSE", "MLP", "NORMS", "QKV", "REPLACE", "Case", "bytes_of", "cases", "entries_of", "plan"]

FUSE = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
REPLACE = """\
  - kernel: cpu_fused_swiglu
    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}
  - kernel: cpu_fused_rmsnorm
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
"""
MLP = REPLACE.partition("  - kernel: cpu_fused_rmsnorm")[0]
QKV = """\
  - kernel: cpu_fused_qkv
    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}
"""
NORMS = """\
  - kernel: cpu_fused_rmsnorm
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
"""
"""Joins nothing, so every tensor is as in the source."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
BIASES = ("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias")


@dataclass(frozen=True)
class Case:
    """A checkpoint and a recipe."""

    tensors: dict[str, torch.Tensor]
    patches: str
    shards: tuple[tuple[str, ...], ...]


def make_tensors(layers: Sequence[int], biases: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, 8), "logit_scale": (), "empty": (0, 3)}
    for layer, bias in zip(layers, biases, strict=True):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()})
        if bias & 1:
            shapes.update({f"model.layers.{layer}.{name}": (12,) for name in BIASES[:2]})
        if bias & 2:
            shapes[f"model.layers.{layer}.{BIASES[2]}"] = (8,)
    generator = torch.Generator().manual_seed(len(layers))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@st.composite
def cases(draw: st.DrawFn, patches: Sequence[str] = (FUSE, REPLACE)) -> Case:
    layers = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4, unique=True))
    biases = draw(st.lists(st.integers(0, 3), min_size=len(layers), max_size=len(layers)))
    tensors = make_tensors(layers, biases, draw(st.sampled_from(DTYPES)))
    names = draw(st.permutations(list(tensors)))
    places = draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    shards = tuple(tuple(n for n, p in zip(names, places, strict=True) if p == number) for number in range(4))
    return Case(tensors, draw(st.sampled_from(patches)), tuple(shard for shard in shards if shard))


def entries_of(patches: str) -> tuple[Entry, ...]:
    """The entries of a recipe, of which `patches` is the text below `patches:`."""
    recipe = parse_recipe(f"recipe: 1\nname: test\nmodel_type: [qwen3]\npatches:\n{patches}", "r.yaml")
    return resolve_recipe(recipe).entries


def plan(directory: Path, patches: str, max_shard_bytes: int | None = None) -> Plan:
    return build_plan(open_checkpoint(directory), entries_of(patches), max_shard_bytes=max_shard_bytes)


def bytes_of(step: Step, files: dict[str, bytes], item_bytes: int) -> bytes:
    """What a step makes of the source's files, read run by run."""
    origins = {origin.name: origin for origin in step.origins}
    found = b""
    for run in runs_of(step.stored.pieces):
        begin = origins[run.source].offset + run.source_start * item_bytes
        found += files[origins[run.source].file][begin : begin + run.size * item_bytes]
    return found
