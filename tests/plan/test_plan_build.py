"""The planner on real headers: groups, dtypes, shapes, shards and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kconvert.checkpoint import open_checkpoint
from kconvert.convert.resolve import resolve_recipe
from kconvert.errors import CheckpointError, RecipeError
from kconvert.names import SINGLE_NAME
from kconvert.plan import ModuleTensor, Plan, Step, build_plan, explain_plan
from kconvert.recipe import parse_recipe
from kconvert.transforms import BoundRule, runs_of, whole
from kconvert.transforms.arrangement import narrow
from tests.support import RawTensor, qwen3_config, qwen3_tensors, write_checkpoint

HEAD = "recipe: 1\nname: test\nmodel_type: [qwen3]\npatches:\n"
MLP = HEAD + '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
NORM = HEAD + '  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'
QKV = HEAD + '  - kernel: cpu_fused_qkv\n    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}\n'
Q_NORM = '  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3RMSNorm, path: "model.layers.*.self_attn.q_norm"}\n'
ATTENTION = "model.layers.1.self_attn"
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
PACKED = "model.layers.1.mlp.gate_up_proj.weight"


def plan(directory: Path, recipe: str = MLP) -> Plan:
    return build_plan(open_checkpoint(directory), resolve_recipe(parse_recipe(recipe, "r.yaml")).entries)


def read_step(step: Step, content: bytes) -> bytes:
    """The bytes of a float32 step, by its runs of a file."""
    offsets = {origin.name: origin.offset for origin in step.origins}
    runs = [(offsets[run.source] + 4 * run.source_start, 4 * run.size) for run in runs_of(step.stored.pieces)]
    return b"".join(content[start : start + size] for start, size in runs)


def expect_refused(directory: Path, recipe: str = MLP) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan(directory, recipe)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_a_step_says_where_its_bytes_lie(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    write_checkpoint(tmp_path, tensors, qwen3_config())
    step = plan(tmp_path).by_target()[PACKED]
    assert (step.op, step.entry, step.dtype, step.shape) == ("concatenate(0)", 0, "F32", (24, 8))
    assert [(part.source, part.shape, part.stored) for part in step.parts] == [
        (name, (12, 8), whole(name, (12, 8))) for name in (GATE, UP)
    ]
    assert [(origin.name, origin.file, origin.shape) for origin in step.origins] == [
        (GATE, "model.safetensors", (12, 8)),
        (UP, "model.safetensors", (12, 8)),
    ]
    content = (tmp_path / "model.safetensors").read_bytes()
    found = read_step(step, content)
    assert found == torch.cat([tensors[GATE], tensors[UP]]).numpy().tobytes()


def test_sums_and_explanation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config())
    made = plan(tmp_path)
    assert made.bytes_transformed == 2 * 24 * 8 * 4
    assert made.bytes_copied + made.bytes_transformed == sum(t.numel() * 4 for t in qwen3_tensors().values())
    told = explain_plan(made)
    assert [patch["modules"] for patch in told["patches"]] == [2]
    assert told["files"] == [
        {
            "name": SINGLE_NAME,
            "tensors": len(made.steps),
            "bytes": made.bytes_copied + made.bytes_transformed,
            "same_as": None,
        }
    ]
    assert [item["target"] for item in told["tensors"] if item["op"] == "concatenate(0)"] == [
        "model.layers.0.mlp.gate_up_proj.weight",
        PACKED,
    ]


@pytest.mark.parametrize("missing", [GATE, UP])
def test_a_missing_member(tmp_path: Path, missing: str) -> None:
    tensors = qwen3_tensors()
    del tensors[missing]
    write_checkpoint(tmp_path, tensors, qwen3_config())
    assert f"{PACKED!r} needs {missing!r}" in expect_refused(tmp_path)


def test_mixed_dtypes_in_a_group_are_listed_and_refused(tmp_path: Path) -> None:
    tensors = qwen3_tensors(dtype=torch.bfloat16)
    tensors[UP] = tensors[UP].float()
    write_checkpoint(tmp_path, tensors, qwen3_config())
    text = expect_refused(tmp_path)
    assert f"{PACKED!r} would join different dtypes: {GATE} BF16 [12, 8], {UP} F32 [12, 8]" in text


def test_dtypes_may_differ_between_layers(tmp_path: Path) -> None:
    tensors = qwen3_tensors(dtype=torch.bfloat16)
    for name in (GATE, UP):
        tensors[name] = tensors[name].half()
    write_checkpoint(tmp_path, tensors, qwen3_config())
    found = plan(tmp_path).by_target()
    assert [found[f"model.layers.{n}.mlp.gate_up_proj.weight"].dtype for n in (0, 1)] == ["BF16", "F16"]


@pytest.mark.parametrize("shape", [(12, 7), (12,), (), (12, 8, 1)])
def test_shapes_that_do_not_join(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_checkpoint(tmp_path, {**qwen3_tensors(), UP: torch.zeros(shape)}, qwen3_config())
    text = expect_refused(tmp_path)
    assert f"{PACKED!r} cannot be made of {GATE} F32 [12, 8], {UP} F32 {list(shape)}" in text


def test_a_target_that_is_there_already(tmp_path: Path) -> None:
    """Inside the module it is a stray tensor; under a name of another module it would be written twice."""
    write_checkpoint(tmp_path, {**qwen3_tensors(), PACKED: torch.zeros(24, 8)}, qwen3_config())
    assert f"no place for {PACKED!r}" in expect_refused(tmp_path)


def test_a_target_over_a_tensor_that_passes_through(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config())
    (entry,) = resolve_recipe(parse_recipe(QKV.replace("layers.*", "layers.1"), "r.yaml")).entries
    query, output = (f"{ATTENTION}.{name}_proj.weight" for name in "qo")
    bound = replace(entry, bind=lambda paths, names: (BoundRule.renamed(query, output),))
    with pytest.raises(CheckpointError) as caught:
        build_plan(open_checkpoint(tmp_path), [bound])
    assert f"{output!r} would be written twice, from {query!r} and {output!r}" in str(caught.value)


def test_a_target_of_another_module(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config())
    (entry,) = resolve_recipe(parse_recipe(NORM, "r.yaml")).entries
    rule = BoundRule.renamed("model.norm.weight", "lm_head.weight")
    with pytest.raises(RecipeError) as caught:
        build_plan(open_checkpoint(tmp_path), [replace(entry, bind=lambda paths, names: (rule,))])
    assert caught.value.where == "r.yaml:5"
    assert "'lm_head.weight', outside the module 'model.norm'" in str(caught.value)


def joined(directory: Path, rule: BoundRule) -> Step:
    """The step that `rule` becomes as the layout of layer 1's MLP."""
    recipe = MLP.replace("model.layers.*.mlp", "model.layers.1.mlp")
    (entry,) = resolve_recipe(parse_recipe(recipe, "r.yaml")).entries
    made = build_plan(open_checkpoint(directory), [replace(entry, bind=lambda paths, names: (rule,))])
    return made.by_target()[rule.target]


