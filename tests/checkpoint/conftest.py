"""Small real checkpoints, written on the spot with kconvert's own header writer (its output is read by safetensors)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kconvert.checkpoint import DTYPE_BITS, build_header

Spec = Mapping[str, tuple[str, Sequence[int]]]


def write_tensors(path: Path, tensors: Spec, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file whose data bytes count up, so that a wrong offset shows as a value."""
    sized = []
    for name, (dtype, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        sized.append((name, dtype, tuple(shape), count * DTYPE_BITS[dtype] // 8))
    total = sum(item[3] for item in sized)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build_header(sized, metadata) + bytes(i % 251 for i in range(total)))


class ModelDir:
    """Builds one model directory step by step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.config({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})

    def config(self, content: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(content))

    def weights(self, name: str, *tensors: str) -> None:
        write_tensors(self.path / name, dict.fromkeys(tensors, ("F32", (2,))), {"format": "pt"})

    def index(self, weight_map: Mapping[str, object], name: str = "model.safetensors.index.json") -> None:
        (self.path / name).write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": dict(weight_map)}))

    def sharded(self) -> None:
        """Tensors `a` and `b` in shard 1, `c` in shard 2."""
        self.weights("model-00001-of-00002.safetensors", "a", "b")
        self.weights("model-00002-of-00002.safetensors", "c")
        one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        self.index({"a": one, "b": one, "c": two})


@pytest.fixture
def model(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path / "model")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], ModelDir]:
    return lambda name: ModelDir(tmp_path / name)
