"""Output shards: which tensors lie where, in what order, and which files are the source's own."""

from __future__ import annotations

import json
import struct
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.checkpoint import DTYPE_BITS, open_checkpoint
from kconvert.cli import main
from kconvert.errors import UsageError
from kconvert.names import SINGLE_NAME, natural_key, shard_name
from kconvert.plan import ModuleTensor, Plan, Step, build_plan
from kconvert.plan.sharding import execution_rank
from kconvert.transforms import whole
from tests.plan.generated import FUSE, NORMS, REPLACE, Case, bytes_of, cases, plan
from tests.support import RawTensor, convert, qwen3_config, qwen3_tensors, write_checkpoint, write_recipe

ALL = (FUSE, REPLACE, NORMS)
LIMITS = st.one_of(st.none(), st.integers(1, 4000))


def run_order(steps: tuple[Step, ...]) -> list[str]:
    """The targets of steps in the order in which a model runs."""
    return sorted((step.target for step in steps), key=lambda name: (execution_rank(name), natural_key(name)))


def planned(case: Case, folder: str, limit: int | None) -> Plan:
    return plan(write_checkpoint(Path(folder), case.tensors, qwen3_config(), case.shards), case.patches, limit)


@settings(max_examples=25, deadline=None)
@given(cases(ALL), LIMITS)
def test_every_step_is_in_one_shard_and_shards_are_numbered(case: Case, limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = planned(case, folder, limit)
    assert sorted(step.target for shard in made.shards for step in shard.steps) == sorted(made.by_target())
    assert all(shard.steps for shard in made.shards)
    total = len(made.shards)
    names = [SINGLE_NAME] if total == 1 else [shard_name(number + 1, total) for number in range(total)]
    assert [shard.name for shard in made.shards] == names


@settings(max_examples=25, deadline=None)
@given(cases(ALL), st.integers(1, 4000))
def test_shards_are_filled_to_the_limit_in_the_order_in_which_the_model_runs(case: Case, limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = planned(case, folder, limit)
    steps = made.by_target()
    filled = [run_order(shard.steps) for shard in made.shards]
    assert [name for names in filled for name in names] == run_order(made.steps)
    sizes = [sum(steps[name].size_bytes for name in names) for names in filled]
    for names, size in zip(filled, sizes, strict=True):
        assert size <= limit or len(names) == 1
    for size, (_, after) in zip(sizes, pairwise(filled), strict=False):
        assert size > limit or size + steps[after[0]].size_bytes > limit


@settings(max_examples=25, deadline=None)
@given(cases(ALL), LIMITS)
def test_wide_items_come_first_then_the_order_in_which_the_model_runs(case: Case, limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = planned(case, folder, limit)
    for shard in made.shards:
        if shard.same_as is None:
            keys = [
                (-DTYPE_BITS[each.dtype], execution_rank(each.target), natural_key(each.target)) for each in shard.steps
            ]
            assert keys == sorted(keys)


@settings(max_examples=25, deadline=None)
@given(cases(ALL))
def test_without_a_limit_a_tensor_goes_where_its_first_origin_lies(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = planned(case, folder, None)
    files = [{step.origins[0].file for step in shard.steps} for shard in made.shards]
    assert all(len(names) == 1 for names in files)
    assert [name for names in files for name in names] == sorted({step.origins[0].file for step in made.steps})


@settings(max_examples=25, deadline=None)
@given(cases(ALL), st.integers(1, 4000))
def test_with_a_limit_the_sharding_of_the_source_does_not_matter(case: Case, limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turned = Case(case.tensors, case.patches, tuple(tuple(reversed(shard)) for shard in reversed(case.shards)))
        single = Case(case.tensors, case.patches, (tuple(case.tensors),))
        plans = [planned(each, f"{folder}/{number}", limit) for number, each in enumerate((case, turned, single))]
    told = [[(shard.name, run_order(shard.steps)) for shard in made.shards] for made in plans]
    assert told[1] == told[2] == told[0]


def without_metadata(path: Path) -> None:
    """Write a file anew, without `__metadata__`."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    del header["__metadata__"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


@settings(max_examples=50, deadline=None)
@given(cases(ALL), LIMITS, st.integers(0, 15))
def test_a_shard_is_the_sources_own_file_exactly_when_it_could_be(case: Case, limit: int | None, bare: int) -> None:
    """Exactly when tensors, names, dtypes, shapes and bytes are those of a file, and that says `format`."""
    item_bytes = next(iter(case.tensors.values())).element_size()
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder), case.tensors, qwen3_config(), case.shards)
        paths = sorted(source.glob("*.safetensors"))
        for number, path in enumerate(paths):
            if bare >> number & 1:
                without_metadata(path)
        made = plan(source, case.patches, limit)
        files = {path.name: path.read_bytes() for path in paths}
    stored = {
        path.name: {name: (tuple(case.tensors[name].shape), raw_bytes(case.tensors[name])) for name in names}
        for path, names in zip(paths, case.shards, strict=True)
    }
    for shard in made.shards:
        told = {step.target: (step.shape, bytes_of(step, files, item_bytes)) for step in shard.steps}
        same: list[str | None] = [
            name for number, name in enumerate(files) if stored[name] == told and not bare >> number & 1
        ]
        assert [shard.same_as] == (same or [None])
        if shard.same_as is not None:
            assert [step.target for step in shard.steps] == list(case.shards[list(files).index(shard.same_as)])


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(max_examples=8, deadline=None)
@given(cases((NORMS,)), LIMITS)
def test_a_file_of_the_source_is_written_byte_for_byte(case: Case, limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = write_checkpoint(root / "source", case.tensors, qwen3_config(), case.shards)
        made = plan(source, case.patches, limit)
        options = [] if limit is None else [f"--max-shard-size={limit}"]
        output = applied(root, source, case.patches, options)
        for shard in made.shards:
            if shard.same_as is not None:
                assert (output / shard.name).read_bytes() == (source / shard.same_as).read_bytes()
        if limit is None:
            assert [shard.same_as for shard in made.shards] == sorted(
                path.name for path in source.glob("*.safetensors")
            )


def applied(root: Path, source: Path, patches: str, options: list[str]) -> Path:
    recipe = write_recipe(root / "r.yaml", patches)
    output = root / "out"
    assert main(["apply", str(recipe), str(source), "-o", str(output), "--no-model-check", "-q", *options]) == 0
    return output


def test_a_shard_that_the_limit_happens_to_leave_whole_is_unchanged(tmp_path: Path) -> None:
    """The first shard of the source ends where ours does; the others do not."""
    tensors = qwen3_tensors()
    names = sorted(tensors, key=lambda name: (execution_rank(name), natural_key(name)))
    first, second, third = names[:6], names[6:20], names[20:]
    source = write_checkpoint(tmp_path, tensors, qwen3_config(), [[*reversed(first)], second, third])
    size = sum(tensors[name].numel() * 4 for name in first)
    made = plan(source, NORMS, size)
    assert made.shards[0].same_as == "model-00001-of-00003.safetensors"
    assert [step.target for step in made.shards[0].steps] == [*reversed(first)]
    assert [shard.same_as for shard in made.shards[1:]] == [None] * (len(made.shards) - 1)


def test_a_tensor_under_another_name_is_a_change(tmp_path: Path) -> None:
    """The same bytes in the same order, but not the same header."""
    source = write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config())
    checkpoint = open_checkpoint(source)
    tensors = [
        ModuleTensor(f"language_{name}", whole(name, tensor.shape)) for name, tensor in checkpoint.tensors.items()
    ]
    assert [shard.same_as for shard in build_plan(checkpoint, (), tensors=tensors).shards] == [None]
    tensors = [ModuleTensor(name, whole(name, tensor.shape)) for name, tensor in checkpoint.tensors.items()]
    assert [shard.same_as for shard in build_plan(checkpoint, (), tensors=tensors).shards] == ["model.safetensors"]


def test_a_tensor_that_gets_another_shape_is_a_change(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, {"a": torch.zeros(4, 2)}, qwen3_config()))
    turned = replace(whole("a", (4, 2)), shape=(2, 4))
    for stored, same_as in ((whole("a", (4, 2)), "model.safetensors"), (turned, None)):
        (shard,) = build_plan(checkpoint, (), tensors=[ModuleTensor("a", stored)]).shards
        assert (shard.same_as, shard.steps[0].shape) == (same_as, stored.shape)


def test_a_larger_tensor_has_a_shard_of_its_own_which_even_empty_ones_do_not_join(tmp_path: Path) -> None:
    tensors = {
        "a.0": RawTensor("U8", (3,), b"abc"),
        "a.1": RawTensor("U8", (9,), bytes(9)),
        "a.2": RawTensor("U8", (0,), b""),
        "a.3": RawTensor("U8", (4,), bytes(4)),
    }
    source = write_checkpoint(tmp_path, tensors, qwen3_config(), [["a.3", "a.1"], ["a.0", "a.2"]])
    assert [[step.target for step in shard.steps] for shard in plan_of(source, 4).shards] == [
        ["a.0"],
        ["a.1"],
        ["a.2", "a.3"],
    ]


def plan_of(source: Path, limit: int | None) -> Plan:
    return build_plan(open_checkpoint(source), (), max_shard_bytes=limit)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_that_nothing_fits_in(tmp_path: Path, limit: int) -> None:
    source = write_checkpoint(tmp_path, {"a": torch.zeros(1)}, qwen3_config())
    with pytest.raises(UsageError, match=f"a shard of at most {limit} bytes holds nothing"):
        plan_of(source, limit)


def test_one_shard_has_no_number(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config(), [[name] for name in qwen3_tensors()])
    assert [shard.name for shard in plan_of(source, 10**9).shards] == [SINGLE_NAME]


# --- the order in which a model runs ------------------------------------------------------------------

FIRST_AND_LAST = [
    ("model.embed_tokens", "lm_head"),  # llama, qwen, deepseek, ...
    ("model.language_model.embed_tokens", "lm_head"),  # gemma3, qwen2_5_vl, llava, ...
    ("model.text_model.embed_tokens", "lm_head"),  # idefics3
    ("language_model.model.embed_tokens", "language_model.lm_head"),  # llama4
    ("language_model.model.embeddings", "language_model.lm_head"),  # nemotron_h_omni
    ("model.vlm.language_model.embed_tokens", "lm_head"),  # pi0
    ("text_model.model.embed_tokens", "text_model.lm_head"),  # kosmos-2
    ("model.decoder.embed_tokens", "lm_head"),  # opt, bart
    ("model.decoder.embed_tokens", "proj_out"),  # whisper
    ("model.decoder.embed_tokens", "output_projection"),  # trocr
    ("biogpt.embed_tokens", "output_projection"),
    ("transformer.wte", "lm_head"),  # gpt2
    ("transformer.word_embeddings", "lm_head"),  # bloom, falcon
    ("transformer.word_embedding", "lm_loss"),  # xlnet
    ("transformer.tokens_embed", "lm_head"),  # openai-gpt
    ("transformer.embeddings", "pred_layer.proj"),  # xlm
    ("backbone.embeddings", "lm_head"),  # mamba
    ("rwkv.embeddings", "head"),
    ("gpt_neox.embed_in", "embed_out"),
    ("cpmant.input_embedding", "lm_head"),
    ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ("roberta.embeddings.word_embeddings", "lm_head.decoder"),
    ("electra.embeddings.word_embeddings", "generator_lm_head"),
    ("git.embeddings.word_embeddings", "output"),
    ("model.local_encoder.embed_tokens", "lm_head"),  # blt
    ("shared", "lm_head"),  # t5
]
"""What `get_input_embeddings` and `get_output_embeddings` are called in the causal and vision models of transformers."""


@pytest.mark.parametrize(("embedding", "head"), FIRST_AND_LAST)
def test_embeddings_come_first_and_heads_last(embedding: str, head: str) -> None:
    names = [f"{head}.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight", f"{embedding}.weight"]
    assert sorted(names, key=execution_rank) == [*reversed(names)]


def ordered(*names: str) -> None:
    """These names are in the order in which the model runs."""
    turned = sorted({*names}, key=lambda name: (execution_rank(name), natural_key(name)))
    assert turned == list(names)


def test_the_order_of_a_mixture_of_experts_with_a_draft_layer() -> None:
    ordered(
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.mlp.experts.9.down_proj.weight",
        "model.layers.2.mlp.experts.10.down_proj.weight",
        "model.layers.2.mlp.gate.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "model.layers.61.embed_tokens.weight",  # of the draft layer, which runs last
        "model.layers.61.shared_head.head.weight",
        "model.norm.weight",
        "lm_head.weight",
    )


def test_the_order_of_a_vision_model() -> None:
    """The head of the vision tower pools, and is none of the model; what the tower feeds comes after it."""
    ordered(
        "model.language_model.embed_tokens.weight",
        "model.vision_tower.embeddings.patch_embedding.weight",
        "model.vision_tower.encoder.layers.2.mlp.fc1.weight",
        "model.vision_tower.encoder.layers.10.mlp.fc1.weight",
        "model.language_model.layers.2.mlp.up_proj.weight",
        "model.language_model.layers.10.mlp.up_proj.weight",
        "model.language_model.norm.weight",
        "model.multi_modal_projector.linear_1.weight",
        "model.vision_tower.head.mlp.fc1.weight",
        "model.vision_tower.post_layernorm.weight",
        "lm_head.weight",
    )


def test_the_order_of_an_encoder_and_a_decoder() -> None:
    ordered(
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.11.layer.0.SelfAttention.q.weight",
        "decoder.block.0.layer.0.SelfAttention.q.weight",
        "decoder.final_layer_norm.weight",
        "encoder.final_layer_norm.weight",
        "lm_head.weight",
    )


def test_codebooks_are_numbered_embeddings_and_heads() -> None:
    ordered(
        "decoder.model.decoder.embed_tokens.0.weight",
        "decoder.model.decoder.embed_tokens.1.weight",
        "decoder.model.decoder.layers.0.fc1.weight",
        "decoder.lm_heads.0.weight",
        "decoder.lm_heads.1.weight",
    )


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens_norm.weight", "model.my_lm_head.weight", "model.output.weight", "layers_0.weight", "a.head.w"],
)
def test_only_whole_segments_count(name: str) -> None:
    assert execution_rank(name) == execution_rank("model.norm.weight")


def test_the_order_within_a_file(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**qwen3_tensors(), "zz.wide": RawTensor("I64", (1,), bytes(8))}
    source = write_checkpoint(tmp_path / "source", {name: tensors[name] for name in sorted(tensors)}, qwen3_config())
    recipe = write_recipe(tmp_path / "r.yaml", REPLACE)
    output = convert(recipe, source, tmp_path / "out", model_check=False).output
    content = (output / SINGLE_NAME).read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    names = [name for name in header if name != "__metadata__"]
    assert names[:2] == ["zz.wide", "model.embed_tokens.weight"]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names[2].startswith("model.layers.0.")
    assert names[-3].startswith("model.layers.1.")
