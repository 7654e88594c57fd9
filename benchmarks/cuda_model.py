"""A Qwen3-8B-shaped model on one CUDA device: stock transformers, Liger and kconvert side by side.

    python benchmarks/cuda_model.py [--json FILE] [--profile] [--only prefill,decode,static,train]

Random bf16 weights (16.4 GB a model; all three are held at once, so that every measurement is taken in turns).  First
the results are compared with a float32 model on a 4-layer slice; then timed are

- a prefill of 4096 tokens, beside the model's products and attention alone;
- greedy decoding of one sequence, eagerly;
- the same with a static cache, which transformers compiles: the whole of `generate`, and one forward inside of it;
- a training step of the slice: batch 4 x 2048, loss by transformers, gradients, a fused AdamW.

Medians, and medians of the ratios of neighbouring runs.  Liger is applied without its fused loss.  Its patch replaces
names of transformers' module for the whole process; they are put back after each of its calls.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from kconvert import __version__
from kconvert.kernels import apply_default_kernels, apply_kernel

DEVICE, DTYPE = "cuda", torch.bfloat16
SIZES: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
TINY: dict[str, int] = {**SIZES, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SLICE_LAYERS = 4
PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS, TRAIN_SHAPE = 128, 72, 4096, (4, 2048)
SUBJECTS = ("stock", "liger", "kconvert")


def build(sizes: dict[str, int], dtype: torch.dtype = DTYPE) -> Any:
    """A model with the same random weights at every call."""
    config = Qwen3Config(**sizes, tie_word_embeddings=False)  # type: ignore[arg-type]
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(dtype).to_empty(device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.empty(parameter.shape, dtype=DTYPE, device=DEVICE)
        drawn.normal_(1 if name.endswith("norm.weight") else 0, 0.02, generator=generator)
        parameter.data.copy_(drawn)
    model.model.rotary_emb = modeling_qwen3.Qwen3RotaryEmbedding(config).to(DEVICE)
    model.config._attn_implementation = "sdpa"
    return model.eval()


_STOCK_NAMES = dict(vars(modeling_qwen3))
_LIGER_NAMES: dict[str, Any] = {}


def patch(subject: str, model: Any) -> Any:
    """Apply Liger or our kernels to a stock model, and say what runs."""
    if subject == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model, fused_linear_cross_entropy=False)
        _LIGER_NAMES.update(vars(modeling_qwen3))
        vars(modeling_qwen3).update(_STOCK_NAMES)
    if subject == "kconvert":
        apply_kernel("cuda_fused_decoder_layer", model=model)
        apply_default_kernels(model, "auto")
        print(model.kconvert_report, flush=True)
    return model


@contextmanager
def names_of(subject: str) -> Iterator[None]:
    """The names in transformers' module that a subject was patched with."""
    try:
        if subject == "liger":
            vars(modeling_qwen3).update(_LIGER_NAMES)
        yield
    finally:
        vars(modeling_qwen3).update(_STOCK_NAMES)


def seconds_of(run: Callable[[], Any], *, times: int = 1) -> float:
    """One call, waited for; of several in a row, which end as fast as the device can go on, the mean."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def in_turns(
    measure: Callable[[str], float], subjects: tuple[str, ...], *, warm: int, rounds: int
) -> dict[str, list[float]]:
    """What `measure` gives for every subject, one after another in each round; the first `warm` rounds do not count.

    The order changes from round to round: a device at its power limit is faster after a subject that needs less of it.
    """
    found: dict[str, list[float]] = {subject: [] for subject in subjects}
    shuffled = random.Random(0)
    for turn in range(warm + rounds):
        for subject in shuffled.sample(subjects, len(subjects)):
            with names_of(subject):
                measured = measure(subject)
            if turn >= warm:
                found[subject].append(measured)
    return found


class Results:
    """What was measured, printed as it comes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, what: str, times: dict[str, list[float]], **others: Any) -> None:
        """Medians in milliseconds, and our ratio to each other subject."""
        entry: dict[str, Any] = {"ms": {name: statistics.median(all_) * 1e3 for name, all_ in times.items()}}
        entry["ratio"] = {
            f"kconvert / {name}": statistics.median(
                ours / theirs for ours, theirs in zip(times["kconvert"], all_, strict=True)
            )
            for name, all_ in times.items()
            if name != "kconvert"
        }
        entry["all_ms"] = {name: [round(each * 1e3, 3) for each in all_] for name, all_ in times.items()}
        self.found[what] = entry | others
        texts = [f"{name} {value:.2f}" for name, value in entry["ms"].items()]
        ratios = [f"{name} {value:.3f}" for name, value in entry["ratio"].items()]
        more = [f"{name} {value}" for name, value in others.items()]
        print(f"{what:<26} {', '.join(texts)} ms; {', '.join([*ratios, *more])}", flush=True)


