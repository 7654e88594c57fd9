"""How much memory a conversion takes does not depend on the checkpoint: B1, in a process of its own.

The peak of a large conversion is held against that of a tiny one of the same structure before it, so that the interpreter
and its imports do not count.  Sources are sparse files with a few values in them.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kconvert.checkpoint import read_header
from kconvert.names import SINGLE_NAME
from tests.support import qwen3_config

ROOT = Path(__file__).parents[2]
EXPERTS = 16
Shapes = Mapping[str, tuple[int, ...]]


def write_sparse(directory: Path, shapes: Shapes, config: Mapping[str, Any], shards: Sequence[Sequence[str]]) -> None:
    """A bfloat16 checkpoint of which only the first and last value of each tensor are written: its number, counted here."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    numbers = {name: number + 1 for number, name in enumerate(shapes)}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        begin, spans = 0, {}
        for name in names:
            end = begin + 2 * int(np.prod(shapes[name]))
            spans[name] = (begin, end)
            begin = end
        fields = {name: {"dtype": "BF16", "shape": shapes[name], "data_offsets": spans[name]} for name in names}
        text = json.dumps(fields).encode()
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + begin)
            for name, (first, last) in spans.items():
                for offset in (first, last - 2):
                    out.seek(8 + len(text) + offset)
                    out.write(struct.pack("<H", numbers[name]))
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


CHILD = """
import sys
from pathlib import Path
from kconvert.convert import Options, apply_recipe
folder, recipe, model_check, digests = sys.argv[1:]
options = Options(digests=digests == "True", max_shard_bytes=1 << 40)
for size in ("", "small", "large"):
    if size:
        source, output = Path(folder, size), Path(folder, f"{size}-out")
        apply_recipe(recipe, source, output, options=options, model_check=model_check == "True")
    # not `ru_maxrss`, which is never less than what the process had that started this one
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
assert ("torch" in sys.modules) == (model_check == "True")
"""


def added_bytes(folder: Path, recipe: str, *, model_check: bool, digests: bool = False) -> tuple[int, int]:
    """By how much the peak grows while `small` is converted, and by how much while `large` is, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), recipe, str(model_check), str(digests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, small, large = (int(text) * 1024 for text in done.stdout.split())
    return small - before, large - small


def values_at(path: Path, name: str, places: Sequence[int]) -> list[int]:
    """Elements of a tensor of a file, as 16-bit numbers."""
    (entry,) = [entry for entry in read_header(path).tensors if entry.name == name]
    data = np.memmap(path, dtype="<u2", mode="r", offset=entry.offset, shape=(entry.size_bytes // 2,))
    return [int(data[place]) for place in places]


def dense(hidden: int, inner: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    config = qwen3_config(num_hidden_layers=1, hidden_size=hidden, intermediate_size=inner, dtype="bfloat16")
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (16, hidden), "self_attn.k_proj": (8, hidden), "self_attn.v_proj": (8, hidden),
        "self_attn.o_proj": (hidden, 16), "self_attn.q_norm": (4,), "self_attn.k_norm": (4,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    head = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (10, hidden))
    return {**head, **shapes, "model.norm.weight": (hidden,)}, config


@pytest.mark.parametrize("digests", [False, True])
def test_tensors_far_larger_than_the_memory_that_it_takes(digests: bool, tmp_path: Path) -> None:
    """Three tensors of 96 MB, two of them one group in two files; no torch."""
    for size, (hidden, inner) in (("small", (8, 12)), ("large", (2048, 24576))):
        shapes, config = dense(hidden, inner)
        names = list(shapes)
        write_sparse(tmp_path / size, shapes, config, [names[::2], names[1::2]])
    small, large = added_bytes(tmp_path, "qwen3", model_check=False, digests=digests)
    packed = "model.layers.0.mlp.gate_up_proj.weight"
    found = values_at(tmp_path / "large-out" / SINGLE_NAME, packed, [0, 2048 * 24576 - 1, 2048 * 24576, -1])
    gate, up = (list(shapes).index(f"model.layers.0.mlp.{name}_proj.weight") + 1 for name in ("gate", "up"))
    assert found == [gate, gate, up, up]
    assert large < 32 << 20
    assert small + large < 64 << 20


def mixture(hidden: int, inner: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    shapes, config = dense(hidden, inner)
    experts = {
        f"model.layers.0.mlp.experts.{number}.{name}_proj.weight": (hidden, inner)
        if name == "down"
        else (inner, hidden)
        for number in range(EXPERTS)
        for name in ("gate", "up", "down")
    }
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    shapes["model.layers.0.mlp.gate.weight"] = (EXPERTS, hidden)
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": inner, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {**experts, **shapes}, config


def test_experts_that_span_all_shards(tmp_path: Path) -> None:
    """One layer of 200 MB, the parts of every expert in different files of eight."""
    for size, (hidden, inner) in (("small", (8, 16)), ("large", (1024, 2048))):
        shapes, config = mixture(hidden, inner)
        names = list(shapes)
        write_sparse(tmp_path / size, shapes, config, [names[number::8] for number in range(8)])
    _, large = added_bytes(tmp_path, "qwen3-moe", model_check=True)  # torch is imported in the first
    one = 1024 * 2048
    path = tmp_path / "large-out" / SINGLE_NAME
    for number in range(EXPERTS):
        gate, up, down = (3 * number + place for place in (1, 2, 3))
        begin = 2 * one * number
        places = [begin, begin + one - 1, begin + one, begin + 2 * one - 1]
        assert values_at(path, "model.layers.0.mlp.experts.gate_up_proj", places) == [gate, gate, up, up]
        assert values_at(path, "model.layers.0.mlp.experts.down_proj", [one * number]) == [down]
    assert large < 48 << 20
