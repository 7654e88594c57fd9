"""A stock checkpoint and its conversion, made once and only read; `damaged` gives a copy to write into."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kconvert.checkpoint import read_header
from kconvert.names import PARITY_NAME, SINGLE_NAME
from tests.support import convert, save_tiny, write_recipe

Change = Callable[[bytearray], None]

PATCHES = """\
  - kernel: [cpu_fused_rmsnorm]
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
  - kernel: [cpu_fused_qkv]
    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}
  - kernel: [cpu_fused_swiglu]
    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""


@dataclass(frozen=True)
class Pair:
    """A source directory and what was made of it."""

    source: Path
    converted: Path

    def copy(self, directory: Path) -> Path:
        """The converted directory, without the report of an earlier test."""
        return shutil.copytree(self.converted, directory, ignore=shutil.ignore_patterns(PARITY_NAME))

    def edited(self, directory: Path, tensor: str, change: Change) -> Pair:
        """The same with a converted directory in which the bytes of one tensor are changed."""
        self.copy(directory)
        path = directory / SINGLE_NAME
        entry = next(item for item in read_header(path).tensors if item.name == tensor)
        data = bytearray(path.read_bytes())
        part = data[entry.offset : entry.offset + entry.size_bytes]
        before = bytes(part)
        change(part)
        assert len(part) == len(before)
        assert part != before
        data[entry.offset : entry.offset + entry.size_bytes] = part
        path.write_bytes(data)
        return replace(self, converted=directory)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _make(directory: Path, dtype: torch.dtype) -> Pair:
    source = save_tiny(directory / "my-model", "qwen3", dtype=dtype)
    recipe = write_recipe(directory / "my.yaml", PATCHES)
    return Pair(source, convert(recipe, source, directory / "my-model-kconvert").output)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32: norms, attention and MLP of two layers are patched."""
    return _make(tmp_path_factory.mktemp("parity"), torch.float32)


@pytest.fixture(scope="session")
def short_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same in bfloat16."""
    return _make(tmp_path_factory.mktemp("parity-short"), torch.bfloat16)
