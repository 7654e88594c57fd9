"""Baking a mixture of experts: whole groups in numeric order under module names, or a refusal before a byte is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.core_model_loading import dot_natural_key

from kconvert import load_converted
from kconvert.convert import prepare
from kconvert.errors import CheckpointError, ManifestError, RecipeError, UsageError
from kconvert.manifest import Manifest, load_manifest
from kconvert.names import SINGLE_NAME
from kconvert.parity import verify
from kconvert.runtime import checks
from kconvert.runtime.stock_names import StockNames
from tests.support import (
    Kind,
    bake_recipe,
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    save_tiny,
    tiny_model,
    unpacked,
    write_checkpoint,
    write_recipe,
)
from tests.sweep.outcome import aligned

IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11]])
LAYER = "model.layers.1.mlp"
EXPERTS = f"{LAYER}.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
Tensors = dict[str, torch.Tensor]


def expert(number: int, name: str) -> str:
    return f"{EXPERTS}.{number}.{name}_proj.weight"


def logits(model: Any) -> torch.Tensor:
    """With the weights in memory of their own: experts are read from a file here, and joined into fresh memory by stock."""
    with torch.no_grad():
        return aligned(model)(input_ids=IDS).logits  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Source:
    """A stock checkpoint of 12 experts, the first layer dense, and what it is made of."""

    directory: Path
    tensors: Tensors
    config: dict[str, Any]

    def changed(self, folder: Path, change: Callable[[Tensors], None]) -> Path:
        """Another checkpoint in one file, with other tensors."""
        tensors = dict(self.tensors)
        change(tensors)
        return write_checkpoint(folder, tensors, self.config)


def make_source(directory: Path, kind: Kind, size: int | str) -> Source:
    save_tiny(directory, kind, max_shard_size=size)
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors.update(load_file(path))
    return Source(directory, tensors, json.loads((directory / "config.json").read_text()))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A tiny Qwen3-MoE in shards."""
    return make_source(tmp_path_factory.mktemp("moe") / "source", "qwen3_moe", 20_000)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A tiny Qwen2-MoE, with a shared expert and its gate, in one file."""
    return make_source(tmp_path_factory.mktemp("shared") / "source", "qwen2_moe", "1GB")


@pytest.fixture(scope="module")
def baked(moe: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baked")
    return convert(bake_recipe(folder), moe.directory, folder / "out").output


@pytest.fixture(scope="module")
def stacked(moe: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint under module names, as transformers saves it."""
    model: Any = AutoModelForCausalLM.from_pretrained(moe.directory)
    model.save_pretrained(folder := tmp_path_factory.mktemp("stacked"), save_original_format=False)
    return folder


# --- what is written --------------------------------------------------------------------------------


def test_a_group_over_several_files(moe: Source, baked: Path, stacked: Path, tmp_path: Path) -> None:
    """A1: gate and up of one expert lie in two files; the result is that of one file, and of transformers."""
    index = json.loads((moe.directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(index[expert(number, "gate")] != index[expert(number, "up")] for number in range(12))
    assert len({index[name] for name in index if name.startswith(EXPERTS)}) >= 3
    assert read_raw(baked) == read_raw(stacked)
    single = moe.changed(tmp_path / "single", lambda tensors: None)
    assert read_raw(convert(bake_recipe(tmp_path), single, tmp_path / "out").output) == read_raw(baked)


def test_experts_come_in_numeric_order_with_gate_first(moe: Source, tmp_path: Path) -> None:
    """B21, A3, by values that say where they belong."""

    def number(tensors: Tensors) -> None:
        for place in range(12):
            for start, name in ((0, "gate"), (100, "up"), (200, "down")):
                values = tensors[expert(place, name)]
                tensors[expert(place, name)] = torch.full_like(values, start + place)

    output = convert(bake_recipe(tmp_path), moe.changed(tmp_path / "in", number), tmp_path / "out").output
    written = load_file(output / SINGLE_NAME)
    assert written[GATE_UP].shape == (12, 48, 32)
    assert written[DOWN].shape == (12, 32, 24)
    for place in range(12):
        assert written[GATE_UP][place, :24].unique().tolist() == [place]
        assert written[GATE_UP][place, 24:].unique().tolist() == [100 + place]
        assert written[DOWN][place].unique().tolist() == [200 + place]


def test_the_manifest_says_where_every_tensor_of_the_files_went(moe: Source, baked: Path) -> None:
    manifest = load_manifest(baked)
    assert unpacked(manifest, read_raw(baked)) == read_raw(moe.directory)
    records = manifest.tensors_by_target()
    assert (records[GATE_UP].op, records[DOWN].op) == ("stack(0), concatenate(1)", "stack(0)")
    assert [origin.file_name for origin in records[GATE_UP].origins][:4] == [
        expert(number, name) for number in (0, 1) for name in ("gate", "up")
    ]
    assert [part.source for part in records[GATE_UP].parts] == [GATE_UP]
    assert {record.op for name, record in records.items() if name not in (GATE_UP, DOWN)} == {"copy"}
    assert manifest.carried == ()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "olmoe"])
