"""Properties of every plan, over random checkpoints: layers, biases, extra tensors, and any sharding."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.checkpoint import open_checkpoint
from kconvert.errors import CheckpointError
from kconvert.plan import ModuleTensor, Plan, build_plan
from kconvert.transforms import whole
from tests.plan.generated import FUSE, MLP, NORMS, QKV, REPLACE, Case, cases, entries_of, plan
from tests.support import RawTensor, convert, qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe


def described(made: Plan) -> list[Any]:
    """A plan without files and offsets."""
    return [
        (step.target, step.dtype, step.shape, step.op, step.entry, step.parts, step.made, step.stored)
        for step in made.steps
    ]


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=12, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(cases((FUSE, REPLACE, REPLACE + QKV)), st.randoms())
def test_layers_that_are_alike_are_planned_as_if_each_were_the_first(case: Case, random: Any) -> None:
    """With tensors given, as a model gives them, every module is planned by its rules; without, most repeat another."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_checkpoint(Path(folder), case.tensors, qwen3_config(), case.shards))
    entries = entries_of(case.patches)
    tensors = [ModuleTensor(name, whole(name, tensor.shape)) for name, tensor in checkpoint.tensors.items()]
    random.shuffle(tensors)
    assert build_plan(checkpoint, entries) == build_plan(checkpoint, entries, tensors=tensors)


def test_a_layer_of_another_shape_or_dtype_is_no_repeat(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for layer, (rows, dtype) in enumerate([(4, "F32"), (4, "F32"), (6, "F32"), (4, "F16")]):
        for number, name in enumerate(("gate", "up", "down")):
            size = rows * 2 * (4 if dtype == "F32" else 2)
            data = bytes([16 * layer + number] * size)
            tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = RawTensor(dtype, (rows, 2), data)
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(layers=4))
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    found = read_raw(convert(recipe, source, tmp_path / "out", model_check=False).output)
    for layer in range(4):
        gate, up = (tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        packed = found[f"model.layers.{layer}.mlp.gate_up_proj.weight"]
        assert packed == RawTensor(gate.dtype, (2 * gate.shape[0], 2), gate.data + up.data)


def test_a_layer_with_a_tensor_of_another_name_is_no_repeat(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    tensors["model.layers.1.mlp.dawn_proj.weight"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight'"):
        plan(write_checkpoint(tmp_path, tensors, qwen3_config()), MLP)


def test_modules_that_are_alike_belong_to_their_own_entries(tmp_path: Path) -> None:
    patches = NORMS + NORMS.replace("input_layernorm", "post_attention_layernorm")
    made = plan(write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config()), patches)
    norms = {step.target: step.entry for step in made.steps if step.entry is not None}
    assert norms == {
        f"model.layers.{layer}.{name}.weight": number
        for layer in range(2)
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm"))
    }
