"""What stands in the directory: damage, stale files, edits and code are refused before they can do harm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)

from kconvert.errors import CheckpointError, KconvertError, LoadError, ManifestError, TrustError
from kconvert.manifest import Manifest, PartRecord, PatchRecord, TensorRecord
from kconvert.runtime import load_converted
from kconvert.runtime.checks import check_loaded
from kconvert.runtime.modelclass import load_config
from kconvert.transforms import whole
from tests.checkpoint.test_checkpoint_header import MALFORMED
from tests.runtime.pairs import IDS, Pair, edit_config, edit_manifest, logits
from tests.support import bake_recipe, check_refused, convert, save_tiny, tiny_config, write_recipe

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.kconvert.safetensors"
INDEX = "model.safetensors.index.kconvert.json"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def rewrite_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


@pytest.fixture
def mine(qwen3: Pair, tmp_path: Path) -> Pair:
    """A converted directory to write into."""
    return qwen3.copy(tmp_path / "mine")


# --- weights against the manifest -------------------------------------------------------------------


@pytest.mark.parametrize("name", [GATE_UP, O_PROJ, "model.norm.weight"])
def test_a_tensor_missing_from_the_file(mine: Pair, name: str) -> None:
    rewrite_weights(mine.converted, without(name))
    with pytest.raises(ManifestError, match=f"{name}.*absent"):
        mine.load()


@pytest.mark.parametrize("name", [GATE_UP, O_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_tensor_missing_from_file_and_manifest(mine: Pair, name: str) -> None:
    """transformers would log it and go on with random values."""
    rewrite_weights(mine.converted, without(name))
    edit_manifest(
        mine.converted, lambda old: replace(old, tensors=tuple(item for item in old.tensors if item.target != name))
    )
    with pytest.raises((LoadError, ManifestError), match=name):
        mine.load()


def test_a_tensor_too_many_in_the_file(mine: Pair) -> None:
    rewrite_weights(mine.converted, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    with pytest.raises(ManifestError, match=r"model\.extra"):
        mine.load()


def test_a_tensor_too_many_in_file_and_manifest(mine: Pair) -> None:
    rewrite_weights(mine.converted, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))

    def add(old: Manifest) -> Manifest:
        record = next(item for item in old.tensors if item.target == O_PROJ)
        origin = replace(record.origins[0], file_name="model.extra", shape=(1,), pieces=((0, 0),))
        part = PartRecord("model.extra", (1,), ((0, 0),), (origin,))
        return replace(old, tensors=(*old.tensors, replace(record, target="model.extra", shape=(1,), parts=(part,))))

    edit_manifest(mine.converted, add)
    with pytest.raises(LoadError, match=r"no place for 1 tensors, e\.g\. model\.extra"):
        mine.load()
    edit_manifest(mine.converted, lambda old: replace(old, carried=("model.extra",)))
    assert torch.equal(logits(mine.load(kernels="reference")), logits(mine.stock()))


def test_a_carried_tensor_that_the_model_has_now(mine: Pair) -> None:
    edit_manifest(mine.converted, lambda old: replace(old, carried=(O_PROJ,)))
    with pytest.raises(LoadError, match="carried along"):
        mine.load()


def test_another_shape_in_the_file(mine: Pair) -> None:
    rewrite_weights(mine.converted, lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ].T.contiguous()}))
    with pytest.raises(ManifestError, match="o_proj"):
        mine.load()


def test_a_damaged_file(mine: Pair) -> None:
    path = mine.converted / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ManifestError, match="cannot be read"):
        mine.load()


def test_no_weights(mine: Pair) -> None:
    (mine.converted / WEIGHTS).unlink()
    with pytest.raises(ManifestError, match="no converted weights"):
        mine.load()


def test_a_missing_shard(sharded: Pair, tmp_path: Path) -> None:
    mine = sharded.copy(tmp_path / "mine")
    next(iter(mine.converted.glob("model.kconvert-00002-*"))).unlink()
    with pytest.raises(ManifestError, match="00002"):
        mine.load()


def test_a_stale_single_file_beside_shards(sharded: Pair, qwen3: Pair, tmp_path: Path) -> None:
    """transformers would take the single file."""
    mine = sharded.copy(tmp_path / "mine")
    shutil.copy(qwen3.converted / WEIGHTS, mine.converted)
    with pytest.raises(ManifestError, match="two conversions"):
        mine.load()


def test_a_stock_file_named_by_the_config_is_not_loaded(mine: Pair) -> None:
    """`transformers_weights` wins over the variant in transformers."""
    other = {name: torch.zeros_like(value) for name, value in load_file(mine.converted / WEIGHTS).items()}
    save_file(other, mine.converted / "other.safetensors", metadata={"format": "pt"})
    edit_config(mine.converted, transformers_weights="other.safetensors")
    with pytest.warns(UserWarning, match="config.json was changed"):
        model = mine.load(kernels="reference")
    assert torch.equal(logits(model), logits(mine.stock()))


def test_plain_from_pretrained_stops(pair: Pair, sharded: Pair) -> None:
    """A20."""
    for directory in (pair.converted, sharded.converted):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(directory)


def test_a_directory_that_was_never_converted(qwen3: Pair, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="kconvert apply"):
        load_converted(qwen3.source)
    with pytest.raises(KconvertError):
        load_converted(tmp_path / "absent")


# --- hostile, stale and linked files ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/abs/x.safetensors", "a/../../evil.safetensors", "..\\x.safetensors", "x\0.safetensors", "", ".",
     7, None, ["x.safetensors"], "x.bin", "sub"],
)  # fmt: skip
def test_a_file_name_of_the_index(sharded: Pair, tmp_path: Path, name: object) -> None:
    """S1: transformers opens what an index names.  The file is there where it can be, with the right tensors."""
    mine = sharded.copy(tmp_path / "mine")
    value = json.loads((mine.converted / INDEX).read_text())
    last = max(value["weight_map"].values())
    shutil.copy(mine.converted / last, tmp_path / "evil.safetensors")
    value["weight_map"] = {key: name if file == last else file for key, file in value["weight_map"].items()}
    (mine.converted / INDEX).write_text(json.dumps(value))
    with pytest.raises(ManifestError) as caught:
        mine.load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_header(mine: Pair, case: str) -> None:
    """S3."""
    (mine.converted / WEIGHTS).write_bytes(MALFORMED[case])
    with pytest.raises(ManifestError) as caught:
        mine.load()
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_pickles_are_never_opened(mine: Pair, tmp_path: Path) -> None:
    """S4: `pytorch_model.kconvert.bin` is what transformers takes for this variant where there are no safetensors."""
    marker, shard = tmp_path / "marker", "pytorch_model.kconvert-00001-of-00001.bin"
    for name in ("pytorch_model.bin", "pytorch_model.kconvert.bin", shard, "model.kconvert.pt"):
        (mine.converted / name).write_text(f"cposix\nsystem\n(S'touch {marker}'\ntR.")
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}})
    (mine.converted / "pytorch_model.bin.index.kconvert.json").write_text(index)
    assert torch.equal(logits(mine.load(kernels="reference")), logits(mine.stock()))
    (mine.converted / WEIGHTS).unlink()
    with pytest.raises(ManifestError, match="no converted weights"):
        mine.load()
    (mine.converted / INDEX).write_text(index)
    with pytest.raises(ManifestError, match="the manifest has"):
        mine.load()
    assert not marker.exists()


def test_a_tensor_in_two_shards(sharded: Pair, tmp_path: Path) -> None:
    """A8: with other values in the second; which of them counts is not for the order of reading to say."""
    mine = sharded.copy(tmp_path / "mine")
    first, second = sorted(mine.converted.glob("*.safetensors"))[:2]
    name, tensor = min(load_file(first).items())
    save_file({**load_file(second), name: torch.zeros_like(tensor)}, second, metadata={"format": "pt"})
    with pytest.raises(ManifestError, match=f"tensor '{name}' is in two files"):
        mine.load()


def test_shards_of_another_run_are_not_read(sharded: Pair, tmp_path: Path) -> None:
    """A7: under names that the index does not have."""
    mine = sharded.copy(tmp_path / "mine")
    for number, path in enumerate(sorted(mine.converted.glob("*.safetensors")), start=1):
        stale = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
        name = f"model.kconvert-{number:05d}-of-00099.safetensors"
        save_file(stale, mine.converted / name, metadata={"format": "pt"})
    assert torch.equal(logits(mine.load(kernels="reference")), logits(mine.stock()))


def test_a_directory_in_a_hub_cache(sharded: Pair, tmp_path: Path) -> None:
    """S2: every file is a link to a blob, which has no extension."""
    repo = tmp_path / "models--me--tiny"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.converted.iterdir())):
        shutil.copy(path, repo / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (tmp_path / "door").symlink_to(snapshot)
    expected = logits(sharded.stock())
    for directory in (snapshot, tmp_path / "door"):
        assert torch.equal(logits(load_converted(directory, kernels="reference")), expected)
    (shard,) = snapshot.glob("model.kconvert-00002-*")
    shard.resolve().unlink()
    with pytest.raises(ManifestError, match="00002"):
        load_converted(snapshot)


# --- the manifest against this version --------------------------------------------------------------


def edit_patch(directory: Path, class_name: str, **values: Any) -> None:
    def change(old: Manifest) -> Manifest:
        def each(patch: PatchRecord) -> PatchRecord:
            return replace(patch, **values) if patch.classes[0] == class_name else patch

        patches = tuple(each(patch) for patch in old.patches)
        assert patches != old.patches
        return replace(old, patches=patches)

    edit_manifest(directory, change)


def edit_tensor(directory: Path, name: str, change: Callable[[TensorRecord], TensorRecord]) -> None:
    edit_manifest(
        directory,
        lambda old: replace(old, tensors=tuple(change(item) if item.target == name else item for item in old.tensors)),
    )


def test_an_edited_manifest(mine: Pair) -> None:
    path = mine.converted / "kconvert_manifest.json"
    path.write_text(path.read_text().replace('"recipe_name": "qwen3"', '"recipe_name": "qwen4"'))
    with pytest.raises(ManifestError, match="digest"):
        mine.load()


@pytest.mark.parametrize("listed", [False, True])
def test_up_before_gate(mine: Pair, listed: bool) -> None:
    """A3: the order of the parts is that of the layout, whatever the manifest says."""

    def change(old: TensorRecord) -> TensorRecord:
        return replace(old, parts=tuple(reversed(old.parts))) if listed else swapped(old)

    edit_tensor(mine.converted, GATE_UP, change)
    with pytest.raises(ManifestError, match=r"parts of 'model\.layers\.0\.mlp\.gate_up_proj\.weight'.* not those of"):
        mine.load()


def swapped(old: TensorRecord) -> TensorRecord:
    """The two parts of a joined tensor in the places of each other."""
    one, two = old.parts
    return replace(old, parts=(replace(one, pieces=two.pieces), replace(two, pieces=one.pieces)))


def test_another_order_of_elements(mine: Pair) -> None:
    """A projection stored column by column is not what the layout takes."""

    def change(old: TensorRecord) -> TensorRecord:
        rows, columns = old.shape
        return replace(old, parts=(replace(old.parts[0], pieces=((0, 0, rows, 1, columns, columns, rows, 1),)),))

    edit_tensor(mine.converted, "model.layers.0.mlp.down_proj.weight", change)
    with pytest.raises(ManifestError, match="not those of layout 'gated_mlp'"):
        mine.load()


def test_another_version_of_the_layout(mine: Pair) -> None:
    layout = next(patch.layout for patch in _manifest(mine).patches if patch.classes == ("Qwen3MLP",))
    edit_patch(mine.converted, "Qwen3MLP", layout=replace(layout, version=layout.version + 1))
    with pytest.raises(ManifestError, match="version 2, this kconvert has 1"):
        mine.load()


def test_an_unknown_layout(mine: Pair) -> None:
    layout = next(patch.layout for patch in _manifest(mine).patches if patch.classes == ("Qwen3MLP",))
    edit_patch(mine.converted, "Qwen3MLP", layout=replace(layout, name="os"))
    with pytest.raises(ManifestError, match="layout 'os', which is not installed"):
        mine.load()


@pytest.mark.parametrize("facts", [{"offset": 1.0, "cast_first": True}, {"offset": 0.0, "cast_first": False}])
def test_other_facts(mine: Pair, facts: dict[str, Any]) -> None:
    """A13, A15: a norm that computes something else than at conversion."""
    edit_patch(mine.converted, "Qwen3RMSNorm", facts={"Qwen3RMSNorm": facts})
    with pytest.raises(ManifestError, match=r"'offset': 0\.0.*at conversion it was"):
        mine.load()


def test_facts_of_a_fused_norm(fused: Pair, tmp_path: Path) -> None:
    mine = fused.copy(tmp_path / "mine")
    patch = next(patch for patch in _manifest(mine).patches if patch.kind == "fuse")
    assert patch.facts == {"Qwen3RMSNorm": {"offset": 0.0, "cast_first": True}}

    def change(old: Manifest) -> Manifest:
        changed = replace(patch, facts={"Qwen3RMSNorm": {"offset": 1.0, "cast_first": True}})
        return replace(old, patches=tuple(changed if each == patch else each for each in old.patches))

    edit_manifest(mine.converted, change)
    with pytest.raises(ManifestError, match="Qwen3RMSNorm computes"):
        mine.load()


def test_a_class_or_module_that_the_model_does_not_have(mine: Pair, tmp_path: Path, qwen3: Pair) -> None:
    edit_patch(mine.converted, "Qwen3MLP", classes=("Qwen3MoeMLP",))
    with pytest.raises(ManifestError, match="is a Qwen3MLP, the manifest says Qwen3MoeMLP"):
        mine.load()
    other = qwen3.copy(tmp_path / "other")
    edit_config(other.converted, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.warns(UserWarning, match="changed"), pytest.raises(ManifestError, match=r"no module 'model\.layers\.1"):
        other.load()


def _manifest(pair: Pair) -> Manifest:
    from kconvert.manifest import load_manifest

    return load_manifest(pair.converted)


def test_a_module_that_is_listed_twice(mine: Pair) -> None:
    patch = next(patch for patch in _manifest(mine).patches if patch.classes == ("Qwen3MLP",))
    edit_patch(mine.converted, "Qwen3MLP", modules=(*patch.modules, patch.modules[0]))
    with pytest.raises(ManifestError, match="a module is patched twice"):
        mine.load()


def test_a_module_of_two_patches(mine: Pair) -> None:
    edit_manifest(mine.converted, lambda old: replace(old, patches=(*old.patches, old.patches[0])))
    with pytest.raises(ManifestError, match="a module is patched twice"):
        mine.load()


@pytest.mark.parametrize(
    "values", [{"classes": ()}, {"kernels": ()}, {"classes": (), "modules": ((),)}, {"kind": "swap"}], ids=str
)
def test_a_patch_that_lacks_what_it_needs(mine: Pair, values: dict[str, Any]) -> None:
    edit_patch(mine.converted, "Qwen3MLP", **values)
    with pytest.raises(ManifestError, match="is malformed"):
        mine.load()


def resized(old: TensorRecord, rows: Sequence[int]) -> TensorRecord:
    """The parts of a joined tensor with other numbers of rows, all else in order."""
    columns, start, parts = old.shape[1], 0, []
    for part, count in zip(old.parts, rows, strict=True):
        (whole_piece,) = {piece.numbers() for piece in whole(part.source, (count, columns)).pieces}
        origin = replace(part.origins[0], shape=(count, columns), pieces=(whole_piece,))
        piece = (0, start * columns, *whole_piece[2:])
        parts.append(PartRecord(part.source, (count, columns), (piece,), (origin,)))
        start += count
    return replace(old, parts=tuple(parts))


@pytest.mark.parametrize("rows", [(40, 56), (56, 40), (95, 1)])
def test_parts_of_other_sizes_that_add_up(mine: Pair, rows: tuple[int, int]) -> None:
    """The packed weight would load, and stock names would be given the wrong rows."""
    edit_tensor(mine.converted, GATE_UP, lambda old: resized(old, rows))
    with pytest.raises(
        ManifestError, match=rf"gate_proj\.weight' is \[48, 32\] in the model and \[{rows[0]}, 32\] in the manifest"
    ):
        mine.load()


def test_a_part_of_no_rows(mine: Pair) -> None:
    edit_tensor(mine.converted, GATE_UP, lambda old: resized(old, (0, 96)))
    with pytest.raises(ManifestError, match=r"gate_proj\.weight' is \[48, 32\] in the model and \[0, 32\]"):
        mine.load()


def test_parts_that_do_not_add_up(mine: Pair) -> None:
    edit_tensor(mine.converted, GATE_UP, lambda old: resized(old, (48, 47)))
    with pytest.raises(ManifestError, match="do not add up"):
        mine.load()


# --- ties -------------------------------------------------------------------------------------------


def test_a_tie_that_is_broken_while_loading(tied: Pair) -> None:
    model, manifest = tied.load(), _manifest(tied)
    check_loaded(model, {}, manifest)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(
        LoadError, match=r"'lm_head\.weight' is tied to 'model\.embed_tokens\.weight', but they are two"
    ):
        check_loaded(model, {}, manifest)


def test_two_tensors_that_are_not_tied(qwen3: Pair) -> None:
    check_loaded(qwen3.load(), {}, _manifest(qwen3))


# --- config.json and code ---------------------------------------------------------------------------


def test_an_edited_config_is_warned_of_and_used(mine: Pair) -> None:
    edit_config(mine.converted, rms_norm_eps=1e-2)
    with pytest.warns(UserWarning, match="config.json was changed after the conversion"):
        model = mine.load()
    assert model.model.norm.variance_epsilon == 1e-2
    torch.testing.assert_close(logits(model), logits(mine.stock(rms_norm_eps=1e-2)), rtol=0, atol=1e-5)


FOREIGN_ATTENTION = ["org/repo", "flash_attention_2", "flash_attention_3", "no_such"]


@pytest.mark.parametrize("attention", FOREIGN_ATTENTION)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_code_named_by_the_config(mine: Pair, key: str, attention: str) -> None:
    """S5: a data file may not fetch code; transformers takes flash attention from the Hub where it is not installed."""
    edit_config(mine.converted, **{key: attention})
    with pytest.warns(UserWarning, match="changed"), pytest.raises(TrustError, match=attention):
        mine.load()


@pytest.mark.parametrize("attention", FOREIGN_ATTENTION)
def test_attention_code_named_by_the_source(qwen3: Pair, tmp_path: Path, attention: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(qwen3.source, source)
    edit_config(source, attn_implementation=attention)
    check_refused(TrustError, 8, [attention, "attn_implementation="], "qwen3", source, tmp_path / "out")


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_attention_code_named_by_a_part_of_the_config(tmp_path: Path, part: str) -> None:
    """S5: transformers hands the entry of a part down to the config of that part."""
    source, recipe = save_tiny(tmp_path / "source", "gemma3"), bake_recipe(tmp_path, "gemma3")
    output = convert(recipe, source, tmp_path / "converted").output
    for directory in (source, output):
        value = json.loads((directory / "config.json").read_text())
        value["attn_implementation"] = {"": "eager", part: "org/repo"}
        (directory / "config.json").write_text(json.dumps(value))
    check_refused(TrustError, 8, ["org/repo"], recipe, source, tmp_path / "out")
    with pytest.warns(UserWarning, match="changed"), pytest.raises(TrustError, match="org/repo"):
        load_converted(output)


def test_attention_code_named_by_a_part_of_a_part(tmp_path: Path) -> None:
    config = json.loads(Qwen2_5OmniConfig().to_json_string(use_diff=False))
    config["attn_implementation"] = {"": "eager", "thinker_config": {"": "eager", "text_config": "org/repo"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrustError, match="org/repo"):
        load_config(tmp_path, Qwen2_5OmniForConditionalGeneration)
    chosen = load_config(tmp_path, Qwen2_5OmniForConditionalGeneration, attention="sdpa")
    assert chosen.thinker_config.text_config._attn_implementation is None


@pytest.mark.parametrize("experts", ["sonicmoe", "deepgemm", "org/repo"])
def test_experts_code_named_by_the_config(tmp_path: Path, experts: str) -> None:
    """S5: on a GPU transformers fetches these from the Hub, as it does flash attention."""
    output = convert("qwen3-moe", save_tiny(tmp_path / "source", "qwen3_moe"), tmp_path / "out").output
    edit_config(output, experts_implementation=experts)
    with pytest.warns(UserWarning, match="changed"), pytest.raises(TrustError, match=experts) as caught:
        load_converted(output)
    assert "experts_implementation=" in str(caught.value)
    with pytest.warns(UserWarning, match="changed"):
        model = load_converted(output, experts_implementation="eager", kernels="reference")
    assert model.config._experts_implementation == "eager"


LOADS = """
import sys
from kconvert import load_converted
from kconvert.errors import KconvertError
try:
    load_converted(sys.argv[1])