def test_other_types(kind: Kind, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", kind, "1GB")
    output = convert(bake_recipe(tmp_path, kind), source.directory, tmp_path / "out").output
    manifest = load_manifest(output)
    assert unpacked(manifest, read_raw(output)) == read_raw(source.directory)
    stock: Any = AutoModelForCausalLM.from_pretrained(source.directory)
    model = load_converted(output)
    assert {name: raw(tensor) for name, tensor in stock.state_dict().items()} == read_raw(output)
    assert torch.equal(logits(model), logits(stock))
    stacks = {record.op for record in manifest.tensors if record.op != "copy"}
    assert stacks == (set() if kind == "gpt_oss" else {"stack(0)", "stack(0), concatenate(1)"})


@pytest.mark.parametrize(
    ("kind", "count"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"), ("olmoe", "num_experts")]
)
def test_a_list_of_one_expert(kind: Kind, count: str, tmp_path: Path) -> None:
    """Mixtral's `experts.0.w2.weight` has another number behind that of the expert."""
    values: dict[str, Any] = {count: 1, "num_experts_per_tok": 1}
    source = save_tiny(tmp_path / "in", kind, **values)
    output = convert(bake_recipe(tmp_path, kind), source, tmp_path / "out").output
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    assert {name: raw(tensor) for name, tensor in stock.state_dict().items()} == read_raw(output)


def test_a_number_that_is_spelled_in_two_ways(moe: Source, tmp_path: Path) -> None:
    """One of the two would be left out without a word."""
    other = expert(3, "gate").replace(".3.", ".03.")
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update({other: tensors[expert(3, "gate")] + 1}))
    words = [repr(other), repr(expert(3, "gate")), "have the same number"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_a_dense_layer_and_a_router_are_no_experts(moe: Source, baked: Path) -> None:
    """B20, and A12: `mlp.gate` beside `gate_proj`."""
    written = read_raw(baked)
    names = [f"{LAYER}.gate.weight", *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))]
    assert {name: written[name] for name in names} == {name: raw(moe.tensors[name]) for name in names}