def test_columns_are_joined_row_by_row(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    write_checkpoint(tmp_path, tensors, qwen3_config())
    step = joined(tmp_path, BoundRule.joined((GATE, UP), PACKED, 1))
    assert (step.op, step.shape, step.is_transformed) == ("concatenate(1)", (12, 16), True)
    found = read_step(step, (tmp_path / "model.safetensors").read_bytes())
    assert found == torch.cat([tensors[GATE], tensors[UP]], dim=1).numpy().tobytes()


def test_values_of_half_a_byte_are_not_cut(tmp_path: Path) -> None:
    """Two tensors F4 [2, 3]: 3 bytes each, whose rows end inside of a byte."""
    half = {name: RawTensor("F4", (2, 3), b"\x01\x02\x03") for name in (GATE, UP)}
    write_checkpoint(tmp_path, half, qwen3_config())
    step = joined(tmp_path, BoundRule.joined((GATE, UP), PACKED))
    assert (step.shape, step.size_bytes) == ((4, 3), 6)
    with pytest.raises(CheckpointError, match="is F4, and its parts begin inside of a byte"):
        joined(tmp_path, BoundRule.joined((GATE, UP), PACKED, 1))


def test_two_file_names_of_one_module_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.zeros(1), "model.a": torch.zeros(1)}, qwen3_config())
    tensors = [ModuleTensor("model.a", whole(name, (1,))) for name in ("a", "model.a")]
    with pytest.raises(CheckpointError, match=r"tensors 'a' and 'model\.a' are both 'model\.a' in the model"):
        build_plan(open_checkpoint(tmp_path), (), tensors=tensors)


