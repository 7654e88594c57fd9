"""What lies in the output's place, and what the output shares with its source: A7 and B3 from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kconvert import load_converted
from kconvert.convert import revert
from kconvert.errors import CheckpointError, OutputError
from kconvert.manifest import load_manifest
from kconvert.names import INDEX_NAME
from tests.support import check_refused, convert, qwen3_config, qwen3_tensors, raw, read_raw, write_checkpoint

TENSORS = qwen3_tensors()
NAMES = list(TENSORS)
INDEX = "model.safetensors.index.json"
TOTAL = sum(len(raw(tensor).data) for tensor in TENSORS.values())


def write_shards(directory: Path, num_shards: int) -> Path:
    return write_checkpoint(
        directory, TENSORS, qwen3_config(), [NAMES[number::num_shards] for number in range(num_shards)]
    )


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_ten_shards_become_three(tmp_path: Path) -> None:
    """A7 (a), B5: the index is about the three, and its size is that of the tensors, whatever the source's index says."""
    source = write_shards(tmp_path / "in", 10)
    index = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": 1.5, "other": "x"}}))
    output = convert("qwen3", source, tmp_path / "out", model_check=False, max_shard_bytes=TOTAL * 2 // 5).output
    shards = sorted(path.name for path in output.glob("*.safetensors"))
    assert shards == [f"model.kconvert-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    written = json.loads((output / INDEX_NAME).read_text())
    assert set(written["weight_map"].values()) == set(shards) == set(load_manifest(output).weight_files)
    assert written["metadata"] == {"total_size": TOTAL}
    assert type(written["metadata"]["total_size"]) is int
    assert [name for name in files_of(output) if "of-00010" in name or name.endswith("index.json")] == []
    assert read_raw(output).keys() == set(written["weight_map"])


@pytest.mark.parametrize(
    "metadata", ["absent", None, {}, {"total_size": 1}, {"total_size": 1.5}, {"total_size": "many"}, {"total_size": None}]
)  # fmt: skip
def test_what_the_index_says_of_the_size_is_not_asked(tmp_path: Path, metadata: object) -> None:
    """B5: the result counts its own tensors, and the way back gives the index as it was."""
    source = write_shards(tmp_path / "in", 3)
    plain = convert("qwen3", source, tmp_path / "plain").output
    index = json.loads((source / INDEX).read_text())
    changed = {"weight_map": index["weight_map"]} | ({} if metadata == "absent" else {"metadata": metadata})
    (source / INDEX).write_text(json.dumps(changed))
    output = convert("qwen3", source, tmp_path / "out").output
    assert (output / INDEX_NAME).read_bytes() == (plain / INDEX_NAME).read_bytes()
    assert json.loads((output / INDEX_NAME).read_text())["metadata"] == {"total_size": TOTAL}
    assert read_raw(output) == read_raw(plain)
    revert(output, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


def test_both_copies_of_a_tied_tensor_are_counted(tmp_path: Path) -> None:
    """B5: both are stored, so the size is that of the source, as an integer."""
    tensors = {**TENSORS, "lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}
    shards = [NAMES[::2], NAMES[1::2]]
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(tie_word_embeddings=True), shards)
    output = convert("qwen3", source, tmp_path / "out").output
    assert sum(len(tensor.data) for tensor in read_raw(output).values()) == TOTAL
    assert json.loads((output / INDEX_NAME).read_text())["metadata"] == {"total_size": TOTAL}
    load_converted(output).save_pretrained(tmp_path / "saved", variant="kconvert", max_shard_size=2_000)
    size = json.loads((tmp_path / "saved" / INDEX_NAME).read_text())["metadata"]["total_size"]
    assert size == sum(len(tensor.data) for tensor in read_raw(tmp_path / "saved").values()) < TOTAL
    assert type(size) is int


def test_three_shards_in_the_place_of_ten(tmp_path: Path) -> None:
    """A7 (b), (c): without a word nothing is replaced; with it nothing of the ten is left."""
    source = write_shards(tmp_path / "in", 10)
    output = convert("qwen3", source, tmp_path / "out", model_check=False).output
    first = files_of(output)
    assert len(load_manifest(output).weight_files) > 3
    again = {"model_check": False, "max_shard_bytes": TOTAL * 2 // 5}
    check_refused(OutputError, 7, ["output exists", "--overwrite"], "qwen3", source, output, **again)
    assert files_of(output) == first
    convert("qwen3", source, output, overwrite=True, **again)
    assert files_of(output) == files_of(convert("qwen3", source, tmp_path / "fresh", **again).output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "in", "out"]


def test_a_run_that_fails_leaves_an_empty_folder_where_it_was(tmp_path: Path) -> None:
    """S8: whoever made it may have chosen its owner and mode."""
    source = write_shards(tmp_path / "in", 2)
    (tmp_path / "out").mkdir(mode=0o750)
    before = (tmp_path / "out").stat()
    (source / "model-00002-of-00002.safetensors").unlink()
    check_refused(CheckpointError, 4, ["model-00002-of-00002"], "qwen3", source, tmp_path / "out", overwrite=True)
    after = (tmp_path / "out").stat()
    assert (after.st_ino, after.st_mode, files_of(tmp_path / "out")) == (before.st_ino, before.st_mode, {})


# --- a file of the source that is a file of the output too --------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """Source and output with one file in common, and what the source holds."""
    kept = ["model.embed_tokens.weight", "lm_head.weight"]
    shards = [kept, [name for name in NAMES if name not in kept]]
    source = write_checkpoint(tmp_path / "in", TENSORS, qwen3_config(), shards)
    output = convert("qwen3", source, tmp_path / "out", reuse="hardlink").output
    inodes = {path.stat().st_ino for path in source.iterdir()}
    assert [path.stat().st_ino in inodes for path in sorted(output.glob("*.safetensors"))].count(True) == 1
    return source, output, files_of(source)


def test_replacing_the_output_leaves_the_source_alone(shared: tuple[Path, Path, dict[str, bytes]]) -> None:
    source, output, before = shared
    modes = {path: (path.stat().st_ino, path.stat().st_mode, path.stat().st_mtime_ns) for path in source.iterdir()}
    convert("qwen3", source, output, overwrite=True, model_check=False, max_shard_bytes=1000)
    assert files_of(source) == before
    assert {
        path: (path.stat().st_ino, path.stat().st_mode, path.stat().st_mtime_ns) for path in source.iterdir()
    } == modes
    assert {path.stat().st_nlink for path in source.iterdir()} == {1}


@pytest.mark.parametrize("variant", [None, "kconvert"])
def test_saving_into_the_output_leaves_the_source_alone(
    variant: str | None, shared: tuple[Path, Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """B3: what is saved over a file is saved over the other name of that file, too."""
    source, output, before = shared
    model = load_converted(output, kernels="reference")
    for parameter in model.parameters():
        parameter.data += 1
    if variant is not None:
        model.save_pretrained(output, variant=variant)
        assert load_manifest(output).written_by == "save_pretrained"
    else:
        model.save_pretrained(tmp_path / "stock")
    assert files_of(source) == before


def test_a_source_that_is_written_to_is_not_the_output_of_before(shared: tuple[Path, Path, dict[str, bytes]]) -> None:
    """The other way round nothing helps: a link is one file.  It must only be what was asked for."""
    source, output, _ = shared
    linked = [path for path in output.glob("*.safetensors") if path.stat().st_nlink == 2]
    assert len(linked) == 1
    plain = convert("qwen3", source, output.parent / "plain", model_check=False).output
    assert {path.stat().st_nlink for path in plain.iterdir()} == {1}
    assert linked[0].samefile(source / "model-00001-of-00002.safetensors")