def test_whole_segments_only(shared: Source, tmp_path: Path) -> None:
    """A12: router, shared expert and its gate are themselves; a scale is no weight."""
    scales = {f"{expert(number, 'gate')}_scale_inv": torch.full((1,), float(number)) for number in (3, 11)}
    source = shared.changed(tmp_path / "in", lambda tensors: tensors.update(scales))
    output = convert(bake_recipe(tmp_path, "qwen2_moe"), source, tmp_path / "out").output
    written, manifest = read_raw(output), load_manifest(output)
    shared_names = [f"{LAYER}.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
    for name in (f"{LAYER}.gate.weight", f"{LAYER}.shared_expert_gate.weight", *shared_names):
        assert written[name] == raw(shared.tensors[name])
        assert manifest.tensors_by_target()[name].op == "copy"
    assert {name: written[name] for name in scales} == {name: raw(tensor) for name, tensor in scales.items()}
    assert manifest.carried == tuple(sorted(scales))
    stock: Any = AutoModelForCausalLM.from_pretrained(shared.directory)
    assert torch.equal(logits(load_converted(output)), logits(stock))


def test_the_shared_expert_is_packed_by_itself(shared: Source, tmp_path: Path) -> None:
    output = convert("qwen2-moe", shared.directory, tmp_path / "out").output
    written = read_raw(output)
    gate, up = (shared.tensors[f"{LAYER}.shared_expert.{name}_proj.weight"] for name in ("gate", "up"))
    assert written[f"{LAYER}.shared_expert.gate_up_proj.weight"] == raw(torch.cat([gate, up]))
    gates, ups = (torch.stack([shared.tensors[expert(n, name)] for n in range(12)]) for name in ("gate", "up"))
    assert written[GATE_UP] == raw(torch.cat([gates, ups], dim=1))


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ([expert(3, "up")], [f"{GATE_UP!r} needs {expert(3, 'up')!r}, which the checkpoint does not have"]),
        ([expert(0, "gate")], [f"{GATE_UP!r} needs {expert(0, 'gate')!r}"]),
        ([expert(7, "down")], [f"{DOWN!r} needs {expert(7, 'down')!r}"]),
        (
            [expert(11, name) for name in ("gate", "up", "down")],
            ["needs", expert(11, "down"), "which the checkpoint does not have"],
        ),
        ([expert(n, "up") for n in range(12)], [f"{GATE_UP!r} needs tensors that match", "up_proj.weight"]),
        (
            [expert(n, name) for n in range(12) for name in ("gate", "up", "down")],
            ["the model needs", EXPERTS, "which the checkpoint does not give"],
        ),
        ([expert(n, "up") for n in range(5, 12)], [expert(5, "up"), expert(8, "up"), "and 3 more"]),
    ],
    ids=["up of 3", "gate of 0", "down of 7", "the last expert", "up of all", "all experts", "up of seven"],
)
@pytest.mark.parametrize("recipe", ["bake", "qwen3-moe"])
def test_a_group_that_is_not_whole(
    recipe: str, missing: list[str], words: list[str], moe: Source, tmp_path: Path
) -> None:
    """A2: what is missing is named, by the number of experts that the model has."""

    def drop(tensors: Tensors) -> None:
        for name in missing:
            del tensors[name]

    source = moe.changed(tmp_path / "in", drop)
    named = str(bake_recipe(tmp_path)) if recipe == "bake" else recipe
    if recipe != "bake" and "the model needs" in words:
        words = [f"the checkpoint does not have {GATE_UP!r}"]  # the recipe's entry asks for it first
    check_refused(CheckpointError, 4, words, named, source, tmp_path / "out")


