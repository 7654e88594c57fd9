"""Saving over what is there: a converted directory is whole before and after, also when writing fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import modeling_utils

from kconvert.errors import UsageError
from kconvert.kernels import apply_default_kernels
from kconvert.manifest import load_manifest
from kconvert.names import MANIFEST_NAME
from kconvert.runtime import load_converted
from kconvert.runtime import saving as saving_module
from tests.runtime.pairs import Pair, logits
from tests.support import convert, qwen3_config, qwen3_tensors, read_raw, write_checkpoint


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def scale(model: Any, factor: float = 0.75) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@pytest.fixture
def mine(pair: Pair, tmp_path: Path) -> Pair:
    """A converted directory to write into."""
    return pair.copy(tmp_path / "mine")


# --- stock layout ---------------------------------------------------------------------------------------


def test_the_stock_layout_is_not_put_beside_a_converted_one(mine: Pair) -> None:
    model, before = mine.load(), contents(mine.converted)
    live = apply_default_kernels(mine.stock(), "auto")
    for saved in (model, model.model, live, live.model):
        with pytest.raises(UsageError, match=r"holds a converted checkpoint.*variant='kconvert'"):
            saved.save_pretrained(mine.converted)
        with pytest.raises(UsageError, match="holds a converted checkpoint"):
            saved.save_pretrained(str(mine.converted), max_shard_size=5_000)
    assert contents(mine.converted) == before


# --- packed ---------------------------------------------------------------------------------------------


def test_a_packed_save_says_who_wrote_it(mine: Pair, tmp_path: Path) -> None:
    assert load_manifest(mine.converted).written_by == "apply"
    model = mine.load()
    for directory in (tmp_path / "new", mine.converted):
        model.save_pretrained(directory, variant="kconvert")
        assert load_manifest(directory).written_by == "save_pretrained"
        assert read_raw(directory) == read_raw(mine.converted)
    load_converted(tmp_path / "new").save_pretrained(tmp_path / "newer", variant="kconvert")
    assert load_manifest(tmp_path / "newer").written_by == "save_pretrained"


@pytest.mark.parametrize("sizes", [("1GB", "1GB"), (5_000, 5_000), ("1GB", 5_000), (5_000, "1GB"), (5_000, 20_000)])
def test_over_an_older_packed_directory(mine: Pair, tmp_path: Path, sizes: tuple[int | str, int | str]) -> None:
    """Other shards, other values: nothing of the old save is left, and files that are not ours stay."""
    model, target = mine.load(kernels="reference"), tmp_path / "target"
    model.save_pretrained(target, variant="kconvert", max_shard_size=sizes[0])
    (target / "notes.txt").write_text("mine")
    scale(model).save_pretrained(target, variant="kconvert", max_shard_size=sizes[1])
    model.save_pretrained(tmp_path / "fresh", variant="kconvert", max_shard_size=sizes[1])
    assert contents(target) == {**contents(tmp_path / "fresh"), "notes.txt": b"mine"}
    assert torch.equal(logits(load_converted(target, kernels="reference")), logits(model))


@pytest.mark.parametrize("max_shard_size", ["1GB", 5_000])
def test_over_the_own_directory(mine: Pair, max_shard_size: int | str) -> None:
    expected, headers = set(contents(mine.converted)), load_manifest(mine.converted).source_headers_digest
    assert headers is not None
    model = scale(mine.load(kernels="reference"))
    for _ in range(2):
        model.save_pretrained(mine.converted, variant="kconvert", max_shard_size=max_shard_size)
        again = mine.load(kernels="reference")
        assert torch.equal(logits(again), logits(model))
    if max_shard_size == "1GB":
        assert expected <= set(contents(mine.converted))
    assert load_manifest(mine.converted).source_headers_digest == headers
    assert [path.name for path in mine.converted.parent.iterdir()] == ["mine"]


def test_a_relative_directory(mine: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = mine.load(kernels="reference")
    for target in ("out", "mine", Path("deep") / "er"):
        model.save_pretrained(target, variant="kconvert")
        assert read_raw(tmp_path / target) == read_raw(mine.converted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "mine", "out"]


Break = Callable[[pytest.MonkeyPatch], None]


def first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(modeling_utils, "safe_save_file", fails)


def third_file(monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = save_file, []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", fails)


def safetensors_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.serialize_file", fails)


def manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving_module, "_copy_companions", fails)


@pytest.mark.parametrize("broken", [first_file, third_file, safetensors_itself, manifest])
@pytest.mark.parametrize("place", ["own", "other", "new"])
def test_writing_that_fails_leaves_the_old_directory(
    mine: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Break, place: str
) -> None:
    model = mine.load(kernels="reference")
    expected, target = logits(model), mine.converted if place == "own" else tmp_path / place
    if place == "other":
        model.save_pretrained(target, variant="kconvert", max_shard_size=5_000)
    before = contents(target)
    scale(model)
    broken(monkeypatch)
    with pytest.raises((OSError, SafetensorError), match="No space left"):
        model.save_pretrained(target, variant="kconvert", max_shard_size=5_000)
    monkeypatch.undo()
    assert contents(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"mine", target.name} - {"new"})
    if place != "new":
        assert torch.equal(logits(load_converted(target, kernels="reference")), expected)
    model.save_pretrained(target, variant="kconvert")
    assert torch.equal(logits(load_converted(target, kernels="reference")), logits(model))


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("max_shard_size", ["1GB", 5_000])
def test_modes_follow_the_umask(qwen3: Pair, tmp_path: Path, umask: int, max_shard_size: int | str) -> None:
    """safetensors makes its files private, and another user of the machine could not load them."""
    target = tmp_path / "saved"
    qwen3.load().save_pretrained(target, variant="kconvert", max_shard_size=max_shard_size)
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()}
    weights = load_manifest(target).weight_files
    assert len(weights) == 1 if max_shard_size == "1GB" else len(weights) > 5
    assert {modes[name] for name in (*weights, MANIFEST_NAME)} == {0o666 & ~umask}


def test_a_packed_save_is_not_pushed(mine: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be pushed.*upload the directory"):
        mine.load().save_pretrained(tmp_path / "saved", variant="kconvert", push_to_hub=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_given_state_with_stock_names_is_packed(mine: Pair, tmp_path: Path) -> None:
    """What Trainer gathers elsewhere has stock names, or packed ones."""
    model = mine.load(kernels="reference")
    stock = mine.stock()
    for number, state in enumerate((stock.state_dict(), model.state_dict())):
        halved = {name: tensor * 0.5 for name, tensor in state.items()}
        target = tmp_path / str(number)
        model.save_pretrained(target, variant="kconvert", state_dict=halved)
        assert sorted(read_raw(target)) == sorted(read_raw(mine.converted))
    stock.load_state_dict({name: tensor * 0.5 for name, tensor in stock.state_dict().items()})
    assert read_raw(tmp_path / "0") == read_raw(tmp_path / "1")
    assert torch.equal(logits(load_converted(tmp_path / "0", kernels="reference")), logits(stock))


@pytest.mark.parametrize("lacking", ["gate_proj", "up_proj"])
def test_a_given_state_that_has_half_a_group_is_refused(mine: Pair, tmp_path: Path, lacking: str) -> None:
    state = {name: value for name, value in mine.stock().state_dict().items() if f"1.mlp.{lacking}" not in name}
    before = contents(mine.converted)
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.(gate|up)_proj\.weight.*whole state dict"):
        mine.load().save_pretrained(mine.converted, variant="kconvert", state_dict=state)
    assert contents(mine.converted) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("lacking", ["model.norm.weight", "lm_head.weight", "layers.1.mlp"])
def test_a_given_state_that_lacks_a_tensor_is_refused(mine: Pair, tmp_path: Path, lacking: str) -> None:
    """It would overwrite a whole directory by one that does not load."""
    model, before = mine.load(), contents(mine.converted)
    for state in (model.state_dict(), mine.stock().state_dict()):
        part = {name: tensor for name, tensor in state.items() if lacking not in name}
        if len(part) < len(state):
            with pytest.raises(UsageError, match=r"the state lacks .*whole state dict"):
                model.save_pretrained(mine.converted, variant="kconvert", state_dict=part)
    assert contents(mine.converted) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_tensor_that_the_conversion_did_not_know_is_refused(mine: Pair, tied: Pair, tmp_path: Path) -> None:
    """The manifest has no record for it, so the directory would not load."""
    model, before = mine.load(), contents(mine.converted)
    with pytest.raises(UsageError, match=r"'model\.extra'.*save the stock layout"):
        model.save_pretrained(
            mine.converted, variant="kconvert", state_dict={**model.state_dict(), "model.extra": torch.zeros(1)}
        )
    assert contents(mine.converted) == before
    untied = tied.load()
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    with pytest.raises(UsageError, match=r"'lm_head\.weight'.*save the stock layout"):
        untied.save_pretrained(tmp_path / "untied", variant="kconvert")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_is_carried_along_without_the_model_check_is_kept(tmp_path: Path) -> None:
    """Then the manifest does not say which tensors these are."""
    extra = {"mtp.fc.weight": torch.randn(3, 5)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **extra}, qwen3_config())
    output = convert("qwen3", source, tmp_path / "out", model_check=False).output
    load_converted(output).save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == read_raw(output)
    load_converted(tmp_path / "packed")
