"""Generation speed of a checkpoint on the CPU, stock beside converted.

    python benchmarks/generation.py my-model my-model-kconvert

Both models are loaded once and run in turns in one process, so that a noisy machine is noisy for both: a prefill of
256 tokens, and greedy decoding of 48 tokens from a prompt of 16.  Printed are the median time of each, and the median
of the ratios of neighbouring runs with its range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kconvert import load_converted

PREFILL_TOKENS = 256
PROMPT_TOKENS = 16
NEW_TOKENS = 48


def _tokens(model: Any, count: int) -> torch.Tensor:
    size = model.config.get_text_config().vocab_size
    return torch.randint(0, size, (1, count), generator=torch.Generator().manual_seed(0))


def prefill(model: Any) -> None:
    """One forward over `PREFILL_TOKENS` tokens."""
    with torch.no_grad():
        model(_tokens(model, PREFILL_TOKENS))


def decode(model: Any) -> None:
    """Greedy decoding of exactly `NEW_TOKENS` tokens."""
    prompt = _tokens(model, PROMPT_TOKENS)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )


def _seconds(run: Callable[[Any], None], model: Any) -> float:
    started = time.perf_counter()
    run(model)
    return time.perf_counter() - started


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", help="the stock checkpoint")
    parser.add_argument("converted", help="what kconvert made of it")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of runs; the first pair is not counted")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    stock = AutoModelForCausalLM.from_pretrained(arguments.source, dtype=arguments.dtype)
    converted = load_converted(arguments.converted, dtype=arguments.dtype)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {stock.dtype}")
    for name, run, tokens in (("prefill", prefill, PREFILL_TOKENS), ("decode", decode, NEW_TOKENS)):
        pairs = [(_seconds(run, stock), _seconds(run, converted)) for _ in range(arguments.rounds + 1)][1:]
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{name}: stock {tokens / theirs:.1f} tokens/s, converted {tokens / ours:.1f} tokens/s; "
            f"time ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