@pytest.mark.parametrize("start", [0, 2])
def test_a_part_of_a_tensor_under_its_own_name(tmp_path: Path, start: int) -> None:
    """To the model it is a whole tensor; in the file it is some rows of one."""
    write_checkpoint(tmp_path, {"a": torch.zeros(4, 2)}, qwen3_config())
    part = narrow(whole("a", (4, 2)), 0, start, 2)
    (step,) = build_plan(open_checkpoint(tmp_path), (), tensors=[ModuleTensor("a", part)]).steps
    assert (step.made, step.stored, step.is_transformed) == (whole("a", (2, 2)), part, True)
    assert (step.origins[0].shape, step.shape) == ((4, 2), (2, 2))


def test_a_scale_beside_its_weight_stops_the_group(tmp_path: Path) -> None:
    scale = f"{GATE}_scale_inv"
    write_checkpoint(tmp_path, {**qwen3_tensors(), scale: torch.ones(1)}, qwen3_config())
    assert f"no place for {scale!r}" in expect_refused(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_quantised_checkpoint_keeps_its_parameters(tmp_path: Path, inside: bool) -> None:
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    config = qwen3_config(**({"text_config": quantization} if inside else quantization))
    write_checkpoint(tmp_path, qwen3_tensors(), config)
    text = expect_refused(tmp_path)
    assert "the checkpoint is quantised (fp8), and layout 'gated_mlp' (r.yaml:5) repacks weights" in text
    assert all(step.parts[0].source == step.target for step in plan(tmp_path, NORM).steps)


# --- output shards ----------------------------------------------------------------------------------


def test_a_group_goes_where_its_first_part_lies(tmp_path: Path) -> None:
    names = list(qwen3_tensors())
    shards = [[name for name in names if name != UP], [UP]]
    write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config(), shards)
    made = plan(tmp_path)
    assert [shard.name for shard in made.shards] == [SINGLE_NAME]  # the second source shard is left empty
    assert [origin.file for origin in made.by_target()[PACKED].origins] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_shards_are_numbered_anew(tmp_path: Path) -> None:
    names = list(qwen3_tensors())
    rest = [name for name in names if name not in (UP, "lm_head.weight")]
    write_checkpoint(tmp_path, qwen3_tensors(), qwen3_config(), [rest, [UP], ["lm_head.weight"]])
    made = plan(tmp_path)
    assert [(shard.name, len(shard.steps)) for shard in made.shards] == [
        ("model.kconvert-00001-of-00002.safetensors", len(rest) - 1),  # up of layer 0 is in its gate
        ("model.kconvert-00002-of-00002.safetensors", 1),
    ]


def test_wide_items_come_first_so_that_every_tensor_is_aligned(tmp_path: Path) -> None:
    extra: dict[str, RawTensor | torch.Tensor] = {
        "a.bits": RawTensor("F4", (2, 3), b"\x01\x02\x03"),
        "a.bytes": RawTensor("U8", (3,), b"abc"),
        "z.wide": RawTensor("I64", (1,), bytes(8)),
        "z.half": torch.ones(3, dtype=torch.float16),
    }
    write_checkpoint(tmp_path, {**extra, **qwen3_tensors()}, qwen3_config())
    (shard,) = plan(tmp_path).shards
    widths = {"I64": 8, "F32": 4, "F16": 2, "U8": 1, "F4": 1}
    offset, order = 0, []
    for step in shard.steps:
        assert offset % widths[step.dtype] == 0, step.target
        offset += step.size_bytes
        order.append(step.target)
    assert order[0] == "z.wide"
    assert order[-3:] == ["z.half", "a.bytes", "a.bits"]


