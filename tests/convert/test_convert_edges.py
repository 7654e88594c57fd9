"""Common odd shapes of checkpoint directories and of loaded models, each by value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from kconvert import load_converted
from kconvert.errors import CheckpointError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import SINGLE_NAME
from tests.runtime.pairs import logits
from tests.support import (
    LAYER_SHAPES,
    Kind,
    RawTensor,
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    save_tiny,
    write_checkpoint,
    write_recipe,
)

ROOT = Path(__file__).parents[2]
MLP = '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
QKV = '  - kernel: cpu_fused_qkv\n    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}\n'
GATE, UP = "model.layers.{}.mlp.gate_proj.{}", "model.layers.{}.mlp.up_proj.{}"


# --- tensors outside every claim --------------------------------------------------------------------------


def test_an_mtp_layer_and_a_draft_head_in_several_dtypes(tmp_path: Path) -> None:
    """Whole layers beyond the config's, as DeepSeek and EAGLE store them: carried, listed, and in no one's way."""
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]
    layer = {
        f"model.layers.2.{name}": torch.randn(shape).to(dtypes[number % 4])
        for number, (name, shape) in enumerate(LAYER_SHAPES.items())
    }
    extra: dict[str, torch.Tensor | RawTensor] = {
        **layer,
        "model.layers.2.eh_proj.weight": torch.randn(8, 16).bfloat16(),
        "mtp.fc.weight": torch.randn(8, 16).to(torch.float8_e5m2),
        "mtp.fc.weight_scale_inv": torch.tensor(0.5),
        "draft.d2t": torch.arange(10),
        "draft.mask": torch.tensor([True, False]),
        "draft.packed": RawTensor("F4", (2, 8), bytes(range(8))),
    }
    tensors = {**extra, **qwen3_tensors()}
    names = list(tensors)
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(), [names[::3], names[1::3], names[2::3]])
    (source / "draft.bin").write_bytes(b"x")
    (source / "note.txt").write_bytes(b"y")
    output = convert(write_recipe(tmp_path / "r.yaml", MLP + QKV), source, tmp_path / "out").output
    manifest, written = load_manifest(output), read_raw(output)
    assert manifest.carried == tuple(sorted(extra))
    assert [item.name for item in manifest.omitted] == ["draft.bin"]
    assert set(manifest.sidecars) == {"config.json", "note.txt"}
    assert {name: written[name] for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    packed = {
        f"model.layers.{n}.{name}" for n in (0, 1) for name in ("mlp.gate_up_proj.weight", "self_attn.qkv_proj.weight")
    }
    assert written.keys() - tensors.keys() == packed
    copied = {name for name, record in manifest.tensors_by_target().items() if record.patch is None}
    assert copied == written.keys() - packed - {f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)}
    stock = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(logits(load_converted(output, kernels="reference"), ids), logits(stock, ids))


def test_old_llama_frequencies_in_every_layer(tmp_path: Path) -> None:
    """`rotary_emb.inv_freq` lies in an attention module that the recipe takes: carried, and not taken for the model's."""
    saved = save_tiny(tmp_path / "saved", "llama")
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((8,), 3.0 + layer) for layer in (0, 1)}
    tensors = {**load_file(saved / "model.safetensors"), **old}
    source = write_checkpoint(tmp_path / "in", tensors, json.loads((saved / "config.json").read_text()))
    result = convert("llama", source, tmp_path / "out")
    assert "model.layers.0.self_attn" in {path for claim in result.prepared.plan.claims for path in claim.paths}
    assert load_manifest(result.output).carried == tuple(sorted(old))
    written = read_raw(result.output)
    assert {name: written[name] for name in old} == {name: raw(tensor) for name, tensor in old.items()}
    model, stock = load_converted(result.output, kernels="reference"), AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    assert torch.equal(logits(model), logits(stock))
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert {name: tensor for name, tensor in read_raw(tmp_path / "packed").items() if name in old} == {
        name: raw(tensor) for name, tensor in old.items()
    }


@pytest.mark.parametrize("model_check", [True, False])
def test_projections_that_are_packed_on_disk_and_that_no_entry_takes(tmp_path: Path, model_check: bool) -> None:
    """B20: Phi-3's `gate_up_proj` and `qkv_proj` are as they were."""
    source = save_tiny(tmp_path / "in", "phi3")
    norms = '  - kernel: cpu_fused_rmsnorm\n    replace: {class: Phi3RMSNorm, path: "model.layers.*.input_layernorm"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", norms, model_type="phi3")
    if not model_check:
        tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
        write_checkpoint(source, tensors, config)
    output = convert(recipe, source, tmp_path / "out", model_check=model_check).output
    before, written = read_raw(source), read_raw(output)
    assert written == before
    assert {"model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"} <= written.keys()
    assert load_manifest(output).carried == ()
    model = load_converted(output, kernels="reference")
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(source)))


