"""The CPU kernels beside stock transformers, in turns in one process: a real small model, and its parts.

    python benchmarks/cpu_model.py my-model my-model-kconvert [--json FILE]

- a prefill of 512 tokens, and greedy decoding of 48 tokens from a prompt of 16;
- an MLP of the model's sizes alone, for 512 rows and for one;
- a mixture of 32 experts, 4 of them for each token, beside the stock loop and beside transformers' `grouped_mm`.

Times are medians, and ratios medians of those of neighbouring runs, with the range of the middle half.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.utils import logging as transformers_logging

from kconvert import __version__, load_converted
from kconvert.kernels.assign import assign_kernels
from kconvert.kernels.ops.experts.layout import ExpertsLayout
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout

PREFILL_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 512, 16, 48
Runs = Mapping[str, Callable[[], Any]]


def in_turns(runs: Runs, *, seconds: float, least: int) -> dict[str, Any]:
    """Median milliseconds of each run, and of ours its ratio to the others."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    started, turn = time.perf_counter(), 0
    while turn <= least or time.perf_counter() - started < seconds:
        for name in sorted(runs, reverse=turn % 2 == 1):
            before = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - before)
        turn += 1
    counted = {name: found[1:] for name, found in times.items()}  # the first turn is not
    ratios = {}
    for name in runs.keys() - {"kconvert"}:
        pairs = sorted(ours / theirs for ours, theirs in zip(counted["kconvert"], counted[name], strict=True))
        quarter = len(pairs) // 4
        ratios[name] = [statistics.median(pairs), pairs[quarter], pairs[-1 - quarter]]
    return {"ms": {name: statistics.median(found) * 1e3 for name, found in counted.items()}, "ratio": ratios}


def tokens_of(model: Any, count: int) -> torch.Tensor:
    """The same random tokens at every call."""
    size = model.config.get_text_config().vocab_size
    return torch.randint(0, size, (1, count), generator=torch.Generator().manual_seed(0))


def decode(model: Any) -> None:
    """Greedy decoding of exactly `NEW_TOKENS` tokens."""
    prompt = tokens_of(model, PROMPT_TOKENS)
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **lengths)


def prefill(model: Any) -> None:
    """One forward over `PREFILL_TOKENS` tokens."""
    model(tokens_of(model, PREFILL_TOKENS))


def model_runs(models: Mapping[str, Any]) -> dict[str, Runs]:
    """Prefill and decoding."""
    return {
        f"{what} {count}": {name: partial(run, model) for name, model in models.items()}
        for what, count, run in (("prefill", PREFILL_TOKENS, prefill), ("decode", NEW_TOKENS, decode))
    }


def mlp_runs(stock: torch.nn.Module, hidden: int, dtype: torch.dtype) -> dict[str, Runs]:
    """The MLP of a layer alone."""
    packed = GatedMLPLayout.patch([copy.deepcopy(stock)])
    assign_kernels(packed, GatedMLPLayout, ("cpu_fused_swiglu",), origin="call", with_defaults=False)
    found: dict[str, Runs] = {}
    for rows in (PREFILL_TOKENS, 1):
        x = torch.randn(1, rows, hidden, dtype=dtype)
        found[f"MLP, {rows} x {hidden}"] = {"stock": partial(stock, x), "kconvert": partial(packed, x)}
    return found


def experts_runs(dtype: torch.dtype) -> dict[str, Runs]:
    """A mixture's experts."""
    config = Qwen3MoeConfig(hidden_size=512, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4)
    modules: dict[str, Any] = {}
    for name, implementation in (("stock", "eager"), ("grouped_mm", "grouped_mm")):
        own = copy.deepcopy(config)
        own._experts_implementation = implementation
        modules[name] = Qwen3MoeExperts(own).to(dtype)
        for number, weight in enumerate(modules[name].parameters()):
            torch.nn.init.normal_(weight, 0.0, 0.02, generator=torch.Generator().manual_seed(number))
    modules["kconvert"] = ExpertsLayout.patch([copy.deepcopy(modules["stock"])])
    assign_kernels(modules["kconvert"], ExpertsLayout, ("cpu_fused_moe",), origin="call", with_defaults=False)
    found: dict[str, Runs] = {}
    for rows in (PREFILL_TOKENS, 1):
        x = torch.randn(rows, 512, dtype=dtype)
        weights, ids = torch.rand(rows, 32).softmax(-1).topk(4)
        args = x, ids, weights.to(dtype)
        expected, *others = (module(*args) for module in modules.values())
        for other in others:
            torch.testing.assert_close(other, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        found[f"experts, {rows} x 512"] = {name: partial(module, *args) for name, module in modules.items()}
    return found


@torch.no_grad()
def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", help="the stock checkpoint, of the Llama architecture")
    parser.add_argument("converted", help="what kconvert made of it")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--rounds", type=int, default=7, help="the least pairs of runs")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a part is timed at least")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    machine = {name: version(name) for name in ("torch", "transformers")}
    machine |= {"kconvert": __version__, "device": f"{torch.get_num_threads()} cores of an x86 CPU"}
    print(machine)
    measured: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        models = {
            "stock": AutoModelForCausalLM.from_pretrained(arguments.source, dtype=dtype),
            "kconvert": load_converted(arguments.converted, dtype=dtype),
        }
        mlp = models["stock"].model.layers[0].mlp
        parts = model_runs(models) | mlp_runs(mlp, models["stock"].config.hidden_size, dtype) | experts_runs(dtype)
        for what, runs in parts.items():
            found = in_turns(runs, seconds=arguments.seconds, least=arguments.rounds)
            name = f"{what}, {str(dtype).removeprefix('torch.')}"
            measured[name] = found
            shown = [f"{key} {value:.3f}" for key, value in found["ms"].items()]
            ratios = [
                f"/ {key} {ratio:.3f} ({low:.3f} to {high:.3f})" for key, (ratio, low, high) in found["ratio"].items()
            ]
            print(f"{name:<34} {', '.join(shown)} ms; {'; '.join(ratios)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "measured": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