def test_layers_come_in_number_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, qwen3_tensors(12), qwen3_config(12))
    packed = [step.target for step in plan(tmp_path).steps if step.op == "concatenate(0)"]
    assert packed == [f"model.layers.{n}.mlp.gate_up_proj.weight" for n in range(12)]


# --- the router and its neighbours --------------------------------------------------------------------


def test_a_claim_takes_whole_segments_only(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp"
    shared = {f"{layer}.shared_expert.{name}_proj.weight": torch.ones(2, 2) for name in ("gate", "up", "down")}
    others = [
        f"{layer}.gate.weight",
        f"{layer}.gate.e_score_correction_bias",
        f"{layer}.shared_expert_gate.weight",
        f"{layer}.gate_proj.weight",
        f"{layer}.shared_experts.gate_proj.weight",
        f"{layer}.experts.3.gate_proj.weight",
        f"{layer}.experts.3.gate_proj.weight_scale_inv",
        f"{layer}.experts.11.shared_expert.up_proj.weight",
    ]
    write_checkpoint(tmp_path, {**shared, **dict.fromkeys(others, torch.zeros(2, 2))}, qwen3_config())
    recipe = (
        HEAD
        + '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp.shared_expert"}\n'
    )
    steps = plan(tmp_path, recipe).by_target()
    assert {name for name, step in steps.items() if step.entry is not None} == {
        f"{layer}.shared_expert.gate_up_proj.weight",
        f"{layer}.shared_expert.down_proj.weight",
    }
    for name in others:
        step = steps[name]
        assert (step.op, step.entry, [part.source for part in step.parts]) == ("copy", None, [name])


def test_near_misses_come_from_the_checkpoints_own_names(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {f"language_{name}": t for name, t in qwen3_tensors().items()}, qwen3_config())
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path)
    assert str(caught.value).startswith("r.yaml:6: path pattern 'model.layers.*.mlp' matches no module; did you mean ")
    assert "language_model.layers.*.mlp" in str(caught.value)


# --- attention, and what is stored packed already -----------------------------------------------------------


@pytest.mark.parametrize("recipe", [QKV, QKV + Q_NORM, HEAD + Q_NORM + QKV.removeprefix(HEAD)])
def test_q_k_and_v_are_joined_and_the_rest_of_the_module_is_not_touched(tmp_path: Path, recipe: str) -> None:
    tensors = qwen3_tensors()
    write_checkpoint(tmp_path, tensors, qwen3_config())
    steps = plan(tmp_path, recipe).by_target()
    step = steps[f"{ATTENTION}.qkv_proj.weight"]
    assert (step.op, step.shape) == ("concatenate(0)", (32, 8))
    assert [(part.source, part.shape[0]) for part in step.parts] == [
        (f"{ATTENTION}.q_proj.weight", 16),
        (f"{ATTENTION}.k_proj.weight", 8),
        (f"{ATTENTION}.v_proj.weight", 8),
    ]
    content = (tmp_path / "model.safetensors").read_bytes()
    found = read_step(step, content)
    assert found == torch.cat([tensors[f"{ATTENTION}.{name}_proj.weight"] for name in "qkv"]).numpy().tobytes()
    for name in ("o_proj", "q_norm", "k_norm"):
        other = steps[f"{ATTENTION}.{name}.weight"]
        assert [part.source for part in other.parts] == [other.target]
        assert (other.entry is None) == (name != "q_norm" or Q_NORM not in recipe)
    assert len(steps) == len(tensors) - 4


@pytest.mark.parametrize("missing", ["q_proj", "k_proj", "v_proj"])
def test_a_missing_projection(tmp_path: Path, missing: str) -> None:
    tensors = qwen3_tensors()
    del tensors[f"{ATTENTION}.{missing}.weight"]
    write_checkpoint(tmp_path, tensors, qwen3_config())
    text = expect_refused(tmp_path, QKV)
    assert f"'{ATTENTION}.qkv_proj.weight' needs '{ATTENTION}.{missing}.weight'" in text


