"""Directories as they really are: read-only, on other file systems, behind slow ones, with names of every length and script.

The result is always that of a plain directory, byte for byte.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.checkpoint import DTYPE_BITS
from kconvert.cli import main
from kconvert.convert import record
from kconvert.errors import CheckpointError, PreflightError
from kconvert.manifest import load_manifest
from kconvert.names import MANIFEST_NAME
from kconvert.rewrite import copying
from kconvert.rewrite.ways import KernelCopies
from tests.support import (
    RawTensor,
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    write_checkpoint,
    write_safetensors,
)

ROOT = Path(__file__).parents[2]
NAMES = list(qwen3_tensors())
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_source(directory: Path, **more: Any) -> Path:
    """Two shards, with gate and up in different ones, and side files."""
    source = write_checkpoint(
        directory, {**qwen3_tensors(), **more}, qwen3_config(), [NAMES[::2], [*NAMES[1::2], *more]]
    )
    (source / "sub").mkdir()
    (source / "sub" / "tokenizer.model").write_bytes(bytes(range(256)) * 40)
    (source / "README.md").write_text("# model")
    return source


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "in")


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What comes of `source` where nothing is special."""
    return files_of(convert("qwen3", source, tmp_path_factory.mktemp("plain") / "out", model_check=False).output)


def apply(source: Path, output: Path, **kw: Any) -> dict[str, bytes]:
    return files_of(convert("qwen3", source, output, model_check=False, **kw).output)


# --- where the files lie ----------------------------------------------------------------------------------


READ_ONLY = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
! touch "$1/config.json" 2> /dev/null
! touch "$1/new" 2> /dev/null
exec "$2" -m kconvert apply qwen3 "$1" -o "$3" --no-model-check --quiet
"""


def _may_mount() -> bool:
    """Whether this process may mount in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        probe = ["unshare", "-rm", "mount", "--bind", folder, folder]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="nobody may mount here")