# --- groups that are not whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("patch", "present", "missing", "target"),
    [
        (QKV, ["self_attn.q_proj", "self_attn.v_proj"], "self_attn.k_proj", "self_attn.qkv_proj"),
        (QKV, ["self_attn.k_proj"], "self_attn.q_proj", "self_attn.qkv_proj"),
        (MLP, ["mlp.gate_proj"], "mlp.up_proj", "mlp.gate_up_proj"),
        (MLP, ["mlp.up_proj", "mlp.down_proj"], "mlp.gate_proj", "mlp.gate_up_proj"),
    ],
)
def test_some_biases_of_a_group(
    tmp_path: Path, patch: str, present: list[str], missing: str, target: str, sharded: bool, model_check: bool
) -> None:
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "gate_proj": 12, "up_proj": 12, "down_proj": 8}
    layer = "model.layers.1"
    biases = {f"{layer}.{name}.bias": torch.zeros(rows[name.split(".")[1]]) for name in present}
    tensors = {**biases, **qwen3_tensors()}
    shards = [list(biases), list(qwen3_tensors())] if sharded else None
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(attention_bias="q_proj" in missing), shards)
    words = [f"'{layer}.{target}.bias' needs '{layer}.{missing}.bias'", "which the checkpoint does not have"]
    recipe = write_recipe(tmp_path / "r.yaml", patch)
    error = check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "out", model_check=model_check)
    assert str(error).count("needs") == 1


def test_a_bias_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Whole in the file, and no parameter for it: named, because a layout would drop it."""
    biases = {GATE.format(0, "bias"): torch.zeros(12), UP.format(0, "bias"): torch.zeros(12)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **biases}, qwen3_config())
    words = ["'model.layers.0.mlp.gate_proj.bias' is no tensor of the model"]
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "out")


# --- empty tensors and scalars inside claims --------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "up", "shape"), [((0, 8), (0, 8), (0, 8)), ((12, 0), (12, 0), (24, 0)), ((0, 8), (12, 8), (12, 8)), ((0,), (0,), (0,))]
)  # fmt: skip
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_empty_parts_of_a_group(
    tmp_path: Path, gate: tuple[int, ...], up: tuple[int, ...], shape: tuple[int, ...], dtype: str | None
) -> None:
    """B16."""
    made = {GATE.format(1, "weight"): torch.ones(gate), UP.format(1, "weight"): torch.full(up, 2.0)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **made}, qwen3_config())
    patch = MLP if dtype is None else MLP + f"    dtype: {dtype}\n"
    output = convert(write_recipe(tmp_path / "r.yaml", patch), source, tmp_path / "out", model_check=False).output
    target = "model.layers.1.mlp.gate_up_proj.weight"
    expected = torch.cat(list(made.values())).to(getattr(torch, dtype or "float32"))
    assert read_raw(output)[target] == raw(expected)
    assert expected.shape == shape
    record = load_manifest(output).tensors_by_target()[target]
    assert [part.shape for part in record.parts] == [gate, up]


def test_a_scalar_that_a_rule_renames(tmp_path: Path) -> None:
    made = {"model.layers.0.mlp.down_proj.weight": torch.tensor(2.5)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **made}, qwen3_config())
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    written = read_raw(convert(recipe, source, tmp_path / "out", model_check=False).output)
    assert written["model.layers.0.mlp.down_proj.weight"] == RawTensor("F32", (), raw(torch.tensor(2.5)).data)
    words = ["'model.layers.0.mlp.down_proj.weight' is [] in the checkpoint and [8, 12] in the model"]
    check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "checked")


# --- names and places -------------------------------------------------------------------------------------


def test_names_in_many_scripts(tmp_path: Path) -> None:
    extra = {
        "模型.权重": torch.ones(2),
        "poids.é": torch.ones(3),  # one letter; the next is two
        "poids.e\u0301": torch.ones(4),
        "emoji.🦙": torch.ones(5),
        'quoted."x\\y"': torch.ones(6),
        "line\nbreak": torch.ones(7),
    }
    names = [*extra, *qwen3_tensors()]
    home = tmp_path / "un modèle 模型 🦙"
    source = write_checkpoint(home / "in", {**extra, **qwen3_tensors()}, qwen3_config(), [names[::2], names[1::2]])
    sidecars = {"說明.md": b"a", "élan vital/ключ.json": b"{}", "a'b\"c$(x);.txt": b"b"}
    for name, data in sidecars.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    recipe = write_recipe(home / "recette é.yaml", MLP)
    output = convert(recipe, source, home / "sortie 出力").output
    manifest, written = load_manifest(output), read_raw(output)
    assert manifest.carried == tuple(sorted(extra))
    assert {name: written[name] for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    assert {name: (output / name).read_bytes() for name in sidecars} == sidecars
    assert set(manifest.sidecars) == {*sidecars, "config.json"}
    stock = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(logits(load_converted(output, kernels="reference"), ids), logits(stock, ids))


def test_weights_behind_links_into_another_place(tmp_path: Path) -> None:
    """Links that lead out of the directory are followed for weights; the folder itself is reached through one too."""
    names = list(qwen3_tensors())
    real = write_checkpoint(tmp_path / "real", qwen3_tensors(), qwen3_config(), [names[:9], names[9:]])
    farm = tmp_path / "farm" / "model"
    farm.mkdir(parents=True)
    for path in real.iterdir():
        if path.suffix == ".safetensors":
            (farm / path.name).symlink_to(Path("../../real") / path.name)
        else:
            (farm / path.name).write_bytes(path.read_bytes())
    (tmp_path / "door").symlink_to("farm")
    direct = convert("qwen3", real, tmp_path / "out1").output
    linked = convert("qwen3", tmp_path / "door" / "model", tmp_path / "out2").output
    assert {path.name: path.read_bytes() for path in linked.iterdir()} == {
        path.name: path.read_bytes() for path in direct.iterdir()
    }
    assert [path.name for path in linked.iterdir() if path.is_symlink()] == []
    words = [str(tmp_path / "door" / "model"), "source"]
    with pytest.raises(UsageError) as caught:
        convert("qwen3", farm, tmp_path / "door" / "model")
    assert [word for word in words if word not in str(caught.value)] == []


# argv: recipe, source, output, flags of apply.  Tells what of the source was opened for writing, or changed in another way.
WATCHED = """
import json, os, sys
recipe, source, output, *flags = sys.argv[1:]
CHANGES = {"os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
           "os.truncate", "os.utime", "os.setxattr", "shutil.move", "shutil.rmtree"}
