"""Saving and state dicts: stock names for every other tool, packed ones only under the variant."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from kconvert.errors import KconvertError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import is_own_name
from kconvert.runtime import load_converted
from tests.runtime.conftest import MakePair
from tests.runtime.pairs import IDS, Pair, logits
from tests.support import convert, qwen3_config, qwen3_tensors, read_raw, save_tiny, write_checkpoint


def saved_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, each name once."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def scaled(state: dict[str, torch.Tensor], factor: float = 0.5) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in state.items()}


def test_a_packed_save_keeps_what_is_carried_along(tmp_path: Path) -> None:
    """Tensors outside the model (MTP layers) are only in the directory that the model came from."""
    extra = {"mtp.fc.weight": torch.randn(3, 5), "draft.scale": torch.tensor(3, dtype=torch.int32)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **extra}, qwen3_config())
    model = load_converted(convert("qwen3", source, tmp_path / "out").output)
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert load_manifest(tmp_path / "packed").carried == ("draft.scale", "mtp.fc.weight")
    found = saved_tensors(tmp_path / "packed")
    assert_same({name: found[name] for name in extra}, extra)
    again = load_converted(tmp_path / "packed")
    assert torch.equal(logits(again, IDS % 10), logits(model, IDS % 10))
    for path in (tmp_path / "out").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UsageError, match="would be lost"):
        model.save_pretrained(tmp_path / "late", variant="kconvert")
    assert not (tmp_path / "late").exists()


# --- save_pretrained --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp", "llama"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_saving_gives_the_source_back(
    make_pair: MakePair, tmp_path: Path, recipe: str, tie: bool, dtype: torch.dtype
) -> None:
    """B23: stock names, equal tensors, and nothing of kconvert."""
    pair = make_pair(recipe, tie=tie, dtype=dtype)
    pair.load().save_pretrained(tmp_path)
    assert_same(saved_tensors(tmp_path), saved_tensors(pair.source))
    assert not [path.name for path in tmp_path.iterdir() if is_own_name(path.name)]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype is dtype
    assert torch.equal(logits(again), logits(pair.stock()))


def test_saving_in_shards(pair: Pair, tmp_path: Path) -> None:
    pair.load().save_pretrained(tmp_path, max_shard_size=5_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    assert_same(saved_tensors(tmp_path), saved_tensors(pair.source))
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(names) == sorted(saved_tensors(pair.source))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(pair.stock()))


def test_saving_a_given_state_dict(pair: Pair, tmp_path: Path) -> None:
    """What Trainer does: the state of the model, perhaps gathered elsewhere."""
    model = pair.load()
    model.save_pretrained(tmp_path, state_dict=scaled(model.state_dict()))
    assert_same(saved_tensors(tmp_path), scaled(saved_tensors(pair.source)))


def test_saving_after_training_holds_the_new_values(pair: Pair, tmp_path: Path) -> None:
    model = pair.load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(tmp_path)
    assert_same(saved_tensors(tmp_path), scaled(saved_tensors(pair.source)))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model), rtol=0, atol=1e-5)


def test_saving_leaves_the_model_as_it_was(pair: Pair, tmp_path: Path) -> None:
    model = pair.load()
    before, names = logits(model), list(model.state_dict())
    model.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("max_shard_size", ["1GB", 5_000])
def test_saving_packed(pair: Pair, tmp_path: Path, max_shard_size: int | str) -> None:
    model = pair.load(kernels="reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
    model.save_pretrained(tmp_path, variant="kconvert", max_shard_size=max_shard_size)
    assert not [path.name for path in tmp_path.iterdir() if path.name in ("model.safetensors.index.json",)]
    assert [path.name for path in tmp_path.glob("*.safetensors") if not path.name.startswith("model.kconvert")] == []
    expected = scaled(saved_tensors(pair.converted), 0.75)
    assert_same(saved_tensors(tmp_path), expected)
    assert f"{pair.mlp(0)}.gate_up_proj.weight" in expected
    manifest = load_manifest(tmp_path)
    assert sorted(manifest.weight_files) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert manifest.recipe_text == load_manifest(pair.converted).recipe_text
    again = load_converted(tmp_path, kernels="reference")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "stock")
    assert_same(saved_tensors(tmp_path / "stock"), scaled(saved_tensors(pair.source), 0.75))


def test_saving_packed_twice_leaves_one_form(qwen3: Pair, tmp_path: Path) -> None:
    model = qwen3.load()
    for size in (5_000, "1GB", 5_000):
        model.save_pretrained(tmp_path, variant="kconvert", max_shard_size=size)
        single = (tmp_path / "model.kconvert.safetensors").exists()
        assert single == (size == "1GB")
        assert (tmp_path / "model.safetensors.index.kconvert.json").exists() != single
        assert torch.equal(logits(load_converted(tmp_path)), logits(model))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_saving_packed_beside_stock_weights(qwen3: Pair, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        qwen3.load().save_pretrained(tmp_path, variant="kconvert")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"mine"


def test_saving_packed_in_another_dtype(qwen3: Pair, tmp_path: Path) -> None:
    model = qwen3.load(dtype=torch.bfloat16, kernels="reference")
    model.save_pretrained(tmp_path, variant="kconvert")
    assert {record.dtype for record in load_manifest(tmp_path).tensors} == {"BF16"}
    again = load_converted(tmp_path, kernels="reference")
    assert again.dtype is torch.bfloat16
    assert torch.equal(logits(again), logits(model))


def test_saving_packed_after_resizing(tied: Pair, tmp_path: Path) -> None:
    model = tied.load(kernels="reference")
    model.resize_token_embeddings(80, mean_resizing=False)
    model.save_pretrained(tmp_path, variant="kconvert")
    again = load_converted(tmp_path, kernels="reference")
    assert again.model.embed_tokens.weight.shape == (80, 32)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_saving_packed_over_the_directory_it_came_from(qwen3: Pair, tmp_path: Path) -> None:
    mine = qwen3.copy(tmp_path / "mine")
    model = mine.load(kernels="reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
    model.save_pretrained(mine.converted, variant="kconvert")
    assert_same(saved_tensors(mine.converted), scaled(saved_tensors(qwen3.converted), 0.75))
    assert torch.equal(logits(mine.load(kernels="reference")), logits(model))


# --- load_state_dict --------------------------------------------------------------------------------


def test_loading_stock_names(pair: Pair) -> None:
    model, stock = pair.load(kernels="reference"), pair.stock()
    state = scaled(stock.state_dict())
    result = model.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    stock.load_state_dict(state)
    assert torch.equal(logits(model), logits(stock))
    assert "model.layers.0.mlp.gate_proj.weight" in state  # the caller's mapping is left alone


def test_loading_packed_names(pair: Pair) -> None:
    model = pair.load(kernels="reference")
    state = scaled(model.state_dict())
    assert f"{pair.mlp(0)}.gate_up_proj.weight" in state
    model.load_state_dict(state)
    stock = pair.stock()
    stock.load_state_dict(scaled(stock.state_dict()))
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("first", ["gate_proj", "up_proj"])
def test_loading_gate_and_up_in_two_calls(pair: Pair, first: str) -> None:
    """Shards of a Trainer checkpoint come one by one, with strict=False."""
    model, stock = pair.load(kernels="reference"), pair.stock()
    state = scaled(stock.state_dict())
    one = {name: tensor for name, tensor in state.items() if first in name}
    two = {name: tensor for name, tensor in state.items() if name not in one}
    for part in (one, two):
        result = model.load_state_dict(part, strict=False)
        assert result.unexpected_keys == []
    stock.load_state_dict(state)
    assert torch.equal(logits(model), logits(stock))


def test_loading_half_a_group_changes_just_its_rows(pair: Pair) -> None:
    model = pair.load()
    packed = model.get_parameter(f"{pair.mlp(1)}.gate_up_proj.weight")
    before = packed.detach().clone()
    model.load_state_dict({"model.layers.1.mlp.up_proj.weight": torch.full((48, 32), 3.0)}, strict=False)
    assert torch.equal(packed[:48], before[:48])
    assert packed[48:].eq(3.0).all()


def test_what_is_missing_or_unexpected_raises(pair: Pair) -> None:
    model = pair.load()
    state = pair.stock().state_dict()
    lacking = {name: tensor for name, tensor in state.items() if "layers.1.mlp.gate_proj" not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_proj"):
        model.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*model\.extra"):
        model.load_state_dict({**state, "model.extra": torch.zeros(1)})
    swapped = {**state, "model.layers.0.mlp.gate_proj.weight": torch.zeros(47, 32)}
    for strict in (True, False):
        with pytest.raises(UsageError, match="size mismatch"):
            model.load_state_dict(swapped, strict=strict)


# --- Trainer ----------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (IDS[0] + number) % 64
        return {"input_ids": ids, "labels": ids}


def train(model: Any, directory: Path, *, max_steps: int, **kw: Any) -> Any:
    """One optimizer step per batch, a checkpoint after each."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        max_steps=max_steps,
        save_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train(**kw)
    return trainer


