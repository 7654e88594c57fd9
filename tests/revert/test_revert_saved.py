"""A fine-tuned model, saved packed: names, shapes, dtypes and files of its source again, with the new values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kconvert import load_converted
from kconvert.checkpoint import read_header
from kconvert.convert import PreparedRevert, prepare_revert, revert
from kconvert.errors import VerificationError
from tests.runtime.pairs import edit_manifest, logits
from tests.support import Kind, convert, qwen3_config, qwen3_tensors, save_tiny, write_checkpoint

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
OWN = "the values, and config.json, are those of the model that was saved here"


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def make(directory: Path, kind: Kind = "qwen3", recipe: str = "qwen3", **kw: Any) -> tuple[Path, Path]:
    """A source and its conversion."""
    source = save_tiny(directory / "source", kind, **kw)
    return source, convert(recipe, source, directory / "converted").output


def trained(converted: Path, **kw: Any) -> Any:
    """The model with other values in every parameter."""
    model = load_converted(converted, kernels="reference", **kw)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
    return model


def saved(model: Any, directory: Path, **kw: Any) -> Path:
    model.save_pretrained(directory, variant="kconvert", **kw)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in sorted(directory.rglob("*.safetensors")) for key, value in load_file(path).items()}


def headers_of(directory: Path) -> dict[str, bytes]:
    return {path.name: read_header(path).prefix for path in directory.glob("*.safetensors")}


def left_out(prepared: PreparedRevert) -> dict[str, str]:
    return {item.name: item.reason for item in prepared.not_restored}


def check_loads(output: Path, model: Any) -> None:
    """Stock transformers loads it, and computes what the saved model did."""
    stock = AutoModelForCausalLM.from_pretrained(output, dtype=model.dtype)
    assert torch.equal(logits(stock), logits(model))


@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp"])
@pytest.mark.parametrize("max_shard_size", ["1GB", 5_000])
def test_new_values_in_the_old_files(tmp_path: Path, recipe: str, max_shard_size: int | str) -> None:
    """However the save is sharded: headers and index are the source's, as they are."""
    source, converted = make(tmp_path, recipe=recipe, max_shard_size=10_000)
    model = trained(converted)
    result = revert(saved(model, tmp_path / "saved", max_shard_size=max_shard_size), tmp_path / "back")
    assert headers_of(tmp_path / "back") == headers_of(source)
    assert (tmp_path / "back" / INDEX).read_bytes() == (source / INDEX).read_bytes()
    expected = {name: tensor * 0.75 for name, tensor in tensors_of(source).items()}
    found = tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    check_loads(tmp_path / "back", model)
    prepared = result.prepared
    assert (prepared.is_exact, prepared.notes, left_out(prepared)) == (False, (OWN,), {})
    assert prepared.sidecars == ("config.json", "generation_config.json")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_under_the_names_of_the_files(tmp_path: Path, kind: Kind) -> None:
    source, converted = make(tmp_path, kind, kind.replace("_", "-"))
    model = trained(converted)
    revert(saved(model, tmp_path / "saved"), tmp_path / "back")
    assert headers_of(tmp_path / "back") == headers_of(source)
    check_loads(tmp_path / "back", model)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_more_tokens(tmp_path: Path, tie: bool) -> None:
    """B23: after resize_token_embeddings the files of the embeddings have a new header, and the others their own."""
    source, converted = make(tmp_path, tie=tie, max_shard_size=10_000)
    model = trained(converted)
    model.resize_token_embeddings(80, mean_resizing=False)
    result = revert(saved(model, tmp_path / "saved"), tmp_path / "back")
    before, after = headers_of(source), headers_of(tmp_path / "back")
    assert before.keys() == after.keys()
    files = json.loads((source / INDEX).read_text())["weight_map"]
    changed = {files[name] for name in (EMBED, HEAD) if name in files}
    assert {name for name in before if before[name] != after[name]} == changed
    for name in changed:
        one, other = read_header(source / name), read_header(tmp_path / "back" / name)
        assert [entry.name for entry in one.tensors] == [entry.name for entry in other.tensors]
        assert (other.metadata, one.metadata) == ({"format": "pt"}, {"format": "pt"})
    found = tensors_of(tmp_path / "back")
    assert found[EMBED].shape == (80, 32)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    check_loads(tmp_path / "back", model)
    notes = result.prepared.notes
    assert notes[0] == OWN
    assert {note.split(" ")[0] for note in notes[1:]} == {*changed, INDEX}


@pytest.mark.parametrize("alone", [False, True])
def test_a_tied_head_that_the_source_had_stored(tmp_path: Path, alone: bool) -> None:
    """A6: the save holds the tensor once, so the head is listed; a file that had nothing else is not written."""
    tensors = qwen3_tensors()
    tensors[HEAD] = tensors[EMBED].clone()
    others = [name for name in tensors if name != HEAD]
    shards = [others, [HEAD]] if alone else [others[::2], [HEAD, *others[1::2]]]
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(tie_word_embeddings=True), shards)
    model = trained(convert("qwen3", source, tmp_path / "converted").output)
    result = revert(saved(model, tmp_path / "saved"), tmp_path / "back")
    last = "model-00002-of-00002.safetensors"
    reasons = left_out(result.prepared)
    assert reasons[HEAD] == "the save left it out: it is tied to another tensor"
    assert (last in reasons, (tmp_path / "back" / last).exists()) == (alone, not alone)
    assert sorted(tensors_of(tmp_path / "back")) == sorted(others)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert sorted(index["weight_map"]) == sorted(others)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits(stock, torch.tensor([[1, 2]])), logits(model, torch.tensor([[1, 2]])))