except KconvertError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "kconvert_manifest.json"])
def test_a_pipe(mine: Pair, name: str) -> None:
    """S3, S8: whoever opens it waits for ever."""
    (mine.converted / name).unlink()
    os.mkfifo(mine.converted / name)
    command = [sys.executable, "-c", LOADS, str(mine.converted)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.startswith("refused:"), done.stderr
    assert "not a regular file" in done.stdout


@pytest.mark.parametrize("metadata", ["absent", None, {}])
def test_an_index_without_metadata(qwen3_sharded_dir: Path, tmp_path: Path, metadata: Any) -> None:
    """B5: transformers reads it, so of one that lacks it a line says so."""
    output = convert("qwen3", qwen3_sharded_dir, tmp_path / "out").output
    value = json.loads((output / INDEX).read_text())
    del value["metadata"]
    if metadata != "absent":
        value["metadata"] = metadata
    (output / INDEX).write_text(json.dumps(value))
    if metadata == {}:
        load_converted(output)
        return
    with pytest.raises(ManifestError, match="metadata"):
        load_converted(output)


@pytest.mark.parametrize("attention", FOREIGN_ATTENTION)
@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_attention_that_the_caller_chooses(mine: Pair, attention: str, own: str) -> None:
    """Then config.json has no say."""
    edit_config(mine.converted, attn_implementation=attention)
    with pytest.warns(UserWarning, match="changed"):
        model = mine.load(attn_implementation=own, kernels="reference")
    assert model.config._attn_implementation == own
    assert torch.equal(logits(model), logits(mine.stock(attn_implementation=own)))


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_own_attention_named_by_the_config(mine: Pair, own: str) -> None:
    edit_config(mine.converted, attn_implementation=own)
    with pytest.warns(UserWarning, match="changed"):
        model = mine.load(kernels="reference")
    assert model.config._attn_implementation == own


def test_an_adapter_put_beside_the_weights(mine: Pair) -> None:
    """`from_pretrained` would follow it to another base model."""
    (mine.converted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/other"}))
    with pytest.raises(ManifestError, match=r"adapter_config\.json"):
        mine.load()


def test_model_code_needs_trust(mine: Pair) -> None:
    marker = mine.converted / "was_run"
    (mine.converted / "modeling_mine.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nfrom transformers import Qwen3ForCausalLM\n"
        "class MineForCausalLM(Qwen3ForCausalLM):\n    pass\n"
    )
    edit_config(
        mine.converted,
        architectures=["MineForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
    )
    with pytest.warns(UserWarning, match="changed"), pytest.raises(TrustError, match="trust_remote_code=True"):
        mine.load()
    assert not marker.exists()
    with pytest.warns(UserWarning, match="changed"):
        model = mine.load(trust_remote_code=True, kernels="reference")
    assert marker.exists()
    assert type(model).__name__ == "MineForCausalLM"
    assert torch.equal(logits(model), logits(mine.stock()))


def test_code_for_a_class_that_transformers_has_is_not_run(mine: Pair) -> None:
    marker = mine.converted / "was_run"
    (mine.converted / "modeling_mine.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    edit_config(mine.converted, auto_map={"AutoModelForCausalLM": "modeling_mine.Qwen3ForCausalLM"})
    with pytest.warns(UserWarning, match="changed"):
        mine.load()
    assert not marker.exists()


@pytest.mark.parametrize("architectures", [None, [], ["NoSuchModel"], ["PreTrainedModel_"], ["AutoConfig"], "Qwen3"])
def test_an_architecture_that_is_none(mine: Pair, architectures: Any) -> None:
    edit_config(mine.converted, architectures=architectures)
    with pytest.warns(UserWarning, match="changed"), pytest.raises(CheckpointError, match=r"architecture|model class"):
        mine.load()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_a_config_that_is_no_object(mine: Pair, text: str) -> None:
    (mine.converted / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        mine.load()


# --- other heads ------------------------------------------------------------------------------------


def test_sequence_classification(tmp_path: Path) -> None:
    config = tiny_config("llama", num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "source")
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        '  - kernel: [cpu_fused_swiglu]\n    replace: {class: LlamaMLP, path: "model.layers.*.mlp"}\n',
        model_type="llama",
    )
    convert(recipe, tmp_path / "source", tmp_path / "converted")
    model = load_converted(tmp_path / "converted", kernels="reference")
    stock = LlamaForSequenceClassification.from_pretrained(tmp_path / "source")
    assert isinstance(model, LlamaForSequenceClassification)
    found = logits(model, IDS + 1)
    assert found.shape == (2, 3)
    assert torch.equal(found, logits(stock, IDS + 1))