def test_training_saving_and_resuming(pair: Pair, tmp_path: Path) -> None:
    """Trainer passes no variant and looks for stock names only."""
    straight = pair.load()
    train(straight, tmp_path / "straight", max_steps=2)
    first = tmp_path / "straight" / "checkpoint-1"
    tensors = saved_tensors(first)
    assert sorted(tensors) == sorted(saved_tensors(pair.source))
    assert not [path.name for path in first.iterdir() if is_own_name(path.name)]

    stock = pair.stock()
    train(stock, tmp_path / "stock", max_steps=2)
    before = logits(pair.load())
    assert (logits(straight) - before).abs().max() > 0.01
    torch.testing.assert_close(logits(straight), logits(stock), rtol=0, atol=1e-3)

    resumed = pair.load()
    train(resumed, tmp_path / "resumed", max_steps=2, resume_from_checkpoint=str(first))
    torch.testing.assert_close(logits(resumed), logits(straight), rtol=0, atol=1e-5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed" / "checkpoint-2")
    torch.testing.assert_close(logits(again), logits(straight), rtol=0, atol=1e-5)


# --- adapters ---------------------------------------------------------------------------------------


def write_adapter(directory: Path, module: str) -> Path:
    directory.mkdir()
    prefix = f"base_model.model.{module}"
    save_file(
        {f"{prefix}.lora_A.weight": torch.zeros(2, 32), f"{prefix}.lora_B.weight": torch.zeros(48, 2)},
        directory / "adapter_model.safetensors",
    )
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "target_modules": [module.rpartition(".")[2]]})
    )
    return directory