def test_saved_in_a_wider_dtype(tmp_path: Path) -> None:
    """A bfloat16 source that was trained in float32 is bfloat16 again; that is said."""
    source, converted = make(tmp_path, dtype=torch.bfloat16)
    model = trained(converted, dtype=torch.float32)
    directory = saved(model, tmp_path / "saved")
    assert {tensor.dtype for tensor in tensors_of(directory).values()} == {torch.float32}
    prepared = revert(directory, tmp_path / "back").prepared
    assert headers_of(tmp_path / "back") == headers_of(source)
    count = len(tensors_of(source))
    assert prepared.notes == (
        OWN,
        f"{count} tensors are rounded from F32, in which it was saved, to BF16, as in the source",
    )
    found = tensors_of(tmp_path / "back")
    for name, tensor in tensors_of(source).items():
        assert torch.equal(found[name], (tensor.float() * 0.75).bfloat16()), name


def test_saved_in_a_narrower_dtype(tmp_path: Path) -> None:
    source, converted = make(tmp_path)
    model = trained(converted, dtype=torch.bfloat16)
    prepared = revert(saved(model, tmp_path / "saved"), tmp_path / "back").prepared
    assert headers_of(tmp_path / "back") == headers_of(source)
    assert prepared.notes == (OWN,)
    check_loads(tmp_path / "back", model)


def test_a_dtype_that_nothing_is_converted_to(tmp_path: Path) -> None:
    tensors = {name: tensor.double() for name, tensor in qwen3_tensors().items()}
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(dtype="float64"))
    model = trained(convert("qwen3", source, tmp_path / "converted").output, dtype=torch.float32)
    with pytest.raises(
        VerificationError, match=r"is saved as F32, which cannot become F64, the dtype of .*; save the model"
    ):
        prepare_revert(saved(model, tmp_path / "saved"))


def test_files_that_a_save_does_not_write(tmp_path: Path) -> None:
    """The tokenizer of the source is listed, and so is what somebody has put there since."""
    source = save_tiny(tmp_path / "source", "qwen3")
    (source / "tokenizer.json").write_text("{}")
    (source / "sub").mkdir()
    (source / "sub" / "x.txt").write_text("x")
    (source / "pytorch_model.bin").write_bytes(b"")
    directory = saved(trained(convert("qwen3", source, tmp_path / "converted").output), tmp_path / "saved")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "vocab.txt").write_text("")
    prepared = revert(directory, tmp_path / "back").prepared
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    wrote = "was not brought over: save_pretrained of the model does not write it"
    reasons = left_out(prepared)
    assert reasons.pop("pytorch_model.bin").startswith("was not brought over: a stock loader could take it")
    assert reasons == {
        "sub/x.txt": wrote,
        "tokenizer.json": wrote,
        "vocab.txt": "the manifest does not know it: it came after the conversion",
    }


def test_a_save_of_a_save(tmp_path: Path) -> None:
    source, converted = make(tmp_path)
    (source / "tokenizer.json").write_text("{}")
    shutil.rmtree(converted)
    convert("qwen3", source, converted)
    once = saved(trained(converted), tmp_path / "once")
    model = trained(once)
    twice = saved(model, tmp_path / "twice")
    prepared = revert(twice, tmp_path / "back").prepared
    assert headers_of(tmp_path / "back") == headers_of(source)
    check_loads(tmp_path / "back", model)
    assert [item.name for item in prepared.not_restored] == ["tokenizer.json"]


def test_tensors_outside_the_model_come_back_too(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": torch.randn(3, 5), "draft.scale": torch.tensor(3, dtype=torch.int32)}
    source = write_checkpoint(tmp_path / "source", {**qwen3_tensors(), **extra}, qwen3_config())
    model = trained(convert("qwen3", source, tmp_path / "converted").output)
    revert(saved(model, tmp_path / "saved"), tmp_path / "back")
    assert headers_of(tmp_path / "back") == headers_of(source)
    found = tensors_of(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in extra.items())


def test_config_that_was_changed_after_the_save(tmp_path: Path) -> None:
    _, converted = make(tmp_path)
    directory = saved(trained(converted), tmp_path / "saved")
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    with pytest.raises(VerificationError, match=r"config.json: is not what it was when kconvert wrote it"):
        prepare_revert(directory)


def test_a_conversion_that_calls_itself_a_save(tmp_path: Path) -> None:
    """Nothing more is allowed by it than less exactness, which is said."""
    source, converted = make(tmp_path)
    edit_manifest(converted, lambda manifest: replace(manifest, written_by="save_pretrained"))
    prepared = revert(converted, tmp_path / "back").prepared
    assert (prepared.is_exact, prepared.notes) == (False, (OWN,))
    assert headers_of(tmp_path / "back") == headers_of(source)
