"""How long `inspect`, `plan` and `apply` take for 100,000 tensors, and for a header near the format's limit.

    python benchmarks/many_tensors.py [--runs 3] [--work DIR] [--json]

Makes checkpoints of tiny tensors (less than 0.2 GB): 9,091 layers with the names of Qwen3, in one file and in 50; the
same number of tensors outside of all layers; and 330,000 with names so long that the header has 95 of the 100 MB that the
format allows.  Each command runs in a process of its own, without the model check.  Printed are the least user seconds
and the largest peak of resident memory, with the interpreter's own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAYER = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (16, 8),
    "self_attn.k_proj.weight": (8, 8),
    "self_attn.v_proj.weight": (8, 8),
    "self_attn.o_proj.weight": (8, 16),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
SOURCES: Mapping[str, Mapping[str, int]] = {
    "layers": {"layers": 9091},
    "layers in 50 files": {"layers": 9091, "files": 50},
    "others": {"layers": 2, "others": 100_000},
    "a header of 95 MB": {"layers": 2, "others": 330_000, "name_letters": 200},
}
MEASURE = """
import resource, sys
from kconvert.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(f"measured {code} {used.ru_utime} {used.ru_maxrss * 1024}", file=sys.stderr)
"""


def shapes_of(*, layers: int, others: int = 0, name_letters: int = 0) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, 8)}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    found |= {f"other.blocks.{number}.{'x' * name_letters}weight": (4,) for number in range(others)}
    return {**found, "model.norm.weight": (8,), "lm_head.weight": (10, 8)}


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A bf16 file of zeros, without blocks on a disk that knows holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin)


def write_checkpoint(folder: Path, *, files: int = 1, **what: int) -> int:
    """A checkpoint in `folder`; gives the number of its tensors."""
    folder.mkdir()
    shapes = shapes_of(**what)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if files == 1:
        write_file(folder / "model.safetensors", shapes)
        return len(shapes)
    names, size = list(shapes), -(-len(shapes) // files)
    weight_map: dict[str, str] = {}
    for number in range(files):
        part, file = names[number * size : (number + 1) * size], f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_file(folder / file, {name: shapes[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return len(shapes)


def measured(argv: Sequence[str]) -> tuple[float, int]:
    """User seconds and peak memory in bytes of a command of kconvert."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", MEASURE, *argv], capture_output=True, text=True, env=env, check=True)
    code, seconds, peak = done.stderr.splitlines()[-1].split()[1:]
    if code != "0":
        sys.exit(done.stderr)
    return float(seconds), int(peak)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where the files are made; a temporary folder if left out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name, what in SOURCES.items():
            source, output = Path(work) / "source", Path(work) / "output"
            num_tensors = write_checkpoint(source, **what)
            recipe = ["qwen3", str(source), "--no-model-check"]
            commands = {"inspect": [str(source)], "plan": recipe, "apply": [*recipe, "-o", str(output), "--quiet"]}
            for command, argv in commands.items():
                found = []
                for _ in range(options.runs):
                    shutil.rmtree(output, ignore_errors=True)
                    found.append(measured([command, *argv]))
                seconds, peak = min(each[0] for each in found), max(each[1] for each in found)
                rows.append({"source": name, "tensors": num_tensors, "command": command, "s": seconds, "bytes": peak})
                if not options.json:
                    print(f"{name:20} {num_tensors:8} {command:8} {seconds:6.1f} s {peak / 1e6:8.0f} MB", flush=True)
            shutil.rmtree(source)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