def test_a_read_only_file_system(source: Path, expected: Mapping[str, bytes], tmp_path: Path) -> None:
    command = ["unshare", "-rm", "sh", "-c", READ_ONLY, "sh", str(source), sys.executable, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == expected


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than `tmp_path`."""
    base = Path("/dev/shm")
    if not base.is_dir() or base.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


@pytest.mark.parametrize("direction", ["source", "target", "shards"])
def test_another_file_system(
    direction: str, source: Path, expected: Mapping[str, bytes], memory_dir: Path, tmp_path: Path
) -> None:
    if direction == "target":
        assert apply(source, memory_dir / "out") == expected
        return
    moved = (memory_dir if direction == "source" else tmp_path) / "in"
    shutil.copytree(source, moved)
    if direction == "shards":  # one of the shards is a link to where there was room
        shutil.move(moved / TWO, memory_dir / "shard")
        (moved / TWO).symlink_to(memory_dir / "shard")
    assert apply(moved, tmp_path / "out") == expected


@pytest.mark.parametrize("way", ["EXDEV", "ENOSYS", "EOPNOTSUPP", "EINVAL", "EPERM", "nothing copied", "not there"])
def test_without_copy_file_range(
    way: str,
    source: Path,
    expected: Mapping[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NFS, FUSE, old kernels, and what lies on two file systems."""
    calls = []

    def fail(*args: Any) -> int:
        calls.append(args)
        if way == "nothing copied":
            return 0
        raise OSError(getattr(errno, way), "not here")

    monkeypatch.setattr(copying, "kernel_copies", lambda source_fd, target_fd: KernelCopies.ALWAYS)
    if way == "not there":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", fail)
    assert apply(source, tmp_path / "out") == expected
    assert bool(calls) is (way != "not there")


def test_a_file_system_that_sets_no_file_size_in_advance(
    source: Path, expected: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert apply(source, tmp_path / "out") == expected


# --- names ------------------------------------------------------------------------------------------------


LONGEST = "m" * (255 - len(".safetensors")) + ".safetensors"
"""In the place of the first shard in every order."""


def test_file_names_of_the_greatest_length(source: Path, expected: Mapping[str, bytes], tmp_path: Path) -> None:
    """255 bytes each, also where a letter has several of them, and a path of nearly 4,000."""
    moved = tmp_path / "in"
    shutil.copytree(source, moved)
    (moved / ONE).rename(moved / LONGEST)
    index = moved / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(ONE, LONGEST))
    deep = "/".join(["d" * 200] * 17) + "/" + "名" * 85
    for name in ("n" * 255, "é" * 127 + "x", deep):
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        (moved / name).write_text(name[:3])
    output = tmp_path / "out"
    found = apply(moved, output)
    manifest = load_manifest(output)
    assert {name: found[name] for name in ("n" * 255, "é" * 127 + "x", deep)} == {
        "n" * 255: b"nnn", "é" * 127 + "x": "ééé".encode(), deep: b"ddd",
    }  # fmt: skip
    assert {file.name for file in manifest.source_files} == {LONGEST, TWO}
    weights = [name for name in expected if name.endswith(".kconvert.safetensors") or "kconvert-0000" in name]
    assert {name: found[name] for name in weights} == {name: expected[name] for name in weights}


def test_a_path_that_no_call_can_take(source: Path, tmp_path: Path) -> None:
    """Folders in folders until the path is longer than the system takes: one line says where."""
    moved = tmp_path / "in"
    shutil.copytree(source, moved)
    here = os.open(moved, os.O_RDONLY)
    try:
        for _ in range(25):
            os.mkdir("d" * 200, dir_fd=here)
            below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("x.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    finally:
        os.close(here)
    with pytest.raises(CheckpointError, match="File name too long"):
        convert("qwen3", moved, tmp_path / "out", model_check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_output_whose_name_leaves_no_room(source: Path, expected: Mapping[str, bytes], tmp_path: Path) -> None:
    """Beside the output a folder of its name and `.partial` is written."""
    longest = "o" * (255 - len(".partial"))
    assert apply(source, tmp_path / longest) == expected
    check_refused(
        PreflightError,
        6,
        ["oo.partial", "a file name is too long"],
        "qwen3",
        source,
        tmp_path / ("o" * 250),
        model_check=False,
    )


def test_tensor_names_of_any_length_and_letters(tmp_path: Path) -> None:
    names = [
        "x" * 60_000,
        "名" * 20_000,
        "a/b/../c",
        "..",
        "a\0b",
        "tab\there",
        "new\nline",
        "\u202eright",
        "é",
        "e\u0301",
        "-0",
        " ",
        "",
    ]
    extra = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    source = write_source(tmp_path / "in", **extra)
    output = convert("qwen3", source, tmp_path / "out", model_check=False).output
    written = read_raw(output)
    assert {name: written[name] for name in names} == {name: raw(tensor) for name, tensor in extra.items()}
    records = load_manifest(output).tensors_by_target()
    assert all(records[name].parts[0].source == name for name in names)


def test_a_header_as_large_as_the_format_allows(tmp_path: Path) -> None:
    """Nine names of 11 MB, in a header a few bytes below 100,000,000; all the way there and back."""
    names = [f"{number}{'x' * 11_088_000}" for number in range(9)]
    tensors = {**qwen3_tensors(), **{name: torch.full((2,), float(number)) for number, name in enumerate(names)}}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    weights = source / "model.safetensors"
    header_bytes = int.from_bytes(weights.read_bytes()[:8], "little")
    assert 99_700_000 < header_bytes < 100_000_000
    converted = tmp_path / "out"
    assert main(["apply", "qwen3", str(source), "-o", str(converted), "--no-model-check", "-q"]) == 0
    assert main(["verify", str(converted), "--source", str(source), "--level", "bytes"]) == 0
    assert main(["revert", str(converted), "-o", str(tmp_path / "back"), "-q"]) == 0
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", weights, shallow=False)


def test_headers_beyond_what_revert_reads(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "SOURCE_HEADERS_BYTES", 3000)
    words = [str(source), "headers and index have", "3000 are allowed"]
    check_refused(CheckpointError, 4, words, "qwen3", source, tmp_path / "out", model_check=False)


# --- tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_files", [1, 2])
def test_every_dtype_and_odd_shape_at_once(num_files: int, tmp_path: Path) -> None:
    """Scalars, nothing, a half-byte dtype, and sizes that end anywhere in a word."""
    extra = {}
    for number, (dtype, bits) in enumerate(DTYPE_BITS.items()):
        for shape in ((), (0,), (0, 3), (3, 0, 2), (1,), (3,), (1, 8), (2, 1, 8), (5, 8)):
            count = 1
            for size in shape:
                count *= size
            if count * bits % 8 == 0:
                data = bytes((number + place) % 251 for place in range(count * bits // 8))
                extra[f"extra.{dtype}.{'x'.join(map(str, shape))}"] = RawTensor(dtype, shape, data)
    assert len(extra) > 180
    tensors = {name: raw(tensor) for name, tensor in qwen3_tensors().items()} | extra
    names = list(tensors)
    shards = [names[::2], names[1::2]] if num_files == 2 else None
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(), shards)
    written = read_raw(convert("qwen3", source, tmp_path / "out", model_check=False).output)
    assert {name: written[name] for name in extra} == extra


def test_a_file_without_tensors(tmp_path: Path) -> None:
    """An index cannot name such a file; a config can, and then there is nothing to convert."""
    source = write_checkpoint(tmp_path / "in", {}, qwen3_config())
    write_safetensors(source / "model.safetensors", {})
    with pytest.raises(ValueError, match=r"matches no|no tensor|nothing") as caught:
        convert("qwen3", source, tmp_path / "out", model_check=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