@pytest.mark.parametrize("biased", [("q",), ("q", "v"), ("k",)])
def test_a_bias_that_some_projections_lack(tmp_path: Path, biased: tuple[str, ...]) -> None:
    biases = {f"{ATTENTION}.{name}_proj.bias": torch.zeros(16 if name == "q" else 8) for name in biased}
    write_checkpoint(tmp_path, {**qwen3_tensors(), **biases}, qwen3_config())
    assert f"'{ATTENTION}.qkv_proj.bias' needs '{ATTENTION}." in expect_refused(tmp_path, QKV)


@pytest.mark.parametrize("name", ["q_proj.weight_scale_inv", "k_proj.lora_A.weight", "v_proj.inner.weight"])
def test_a_tensor_below_a_projection_has_no_place(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, {**qwen3_tensors(), f"{ATTENTION}.{name}": torch.ones(1)}, qwen3_config())
    assert f"layout 'qkv_proj' of '{ATTENTION}' has no place for '{ATTENTION}.{name}'" in expect_refused(tmp_path, QKV)


@pytest.mark.parametrize("name", ["sinks", "rotary_emb.inv_freq", "q_proj_norm.weight", "g_proj.weight", "o_proj.bias"])
def test_a_tensor_beside_the_projections_passes_through(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, {**qwen3_tensors(), f"{ATTENTION}.{name}": torch.ones(1)}, qwen3_config())
    step = plan(tmp_path, QKV).by_target()[f"{ATTENTION}.{name}"]
    assert (step.op, step.entry) == ("copy", None)


def test_projections_of_different_inputs_do_not_join(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**qwen3_tensors(), f"{ATTENTION}.k_proj.weight": torch.zeros(8, 4)}, qwen3_config())
    assert f"'{ATTENTION}.qkv_proj.weight' cannot be made of" in expect_refused(tmp_path, QKV)


def packed_tensors(*names: str) -> dict[str, torch.Tensor]:
    """`qwen3_tensors` with groups stored joined, as Phi-3 has them."""
    groups = {
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    }
    tensors = qwen3_tensors()
    for layer in range(2):
        for name in names:
            parts = [tensors.pop(f"model.layers.{layer}.{part}.weight") for part in groups[name]]
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.cat(parts)
    return tensors


def test_gate_and_up_that_are_stored_joined_pass_through(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, packed_tensors("mlp.gate_up_proj"), qwen3_config())
    made = plan(tmp_path)
    step = made.by_target()[PACKED]
    assert (step.op, step.entry, step.shape, [part.source for part in step.parts]) == ("rename", 0, (24, 8), [PACKED])
    assert made.bytes_transformed == 0


@pytest.mark.parametrize("both", [(GATE,), (UP,), (GATE, UP)])
def test_a_group_that_is_stored_both_ways_is_refused(tmp_path: Path, both: tuple[str, ...]) -> None:
    tensors = {**packed_tensors("mlp.gate_up_proj"), **{name: qwen3_tensors()[name] for name in both}}
    write_checkpoint(tmp_path, tensors, qwen3_config())
    text = expect_refused(tmp_path)
    assert PACKED in text
    assert len(both) == 2 or f"needs {({GATE, UP} - set(both)).pop()!r}" in text


def test_q_k_and_v_that_are_stored_joined_are_left_to_the_model(tmp_path: Path) -> None:
    """Their order is the model's own: Phi-3 has q, k, v, CodeGen has q, v, k by shards."""
    write_checkpoint(tmp_path, packed_tensors("self_attn.qkv_proj"), qwen3_config())
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, QKV)
    assert caught.value.where == "r.yaml:5"
    assert "is stored packed, in an order of its model's own, which layout 'qkv_proj' does not take" in str(
        caught.value
    )
    assert all(step.op in ("copy", "rename") for step in plan(tmp_path, NORM).steps)