@pytest.mark.parametrize(
    "name", ["mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
)
def test_an_adapter_on_packed_projections_is_refused(pair: Pair, tmp_path: Path, name: str) -> None:
    """B12: it would load without its parts and without a word."""
    adapter = write_adapter(tmp_path / "adapter", f"model.layers.0.{name}")
    with pytest.raises(UsageError, match=rf"layers\.0\.{re.escape(name)}.*packed into.*merge the adapter"):
        pair.load().load_adapter(str(adapter))
    with pytest.raises(UsageError, match=re.escape(name)):
        pair.load().load_adapter(adapter)


def test_an_adapter_on_other_projections_passes(pair: Pair, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", "model.layers.0.self_attn.o_proj")
    try:
        pair.load().load_adapter(str(adapter))
    except KconvertError:
        raise
    except ImportError as error:
        assert "peft" in str(error).lower()


def test_an_adapter_that_cannot_be_looked_at_is_refused(qwen3: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no adapter_model\.safetensors"):
        qwen3.load().load_adapter(str(tmp_path))


def test_saving_gives_the_names_of_the_source_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "gemma3")
    files = read_raw(source)
    assert "language_model.model.norm.weight" in files, "these are to be other names than the model's own"
    model = load_converted(convert("gemma3-vision", source, tmp_path / "converted").output)
    copy.deepcopy(model).save_pretrained(tmp_path / "saved")
    assert read_raw(tmp_path / "saved") == files
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    load_converted(tmp_path / "packed").save_pretrained(tmp_path / "again")
    assert read_raw(tmp_path / "again") == files
