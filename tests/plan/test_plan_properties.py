"""Properties of every plan, over random checkpoints: layers, biases, extra tensors, and any sharding."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.checkpoint import open_checkpoint
from kconvert.convert.resolve import resolve_recipe
from kconvert.plan import Plan, build_plan
from kconvert.recipe import parse_recipe
from kconvert.transforms import whole
from tests.support import LAYER_SHAPES, convert, qwen3_config, read_raw, write_checkpoint, write_recipe

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
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4, unique=True))
    biases = draw(st.lists(st.integers(0, 3), min_size=len(layers), max_size=len(layers)))
    tensors = make_tensors(layers, biases, draw(st.sampled_from(DTYPES)))
    names = draw(st.permutations(list(tensors)))
    places = draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    shards = tuple(tuple(n for n, p in zip(names, places, strict=True) if p == number) for number in range(4))
    return Case(tensors, draw(st.sampled_from([FUSE, REPLACE])), tuple(shard for shard in shards if shard))


def plan(directory: Path, patches: str) -> Plan:
    recipe = parse_recipe(f"recipe: 1\nname: test\nmodel_type: [qwen3]\npatches:\n{patches}", "r.yaml")
    return build_plan(open_checkpoint(directory), resolve_recipe(recipe).entries)


def described(made: Plan) -> list[Any]:
    """A plan without files and offsets."""
    return [
        (step.target, step.dtype, step.shape, step.op, step.entry, step.parts, step.made, step.stored)
        for step in made.steps
    ]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_source_is_used_exactly_once(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = plan(write_checkpoint(Path(folder), case.tensors, qwen3_config(), case.shards), case.patches)
    for used in (
        Counter(origin.name for step in made.steps for origin in step.origins),
        Counter(part.source for step in made.steps for part in step.parts),
    ):
        assert used == Counter(dict.fromkeys(case.tensors, 1))
    for step in made.steps:
        for part in step.parts:
            assert part.stored == whole(part.source, tuple(case.tensors[part.source].shape))
    written = Counter(step.target for shard in made.shards for step in shard.steps)
    assert written == Counter(dict.fromkeys((step.target for step in made.steps), 1))
    assert sum(step.size_bytes for step in made.steps) == sum(
        tensor.numel() * tensor.element_size() for tensor in case.tensors.values()
    )
    for step in made.steps:
        assert len(step.parts) == (2 if step.op == "concatenate(0)" else 1)
        assert sum(part.shape[0] if part.shape else 1 for part in step.parts) == (step.shape[0] if step.shape else 1)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_plan_does_not_depend_on_shards_or_their_order(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        single = write_checkpoint(Path(folder) / "single", case.tensors, qwen3_config())
        first = write_checkpoint(Path(folder) / "first", case.tensors, qwen3_config(), case.shards)
        turned = [tuple(reversed(shard)) for shard in reversed(case.shards)]
        second = write_checkpoint(Path(folder) / "second", case.tensors, qwen3_config(), turned)
        alone, *others = (plan(path, case.patches) for path in (single, first, second))
    for other in others:
        assert described(other) == described(alone)
        assert (other.claims, other.traces) == (alone.claims, alone.traces)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_sharded_and_unsharded_sources_give_the_same_tensors(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        recipe = write_recipe(root / "r.yaml", case.patches)
        single = write_checkpoint(root / "single", case.tensors, qwen3_config())
        sharded = write_checkpoint(root / "sharded", case.tensors, qwen3_config(), case.shards)
        outputs = [
            read_raw(convert(recipe, source, root / f"{source.name}-out", model_check=False).output)
            for source in (single, sharded)
        ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) < len(case.tensors)
