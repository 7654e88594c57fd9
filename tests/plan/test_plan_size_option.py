"""`--max-shard-size`: how a size is written, and what the two commands do with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconvert.cli import main
from kconvert.cli.options import max_shard_bytes
from kconvert.errors import UsageError
from tests.plan.generated import MLP
from tests.support import qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe

SIZES = {
    "5GB": 5_000_000_000,
    "500MB": 500_000_000,
    "2GiB": 2 * 2**30,
    "3MiB": 3 * 2**20,
    "7KiB": 7168,
    "7kB": 7000,
    "7KB": 7000,
    "1TB": 10**12,
    "1TiB": 2**40,
    "1000000": 1_000_000,
    "12B": 12,
    "1": 1,
    "1.5GB": 1_500_000_000,
    "0.5kB": 500,
    " 5 gb ": 5_000_000_000,
    "9" * 18: int("9" * 18),
}
NO_SIZES = [
    "",
    "GB",
    "-1",
    "+1",
    "5PB",
    "5G",
    "1e9",
    "0x10",
    "1_000",
    "5,5GB",
    ".5GB",
    "5.GB",
    "٣GB",
    "5GBs",
    "nan",
    "9" * 19,
]


@pytest.mark.parametrize(("text", "size"), SIZES.items(), ids=list(SIZES))
def test_sizes(text: str, size: int) -> None:
    assert max_shard_bytes(text) == size


def test_none_is_the_sharding_of_the_source() -> None:
    assert max_shard_bytes(None) is None


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        max_shard_bytes(text)
    assert str(caught.value) == (
        f"--max-shard-size {text!r} is no size; write 5GB (10**9 bytes), 2GiB (2**30), 500MB or a number of bytes"
    )


@pytest.mark.parametrize("text", ["5Gb", "5Gib", "5 Kb"])
def test_bits_are_no_bytes(text: str) -> None:
    """To transformers, `5Gb` is an eighth of `5GB`."""
    with pytest.raises(UsageError, match="is no size in bytes"):
        max_shard_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.9", "0.0001kB"])
def test_less_than_a_byte(text: str) -> None:
    with pytest.raises(UsageError, match="is less than one byte"):
        max_shard_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    try:
        size = max_shard_bytes(text)
    except UsageError:
        return
    assert size is not None
    assert size >= 1


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_a_size_that_is_none_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "qwen3", str(tmp_path), "--no-model-check", "--max-shard-size", "many"]) == 2
    assert "--max-shard-size 'many' is no size" in capsys.readouterr().err


def test_plan_shows_the_files_that_apply_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", qwen3_tensors(), qwen3_config())
    recipe = write_recipe(tmp_path / "r.yaml", MLP)
    argv = [str(recipe), str(source), "--no-model-check", "--max-shard-size", "1kB"]
    assert main(["plan", *argv, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert main(["apply", *argv, "-o", str(tmp_path / "out"), "-q"]) == 0
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in paths] == [file["name"] for file in files]
    for path, file in zip(paths, files, strict=True):
        tensors = read_raw(path.parent, path.name)
        assert len(tensors) == file["tensors"]
        assert sum(len(tensor.data) for tensor in tensors.values()) == file["bytes"]
        assert file["bytes"] <= 1000 or file["tensors"] == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.kconvert.json").read_text())
    assert {*index["weight_map"].values()} == {path.name for path in paths}
