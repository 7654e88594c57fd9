"""`make demo`: convert a small Qwen3 checkpoint made on the spot, load it, compare it with the stock model, verify it.

Everything happens in a temporary directory; `python examples/demo.py DIRECTORY` keeps the files in DIRECTORY.
Exit code 0 only where the converted model gives the stock model's results.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from kconvert import load_converted
from kconvert.cli import main as run_kconvert
from kconvert.errors import KconvertError

# Kernels may round otherwise than stock code: this many bfloat16 steps (2**-8) of the largest logit are let pass.
ROUNDING_STEPS = 4


def make_checkpoint(directory: Path) -> None:
    """Write a Qwen3 checkpoint with random weights: 4 layers, 2 MB of bfloat16 in 2 shards, no tokenizer."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # a norm weight: as made, all ones would hide a lost or swapped one
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    model.bfloat16().save_pretrained(directory, max_shard_size="1MB")


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, stock or converted."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    return tensors


def show_layer(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Print the names and shapes in the first layer that only one of the two has."""
    for title, tensors, others in (("before", before, after), ("after", after, before)):
        for name in sorted(tensors.keys() - others.keys()):
            if name.startswith("model.layers.0."):
                print(f"   {title:<8}{name:<43}{list(tensors[name].shape)}")


def stock_refusal(directory: Path) -> str | None:
    """What stock transformers says when it is given a converted directory; None where it would load it."""
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except OSError as error:
        return str(error).replace(str(directory), directory.name)
    return None


def compute_logits(model: Any) -> torch.Tensor:
    """Logits `[2, 32, vocab]` of the same random tokens for every model."""
    tokens = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def run(directory: Path) -> bool:
    """Run all steps in `directory`; whether every comparison held."""
    source, converted, back = (directory / name for name in ("my-model", "my-model-demo", "my-model-back"))
    if source.exists():
        print(f"FAILED: {source} exists already; name another directory, or remove it")
        return False

    print("1. Make a small Qwen3 checkpoint with random weights")
    make_checkpoint(source)
    before = read_tensors(source)
    size = sum(tensor.nbytes for tensor in before.values()) / 1e6
    print(f"   {source}")
    print(f"   {len(before)} tensors, {size:.1f} MB of bfloat16, 4 layers\n")

    print("2. Convert it: kconvert apply qwen3 my-model -o my-model-demo", flush=True)
    code = run_kconvert(["apply", "qwen3", str(source), "-o", str(converted)])
    if code != 0:
        print(f"\nFAILED: kconvert stopped with exit code {code}")
        return False

    print("\n3. What changed in layer 0 (all other tensors keep name, shape and bytes)")
    show_layer(before, read_tensors(converted))

    print("\n4. Load it with load_converted, and compare its logits with the stock model's")
    stock = compute_logits(AutoModelForCausalLM.from_pretrained(source, dtype="auto"))
    is_same = torch.equal(stock, compute_logits(load_converted(converted, kernels="reference")))
    print(f'   kernels="reference"   equal bit for bit: {"yes" if is_same else "NO"}')
    model = load_converted(converted)
    difference = (stock - compute_logits(model)).abs().max().item()
    largest = stock.abs().max().item()
    is_near = difference <= ROUNDING_STEPS * 2**-8 * largest
    print(f'   kernels="auto"        largest difference {difference:.2g}, largest logit {largest:.2g}')

    print("\n5. Which kernel runs where: print(model.kconvert_report)")
    print(model.kconvert_report)

    print("\n6. Stock transformers does not take the converted directory for a stock one")
    refusal = stock_refusal(converted)
    print(textwrap.fill(refusal or "NO: it loads it", 77, initial_indent="   ", subsequent_indent="   "))

    print("\n7. Go back: model.save_pretrained writes the stock layout")
    model.save_pretrained(back)
    restored = read_tensors(back)
    same = [name for name in before if name in restored and torch.equal(before[name], restored[name])]
    is_back = before.keys() == restored.keys() and len(same) == len(before)
    print(f"   {len(same)} of {len(before)} tensors are those of the source")

    print("\n8. Compare module by module, and the whole model:", flush=True)
    print("  kconvert verify my-model-demo --source my-model --level modules --level logits", flush=True)
    levels = ("--level", "modules", "--level", "logits")
    code = run_kconvert(["verify", str(converted), "--source", str(source), *levels])
    print()

    failed = [
        text
        for text, holds in (
            ("the reference is not equal to the stock model", is_same),
            ("the kernels are too far from the stock model", is_near),
            ("stock transformers loads the converted directory", refusal is not None),
            ("the saved tensors are not those of the source", is_back),
            (f"kconvert verify stopped with exit code {code}", code == 0),
        )
        if not holds
    ]
    print(f"FAILED: {'; '.join(failed)}" if failed else "OK: the converted model gives what the stock model gives.")
    return not failed


def main(directory: Path | None = None) -> int:
    """Run the demo in `directory`, or in a temporary one that is removed; the exit code."""
    try:
        if directory is not None:
            return 0 if run(directory) else 1
        with tempfile.TemporaryDirectory(prefix="kconvert-demo-") as temporary:
            return 0 if run(Path(temporary)) else 1
    except KconvertError as error:
        print(f"\nFAILED: {error}")
        return 1


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