seen, read = [], []
def watch(event, args):
    names = [os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes))]
    inside = [name for name in names if os.path.abspath(name).startswith(source)]
    if not inside:
        return
    if event == "open":
        flags = args[2]
        (seen if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else read).append(inside[0])
    elif event in CHANGES:
        seen.append(f"{event} {inside}")
sys.addaudithook(watch)
from kconvert.cli import main
code = main(["apply", recipe, source, "-o", output, *flags])
print()
print(json.dumps({"code": code, "seen": seen, "read": sorted(set(map(os.path.basename, read)))}))
"""


@pytest.mark.parametrize("flags", [[], ["--no-model-check"]])
def test_a_source_that_cannot_be_written_is_not_touched(tmp_path: Path, flags: list[str]) -> None:
    names = list(qwen3_tensors())
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(), [names[:9], names[9:]])
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("x")
    files = sorted(path for path in source.rglob("*"))
    for path in reversed([source, *files]):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def state() -> list[tuple[Any, ...]]:
        found = [path.lstat() for path in (source, *files)]
        return [(s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_nlink) for s in found]

    before = state()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, "qwen3", str(source), str(tmp_path / "out"), *flags],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["code"], result["seen"]) == (0, [])
        assert {"config.json", "model-00001-of-00002.safetensors", "notes.txt"} <= set(result["read"])
        assert state() == before
        assert sorted(path for path in source.rglob("*")) == files
        made = list((tmp_path / "out").rglob("*"))
        assert {path.stat().st_mode & 0o200 for path in made} == {0o200}, "the output is not read-only"
    finally:
        for path in (source, *files):
            path.chmod(0o755 if path.is_dir() else 0o644)


# --- views and shared storage in a loaded model (B17) -----------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_what_is_loaded_is_contiguous(kind: Kind, tmp_path: Path) -> None:
    """B17: ops of an NPU take no strided views; the experts of gpt-oss are stored transposed."""
    source = save_tiny(tmp_path / "in", kind)
    model = load_converted(convert(kind.replace("_", "-"), source, tmp_path / "out").output)
    assert [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()] == []


def turned(parameter: nn.Parameter) -> nn.Parameter:
    """The same values, not contiguous."""
    return nn.Parameter(parameter.detach().t().contiguous().t())


def transposed_head(model: Any) -> None:
    model.lm_head.weight = turned(model.lm_head.weight)


def transposed_packed(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_up_proj.weight = turned(mlp.gate_up_proj.weight)
    mlp.down_proj.weight = turned(mlp.down_proj.weight)


def one_buffer(model: Any) -> None:
    """All packed weights are rows of one tensor, as an allocator of a framework may lay them out."""
    mlps = [layer.mlp.gate_up_proj for layer in model.model.layers]
    whole = torch.stack([mlp.weight.detach() for mlp in mlps])
    for number, mlp in enumerate(mlps):
        mlp.weight = nn.Parameter(whole[number])


def expanded(model: Any) -> None:
    """One row that stands for all rows."""
    mlp = model.model.layers[0].mlp
    for part in (mlp.gate_up_proj, mlp.down_proj):
        part.weight = nn.Parameter(part.weight.detach()[:1].expand_as(part.weight))


def shared(model: Any) -> None:
    """Two layers with one packed parameter."""
    one, two = (layer.mlp.gate_up_proj for layer in model.model.layers)
    two.weight = one.weight


def overlapping(model: Any) -> None:
    one, two = (layer.mlp.gate_up_proj for layer in model.model.layers)
    rows = one.weight.shape[0]
    whole = torch.cat([one.weight.detach(), two.weight.detach()])
    one.weight, two.weight = nn.Parameter(whole[:rows]), nn.Parameter(whole[rows // 2 : rows // 2 + rows])


def shared_unpacked(model: Any) -> None:
    """Two layers with one parameter that is not packed: stock transformers does not save that either."""
    one, two = (layer.mlp.down_proj for layer in model.model.layers)
    two.weight = one.weight


def head_is_embedding(model: Any) -> None:
    """Tied by hand, and the config does not say so."""
    model.lm_head.weight = model.model.embed_tokens.weight


@pytest.mark.parametrize("change", [transposed_head, transposed_packed, one_buffer, expanded, shared, overlapping])
def test_views_are_saved_in_the_stock_layout(
    converted_qwen3_dir: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    model = load_converted(converted_qwen3_dir, kernels="reference")
    untouched = logits(model)
    change(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(stock), expected)
    assert torch.equal(expected, untouched) is (change in (transposed_head, transposed_packed, one_buffer))


@pytest.mark.parametrize("change", [transposed_head, transposed_packed, one_buffer, expanded])
def test_views_are_saved_packed(converted_qwen3_dir: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    model = load_converted(converted_qwen3_dir, kernels="reference")
    change(model)
    model.save_pretrained(tmp_path / "saved", variant="kconvert")
    again = load_converted(tmp_path / "saved", kernels="reference")
    assert torch.equal(logits(again), logits(model))
    state = model.state_dict()
    assert {name: raw(tensor.contiguous()) for name, tensor in state.items()} == read_raw(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shared, "shared tensors"),
        (overlapping, "shared tensors"),
        (shared_unpacked, "shared tensors"),
        (head_is_embedding, "'lm_head.weight' shares its memory with another tensor"),
    ],
)
def test_shared_memory_that_nothing_declares_is_not_saved_packed(
    converted_qwen3_dir: Path, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    """A file holds no shared memory: refused with the names, and nothing is left."""
    model = load_converted(converted_qwen3_dir, kernels="reference")
    change(model)
    with pytest.raises((RuntimeError, UsageError), match=words):
        model.save_pretrained(tmp_path / "saved", variant="kconvert")
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_is_tied_by_hand_and_by_the_config_is_saved_packed(
    converted_qwen3_dir: Path, tmp_path: Path
) -> None:
    model = load_converted(converted_qwen3_dir, kernels="reference")
    head_is_embedding(model)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "saved", variant="kconvert")
    again = load_converted(tmp_path / "saved", kernels="reference")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_a_tied_embedding_that_is_transposed(tmp_path: Path) -> None:
    """transformers 5.22 refuses to save such a model; whatever it does, ours does, and no weights are left half written."""
    source = save_tiny(tmp_path / "in", "qwen3", tie=True)
    output = convert(write_recipe(tmp_path / "r.yaml", MLP), source, tmp_path / "out").output
    stock = AutoModelForCausalLM.from_pretrained(source)
    for name, model in (("stock", stock), ("saved", load_converted(output, kernels="reference"))):
        model.model.embed_tokens.weight = turned(model.model.embed_tokens.weight)
        model.tie_weights()
        try:
            model.save_pretrained(tmp_path / name)
        except RuntimeError as error:
            (tmp_path / f"{name}.txt").write_text(str(error))
    assert (tmp_path / "stock.txt").exists() == (tmp_path / "saved.txt").exists()
    assert read_raw(tmp_path / "stock") == read_raw(tmp_path / "saved")
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.detach().contiguous())
    model.tie_weights()  # the way out
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    model.save_pretrained(tmp_path / "saved")
    assert read_raw(tmp_path / "packed") == read_raw(output, SINGLE_NAME)
    assert read_raw(tmp_path / "saved") == read_raw(source)