def check(sizes: dict[str, int], shape: tuple[int, int]) -> dict[str, float]:
    """Errors of logits and gradients on the slice, as a share of the float32 model's norm; raises where ours are not near stock's."""
    sizes = {**sizes, "num_hidden_layers": min(SLICE_LAYERS, sizes["num_hidden_layers"])}
    ids = torch.randint(0, sizes["vocab_size"], shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))

    def run(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(ids).logits.float()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return logits.detach().cpu(), model.model.embed_tokens.weight.grad.float().cpu()

    expected = run(build(sizes, torch.float32))
    errors: dict[str, float] = {}
    for subject in SUBJECTS:
        model = patch(subject, build(sizes))
        with names_of(subject):
            found = run(model)
        for what, one, other in zip(("logits", "gradient"), found, expected, strict=True):
            errors[f"{subject} {what}"] = float((one - other).norm() / other.norm())
    print("relative errors:", {name: f"{value:.2e}" for name, value in errors.items()}, flush=True)
    for what in ("logits", "gradient"):
        if not errors[f"kconvert {what}"] <= 1.2 * errors[f"stock {what}"]:
            raise SystemExit(f"our {what} are further from float32 than stock's")
    return errors


def products(model: Any, tokens: int) -> Callable[[], None]:
    """The packed products and the attention of a forward over `tokens` tokens, and nothing else."""
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, middle, joined = (
        torch.randn(1, tokens, width, device=DEVICE, dtype=DTYPE)
        for width in (config.hidden_size, config.intermediate_size, heads * dim)
    )

    @torch.inference_mode()
    def run() -> None:
        for layer in model.model.layers:
            qkv = F.linear(hidden, layer.self_attn.qkv_proj.weight).view(1, tokens, heads + 2 * kv_heads, dim)
            q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            F.linear(joined, layer.self_attn.o_proj.weight)
            F.linear(hidden, layer.mlp.gate_up_proj.weight)
            F.linear(middle, layer.mlp.down_proj.weight)
        F.linear(hidden[:, -1:], model.lm_head.weight)

    return run


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """`NEW_TOKENS` greedy tokens."""
    with torch.inference_mode():
        made: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            **options,
        )
    return made