def test_one_expert_too_many(moe: Source, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors.update({expert(12, name): tensors[expert(11, name)].clone() for name in ("gate", "up", "down")})

    words = [f"{DOWN!r} has 12 parts in the model, and the checkpoint has {expert(12, 'down')!r} too"]
    source = moe.changed(tmp_path / "in", add)
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_a_gap_in_the_numbers(moe: Source, tmp_path: Path) -> None:
    """Twelve experts, the last of them called 12."""

    def move(tensors: Tensors) -> None:
        tensors.update({expert(12, name): tensors.pop(expert(11, name)) for name in ("gate", "up", "down")})

    source = moe.changed(tmp_path / "in", move)
    words = [f"needs {expert(11, 'down')!r}"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_mixed_dtypes_in_a_group(moe: Source, tmp_path: Path) -> None:
    """B13: torch would promote the whole stack."""
    name = expert(7, "up")
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    words = [f"{GATE_UP!r} would join different dtypes", f"{name} BF16", "and 22 more", "store the group in one dtype"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_a_router_in_another_dtype_keeps_it(moe: Source, tmp_path: Path) -> None:
    name = f"{LAYER}.gate.weight"
    wide = moe.tensors[name].double()
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update({name: wide}))
    written = read_raw(convert(bake_recipe(tmp_path), source, tmp_path / "out").output)
    assert written[name] == raw(wide)


def test_an_expert_of_another_shape(moe: Source, tmp_path: Path) -> None:
    name = expert(3, "up")
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    words = [f"{GATE_UP!r} cannot be made of", "stack(0): shapes [[24, 31], [24, 32]] cannot be stacked"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_experts_one_by_one_and_stacked(moe: Source, tmp_path: Path) -> None:
    both = torch.zeros(12, 48, 32)
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update({GATE_UP: both}))
    words = [repr(GATE_UP), repr(expert(0, "gate")), "are both"]
    check_refused(CheckpointError, 4, words, bake_recipe(tmp_path), source, tmp_path / "out")


def test_its_own_output(moe: Source, baked: Path, tmp_path: Path) -> None:
    """A11."""
    for recipe in (str(bake_recipe(tmp_path)), "qwen3-moe"):
        check_refused(CheckpointError, 4, ["kconvert"], recipe, baked, tmp_path / "out")


def test_without_the_model_check(moe: Source, tmp_path: Path) -> None:
    words = ["transformers renames or joins tensors of model type 'qwen3_moe'", "leave out --no-model-check"]
    for recipe in (str(bake_recipe(tmp_path)), "qwen3-moe"):
        check_refused(CheckpointError, 4, words, recipe, moe.directory, tmp_path / "out", model_check=False)


# --- bake: true where there is nothing to bake, and with patches -------------------------------------------


def test_a_source_that_is_stacked_already(stacked: Path, baked: Path, tmp_path: Path) -> None:
    """B20: it passes through."""
    output = convert(bake_recipe(tmp_path), stacked, tmp_path / "out").output
    manifest = load_manifest(output)
    assert {record.op for record in manifest.tensors} == {"copy"}
    assert read_raw(output) == read_raw(stacked) == read_raw(baked)
    model = load_converted(output)
    assert torch.equal(logits(model), logits(load_converted(baked)))
    model.save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == read_raw(stacked)
    assert read_raw(convert("qwen3-moe", stacked, tmp_path / "packed").output)[GATE_UP] == read_raw(baked)[GATE_UP]


def test_a_type_without_a_mapping(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config())
    for model_check in (True, False):
        name = f"out-{model_check}"
        output = convert(bake_recipe(tmp_path, "qwen3"), source, tmp_path / name, model_check=model_check).output
        assert read_raw(output) == read_raw(source)
        assert {record.op for record in load_manifest(output).tensors} == {"copy"}
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(load_converted(tmp_path / "out-True")(ids).logits, stock(ids).logits)


def test_names_of_the_base_model_become_those_of_the_whole(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in qwen3_tensors().items()}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    output = convert(bake_recipe(tmp_path, "qwen3"), source, tmp_path / "out").output
    assert read_raw(output) == {name: raw(tensor) for name, tensor in qwen3_tensors().items()}


def test_it_may_stand_beside_patches(moe: Source, tmp_path: Path) -> None:
    """Baking is implied, so saying it changes the recipe's text and nothing else."""
    patch = '  - kernel: cpu_fused_qkv\n    replace: {class: Qwen3MoeAttention, path: "model.layers.*.self_attn"}\n'
    plain = write_recipe(tmp_path / "plain.yaml", patch, model_type="qwen3_moe")
    said = tmp_path / "said.yaml"
    said.write_text(plain.read_text().replace("patches:", "bake: true\npatches:"))
    one, two = (convert(path, moe.directory, tmp_path / path.stem).output for path in (plain, said))
    assert read_raw(one) == read_raw(two)
    assert load_manifest(one).tensors == load_manifest(two).tensors
    written = read_raw(one)
    assert written["model.layers.1.self_attn.qkv_proj.weight"] == raw(
        torch.cat([moe.tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    )


def test_the_plan_says_what_is_stacked(moe: Source, tmp_path: Path) -> None:
    plan = prepare(str(bake_recipe(tmp_path)), moe.directory).plan
    step = plan.by_target()[GATE_UP]
    assert (step.op, step.entry, step.is_transformed, len(step.origins)) == ("stack(0), concatenate(1)", None, True, 24)
    assert plan.bytes_transformed == 4 * 12 * 3 * 24 * 32
    assert plan.bytes_copied + plan.bytes_transformed == sum(4 * tensor.numel() for tensor in moe.tensors.values())


# --- what the model has no place for --------------------------------------------------------------------


def extra_layer(tensors: Tensors) -> Tensors:
    """An MTP layer behind the last one that the config counts, with experts of its own."""
    more = {
        name.replace("model.layers.1.", "model.layers.2."): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    return {**more, "model.layers.2.eh_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)}


def test_an_extra_layer_is_carried_under_its_own_names(moe: Source, tmp_path: Path) -> None:
    more = extra_layer(moe.tensors)
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update(more))
    output = convert("qwen3-moe", source, tmp_path / "out").output
    written, manifest = read_raw(output), load_manifest(output)
    assert {name: written[name] for name in more} == {name: raw(tensor) for name, tensor in more.items()}
    assert manifest.carried == tuple(sorted(more))
    model = load_converted(output, kernels="reference")
    stock: Any = AutoModelForCausalLM.from_pretrained(moe.directory)
    assert torch.equal(logits(model), logits(stock))
    assert not model.state_dict().keys() & more.keys()
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == written


def test_carried_tensors_are_named_by_one_set_of_rules(
    moe: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the loader, because a rule may depend on what was seen; a set for each would take seconds."""
    asked: list[list[str]] = []

    class Counted(StockNames):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            asked.append([])

        def reported(self, name: str) -> set[str]:
            asked[-1].append(name)
            return super().reported(name)

    more = extra_layer(moe.tensors)
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update(more))
    output = convert(bake_recipe(tmp_path), source, tmp_path / "out").output
    monkeypatch.setattr(checks, "StockNames", Counted)
    load_converted(output)
    assert asked == [sorted(read_raw(output), key=dot_natural_key)]


def test_nothing_else_is_accepted_at_load(moe: Source, tmp_path: Path) -> None:
    more = extra_layer(moe.tensors)
    source = moe.changed(tmp_path / "in", lambda tensors: tensors.update(more))
    output = convert(bake_recipe(tmp_path), source, tmp_path / "out").output
    tensors = load_file(output / SINGLE_NAME)
    name = "model.layers.2.mlp.experts.12.gate_proj.weight"
    save_file({**tensors, name: torch.zeros(24, 32)}, output / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(ManifestError, match=r"model\.layers\.2\.mlp\.experts\.12\.gate_proj"):
        load_converted(output)
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, output / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(ManifestError, match=r"model\.layers\.2\.eh_proj"):
        load_converted(output)


# --- and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bake", "qwen3-moe"])
def test_saving_gives_the_source_back(recipe: str, moe: Source, stacked: Path, tmp_path: Path) -> None:
    """B23: under the source's names, or under module names where that is asked for."""
    named = str(bake_recipe(tmp_path)) if recipe == "bake" else recipe
    output = convert(named, moe.directory, tmp_path / "out").output
    model = load_converted(output)
    model.save_pretrained(tmp_path / "source")
    assert read_raw(tmp_path / "source") == read_raw(moe.directory)
    model.save_pretrained(tmp_path / "module", save_original_format=False)
    assert read_raw(tmp_path / "module") == read_raw(stacked)
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == read_raw(output)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(logits(again), logits(load_converted(tmp_path / "packed", kernels="reference")))


def test_what_was_trained_since_is_saved(moe: Source, baked: Path, tmp_path: Path) -> None:
    """The values are those of the model now, expert by expert."""
    model = load_converted(baked)
    with torch.no_grad():
        model.get_parameter(GATE_UP)[11, 24:] = 7.0
    model.save_pretrained(tmp_path / "out")
    saved, before = read_raw(tmp_path / "out"), read_raw(moe.directory)
    assert saved[expert(11, "up")] == raw(torch.full((24, 32), 7.0))
    assert {name for name in before if saved[name] != before[name]} == {expert(11, "up")}


def test_stock_names_are_loaded_into_the_stacks(moe: Source, baked: Path) -> None:
    """The model itself has module names, as the stock model does."""
    model, stock = load_converted(baked), tiny_model("qwen3_moe", seed=1)
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("num_calls", [1, 3])
def test_names_of_the_files_are_loaded_into_the_stacks(kind: Kind, num_calls: int, tmp_path: Path) -> None:
    """In shards too, of which one holds half of the experts: so Trainer loads its checkpoints."""
    source = save_tiny(tmp_path / "in", kind, dtype=torch.bfloat16)
    model = load_converted(convert(kind.replace("_", "-"), source, tmp_path / "out").output, kernels="reference")
    state = {name: 2 * tensor for name, tensor in load_file(source / "model.safetensors").items()}
    for start in range(num_calls):
        part = dict(list(state.items())[start::num_calls])
        result = model.load_state_dict(part, strict=num_calls == 1)
        assert result.unexpected_keys == []
        assert len(part) == len(state) // num_calls + (start < len(state) % num_calls)  # the caller's is left alone
    model.save_pretrained(tmp_path / "back")
    assert read_raw(tmp_path / "back") == {name: raw(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("recipe", ["bake", "qwen3-moe"])
def test_trainer_resumes_and_takes_the_best(recipe: str, moe: Source, tmp_path: Path) -> None:
    """Stock keeps the experts that it has, because a checkpoint of Trainer holds them apart."""
    named = str(bake_recipe(tmp_path)) if recipe == "bake" else recipe
    output = convert(named, moe.directory, tmp_path / "out").output
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 60, (8,), generator=generator) for _ in range(8)]
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]

    def train(folder: str, resume: Path | None = None) -> tuple[Any, Any]:
        model = load_converted(output, kernels="reference")
        arguments = TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=4,
            max_steps=4,
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # so that the first half is the best
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return model, trainer

    whole, trainer = train("whole")
    best = Path(str(trainer.state.best_model_checkpoint))
    assert best.name == "checkpoint-2"
    whole.save_pretrained(tmp_path / "best")
    assert read_raw(tmp_path / "best") == read_raw(best)
    train("resumed", best)
    assert read_raw(tmp_path / "resumed" / "checkpoint-4") == read_raw(tmp_path / "whole" / "checkpoint-4")


def test_the_manifest_of_a_baked_model_has_no_patches(baked: Path) -> None:
    manifest: Manifest = load_manifest(baked)
    assert (manifest.patches, manifest.model_checked) == ((), True)
    assert load_converted(baked).kconvert_report.modules == ()


@pytest.fixture
def final_norm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """A Qwen3 whose files hold `final_norm`, for which transformers' mapping is replaced by one that computes."""
    from transformers import conversion_mapping as stock
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne

    stock.get_checkpoint_conversion_mapping("qwen3")  # fills the cache
    cache: Any = stock._checkpoint_conversion_mapping_cache

    def make(name: str) -> Path:
        source = save_tiny(tmp_path / "source", "qwen3")
        tensors = load_file(source / "model.safetensors")
        tensors[f"model.{name}.weight"] = tensors.pop("model.norm.weight")
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        rule = WeightConverter(rf"model\.{name}\.weight", "model.norm.weight", operations=[SubtractOne()])
        monkeypatch.setitem(cache, "qwen3", [rule])
        return source

    return make


def test_an_op_that_computes_runs_on_its_group(final_norm: Callable[[str], Path], tmp_path: Path) -> None:
    source = final_norm("final_norm")
    recipe = bake_recipe(tmp_path, "qwen3")
    (warning,) = prepare(str(recipe), source).warnings
    assert warning == (
        "1 tensor is made by compute(SubtractOne), which has no exact inverse: the sources cannot be given back"
    )
    output = convert(recipe, source, tmp_path / "out").output
    before, after = load_file(source / "model.safetensors"), load_file(output / SINGLE_NAME)
    assert torch.equal(after["model.norm.weight"], before["model.final_norm.weight"] - 1)
    record = load_manifest(output).tensors_by_target()["model.norm.weight"]
    assert (record.exact, [origin.file_name for origin in record.origins]) == (False, ["model.final_norm.weight"])
    model, stock = load_converted(output), AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert torch.equal(model.model.norm.weight, stock.model.norm.weight)
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.model.norm.weight, 2 * stock.model.norm.weight)
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model), logits(stock))
    with pytest.raises(UsageError, match="cannot be given back"):
        model.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert torch.equal(logits(load_converted(tmp_path / "packed")), logits(stock))


def test_what_transformers_would_convert_again_is_refused(final_norm: Callable[[str], Path], tmp_path: Path) -> None:
    source = final_norm("norm")
    with pytest.raises(CheckpointError, match=r"would convert 'model\.norm\.weight' again when it loads it"):
        convert(bake_recipe(tmp_path, "qwen3"), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_computed_cannot_be_packed_too(final_norm: Callable[[str], Path], tmp_path: Path) -> None:
    source = final_norm("final_norm")
    patch = "  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3RMSNorm, path: model.norm}\n"
    recipe = write_recipe(tmp_path / "r.yaml", patch, model_type="qwen3")
    with pytest.raises(RecipeError, match=r"'model\.norm\.weight' is made by compute\(SubtractOne\)"):
        convert(recipe, source, tmp_path / "out")


@pytest.mark.parametrize("is_patched", [False, True])
def test_verify_sees_experts_in_a_wrong_order(moe: Source, tmp_path: Path, *, is_patched: bool) -> None:
    """Outside the patched modules: with the source the logits are compared too, without being asked."""
    norm = "  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3MoeRMSNorm, path: model.norm}\n"
    recipe = "qwen3-moe" if is_patched else write_recipe(tmp_path / "r.yaml", norm, model_type="qwen3_moe")
    output = convert(recipe, moe.directory, tmp_path / "out").output
    levels = {"modules"} if is_patched else {"modules", "logits"}
    assert set(verify(output, source=moe.directory).levels) == levels
    assert not verify(output, source=moe.directory).failures
    assert set(verify(output).levels) == {"modules"}
    for path in output.glob("*.safetensors"):
        tensors = load_file(path)
        if GATE_UP in tensors:
            tensors[GATE_UP] = tensors[GATE_UP].flip(0).contiguous()
            save_file(tensors, path, {"format": "pt"})
    report = verify(output, source=moe.directory)
    assert report.failures
    assert bool(report.levels["modules"].failures()) == is_patched
