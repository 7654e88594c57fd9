"""Load time of a mixture of experts on the CPU: a file per expert tensor as published, beside the stacked form.

    python benchmarks/moe_load.py [--experts 64 --layers 12] [--json]

Makes a random bf16 Qwen3-MoE in a temporary folder (1.9 GB with the defaults, and as much again converted), converts it
with the recipe `qwen3-moe` and with `bake` alone, and loads all three in turns in one process: stock `from_pretrained` of
the published form, stock `from_pretrained` of the baked files, and `load_converted` of either.  The files are in the
page cache.  Printed are medians and the median of the ratios of neighbouring runs with its range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from kconvert import load_converted
from kconvert.convert import apply_recipe

BAKE = "recipe: 1\nname: bake\nmodel_type: [qwen3_moe]\nbake: true\npatches: []\n"


def make_source(directory: Path, *, experts: int, layers: int) -> int:
    """Save a random model as published; returns its number of parameters."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        made: Any = Qwen3MoeForCausalLM(config)
    model = made.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(parameter.numel() for parameter in model.parameters())


def _seconds(load: Callable[[], Any]) -> float:
    started = time.perf_counter()
    load()
    return time.perf_counter() - started


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of loads; the first is not counted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        source, baked, packed = (Path(folder) / name for name in ("published", "baked", "packed"))
        parameters = make_source(source, experts=arguments.experts, layers=arguments.layers)
        recipe = Path(folder) / "bake.yaml"
        recipe.write_text(BAKE, encoding="utf-8")
        converted = {"bake": apply_recipe(str(recipe), source, baked).total_seconds}
        converted["qwen3-moe"] = apply_recipe("qwen3-moe", source, packed).total_seconds
        loads: dict[str, Callable[[], Any]] = {
            "stock, published files": lambda: Qwen3MoeForCausalLM.from_pretrained(source, dtype="auto"),
            "stock, baked files": lambda: Qwen3MoeForCausalLM.from_pretrained(baked, dtype="auto", variant="kconvert"),
            "load_converted, baked": lambda: load_converted(baked),
            "load_converted, qwen3-moe": lambda: load_converted(packed),
        }
        rounds = [{name: _seconds(load) for name, load in loads.items()} for _ in range(arguments.rounds + 1)][1:]
    first = next(iter(loads))
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters": parameters,
        "convert_seconds": converted,
        "load": {},
    }
    for name in loads:
        ratios = sorted(each[name] / each[first] for each in rounds)
        result["load"][name] = {
            "median_seconds": statistics.median(each[name] for each in rounds),
            "median_ratio": statistics.median(ratios),
            "ratio_range": [ratios[0], ratios[-1]],
        }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {parameters / 1e9:.2f} B parameters")
    for name, seconds in converted.items():
        print(f"convert with {name}: {seconds:.1f} s")
    for name, found in result["load"].items():
        low, high = found["ratio_range"]
        print(f"{name}: {found['median_seconds']:.3f} s; ratio {found['median_ratio']:.3f} ({low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