def forward_seconds(model: Any, ids: torch.Tensor) -> float:
    """The median time of one compiled forward as `generate` calls it, waited for."""
    times: list[float] = []
    make = model.get_compiled_call

    def timed(config: Any) -> Callable[..., Any]:
        call = make(config)

        def run(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            started = time.perf_counter()
            output = call(*args, **kwargs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            return output

        return run

    model.get_compiled_call = timed
    try:
        generate(model, ids, cache_implementation="static")
    finally:
        del model.get_compiled_call
    return statistics.median(times)


def trainer(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """One training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    model.train()
    return step


def print_profile(what: str, run: Callable[[], Any], rows: int) -> None:
    """The kernels that take the longest."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    print(f"--- {what}: {total / 1e3:.2f} ms on the device", flush=True)
    for each in kernels[:rows]:
        print(f"{each.self_device_time_total / 1e3:9.3f} ms {each.count:5d} x  {each.key[:130]}")


def bench_inference(sizes: dict[str, int], only: set[str], results: Results, rows: int, rounds: int) -> None:
    """Prefill and decoding."""
    models: dict[str, Any] = {subject: patch(subject, build(sizes)) for subject in SUBJECTS}
    ids = torch.randint(0, sizes["vocab_size"], (1, PREFILL_TOKENS), device=DEVICE)
    prompt = ids[:, :PROMPT_TOKENS]

    @torch.inference_mode()
    def prefill(subject: str) -> None:
        models[subject](ids, logits_to_keep=1)

    if "prefill" in only:
        floor = products(models["kconvert"], PREFILL_TOKENS)
        runs: dict[str, Callable[[], Any]] = {name: lambda name=name: prefill(name) for name in models}  # type: ignore[misc]
        runs["products and attention"] = floor
        times = in_turns(lambda name: seconds_of(runs[name], times=4), tuple(runs), warm=1, rounds=rounds)
        results.add("prefill 4096", times)
        for name in runs if rows else ():
            with names_of(name):
                print_profile(f"prefill, {name}", runs[name], rows)
    if "decode" in only:
        runs = {name: lambda name=name: generate(models[name], prompt) for name in models}  # type: ignore[misc]
        times = in_turns(lambda name: seconds_of(runs[name]) / NEW_TOKENS, SUBJECTS, warm=1, rounds=rounds // 2 + 1)
        results.add("decode, eager, a token", times)
    if "static" in only:
        pair = ("stock", "kconvert")
        runs = {name: lambda name=name: generate(models[name], prompt, cache_implementation="static") for name in pair}  # type: ignore[misc]
        times = in_turns(lambda name: seconds_of(runs[name]) / NEW_TOKENS, pair, warm=2, rounds=rounds)
        weights = sum(each.numel() for name, each in models["stock"].named_parameters() if "embed_tokens" not in name)
        results.add("static, generate, a token", times, weights_gb=round(weights * 2 / 1e9, 2))
        times = in_turns(lambda name: forward_seconds(models[name], prompt), pair, warm=1, rounds=rounds // 2 + 1)
        results.add("static, one forward", times)
        for name in pair if rows else ():
            print_profile(f"static, {name}, {NEW_TOKENS} tokens", runs[name], rows)


def bench_training(sizes: dict[str, int], results: Results, rows: int, rounds: int) -> None:
    """A training step of the slice."""
    sizes = {**sizes, "num_hidden_layers": min(SLICE_LAYERS, sizes["num_hidden_layers"])}
    ids = torch.randint(0, sizes["vocab_size"], TRAIN_SHAPE, device=DEVICE)
    steps = {subject: trainer(patch(subject, build(sizes)), ids) for subject in SUBJECTS}
    peaks: dict[str, float] = {}

    def measure(subject: str) -> float:
        torch.cuda.empty_cache()
        steps[subject]()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = min(seconds_of(steps[subject]) for _ in range(2))
        peaks[subject] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
        return found

    times = in_turns(measure, SUBJECTS, warm=1, rounds=rounds)
    results.add("training step", times, peak_gb=peaks)
    for name, step in steps.items() if rows else ():
        with names_of(name):
            print_profile(f"training step, {name}", step, rows)


def copy_speed() -> float:
    """GB/s read and written by a copy of 2 GiB on the device."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / statistics.median(seconds_of(lambda: target.copy_(source)) for _ in range(10)) / 1e9


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print the longest kernels of each")
    parser.add_argument("--only", default="prefill,decode,static,train", help="what to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    sizes, only = (TINY if arguments.tiny else SIZES), set(arguments.only.split(","))
    machine = {name: version(name) for name in ("torch", "triton", "transformers", "liger-kernel")}
    machine |= {"kconvert": __version__, "device": torch.cuda.get_device_name(), "copy_gb_per_s": f"{copy_speed():.0f}"}
    print(machine, flush=True)
    results = Results()
    errors = check(sizes, (2, 512))
    if only & {"prefill", "decode", "static"}:
        bench_inference(sizes, only, results, arguments.profile, arguments.rounds)
    torch.cuda.empty_cache()
    if "train" in only:
        bench_training(sizes, results, arguments.profile, arguments.rounds)
    if arguments.json:
        found = {"machine": machine, "errors": errors, "measured": results.found}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
