"""Out of kconvert and into transformers on a GPU: does an exported package give the stock model through KernelConfig?

    python benchmarks/export_round_trip.py

Makes a small Qwen3, converts it by two recipes, exports each conversion as a package, and loads it with
`from_pretrained(..., variant="kconvert", use_kernels=True, kernel_config=...)`, from the folder and from a Hub cache
without network.  Every load has a process of its own, for KernelConfig changes transformers for good.  Compared with
the stock model: names and values of the weights, logits, generated tokens, gradients, and what `save_pretrained`
writes.  Prints one JSON value, whose `verdict` is `ok` or `failed`; the exit code is 0 or 1.

transformers 5.22 refuses the CPU as a device of KernelConfig; `--device cpu` adds it to the list that is asked, to try
this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RECIPES = ("qwen3", "qwen3-fused-norm-mlp")
PLACES = ("folder", "cache")
DTYPES = ("float32", "bfloat16")
REPOSITORY = "acme/kernels"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS = 64
FLOAT32_TOLERANCE = 1e-4
"""Of the largest logit: a packed product may sum in another order."""


def make_source(directory: Path) -> None:
    """A Qwen3 of 4 layers with random weights, the norms' too, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1.0 + 0.25 * noise if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)


def fill_cache(package: Path, cache: Path) -> None:
    """The package as a Hub cache holds version 1 of a kernel repository."""
    from huggingface_hub.file_download import repo_folder_name

    folder = cache / "hub" / repo_folder_name(repo_id=REPOSITORY, repo_type="kernel")
    shutil.copytree(package, folder / "snapshots" / COMMIT, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("v1", "main"):
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / name).write_text(COMMIT)


def prepare(directory: Path) -> list[dict[str, str]]:
    """Convert and export; gives the jobs."""
    from kconvert.convert import apply_recipe
    from kconvert.export import PackagePlace, export_package, kernel_config

    source = directory / "source"
    make_source(source)
    jobs = []
    for recipe in RECIPES:
        converted = apply_recipe(recipe, source, directory / recipe).output
        package = export_package(converted, directory / f"{recipe}-package").directory
        fill_cache(package, directory / f"{recipe}-cache")
        for place, where in (("folder", PackagePlace(str(package))), ("cache", PackagePlace(REPOSITORY, version=1))):
            config = directory / f"{recipe}-{place}.py"
            config.write_text(kernel_config(converted, where, trust_remote_code=True).to_python())
            jobs += [
                {
                    "name": f"{recipe}, {place}, {dtype}",
                    "source": str(source),
                    "converted": str(converted),
                    "config": str(config),
                    "cache": str(directory / f"{recipe}-cache"),
                    "dtype": dtype,
                }
                for dtype in DTYPES
            ]
    return jobs


def look(job: dict[str, str], device: str) -> dict[str, Any]:
    """Load both models in this process and compare them."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3ForCausalLM

    cls: Any = Qwen3ForCausalLM
    dtype = getattr(torch, job["dtype"])
    if device == "cpu":
        from transformers.utils import kernel_config as module

        module.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    exact = cls.from_pretrained(job["source"], dtype=torch.float32, device_map=device)
    stock = cls.from_pretrained(job["source"], dtype=dtype, device_map=device)
    names: dict[str, Any] = {}
    exec(Path(job["config"]).read_text(), names)
    model, info = cls.from_pretrained(
        job["converted"],
        variant="kconvert",
        dtype=dtype,
        device_map=device,
        use_kernels=True,
        kernel_config=names["kernel_config"],
        output_loading_info=True,
    )
    ids = torch.arange(2, 2 + TOKENS, device=device).unsqueeze(0)

    def logits(each: Any) -> Any:
        with torch.no_grad():
            return each(ids).logits.double()

    wanted, largest = logits(stock), logits(exact).abs().max().item()
    difference = (logits(model) - wanted).abs().max().item()
    rounding = (logits(exact) - wanted).abs().max().item()
    allowed = FLOAT32_TOLERANCE * largest if dtype == torch.float32 else 2 * rounding
    files = load_file(Path(job["converted"]) / "model.kconvert.safetensors")
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    greedy = {"max_new_tokens": 16, "do_sample": False}
    prompt = ids[:, :8]
    saved = Path(tempfile.mkdtemp()) / "saved"
    model.save_pretrained(saved)
    stored, originals = load_file(saved / "model.safetensors"), load_file(Path(job["source"]) / "model.safetensors")
    kernels = sorted(
        {module.forward.__func__.__qualname__ for module in model.modules() if type(module).__name__.endswith("Layout")}
    )
    checks = {
        "loading": not info["missing_keys"] and not info["unexpected_keys"],
        "names": sorted(files) == sorted(state),
        "values": all(torch.equal(tensor.to(dtype), state[name]) for name, tensor in files.items() if name in state),
        "kernels": all(name.startswith(("Fused", "Packed")) for name in kernels) and len(kernels) == 3,
        "device": {str(parameter.device.type) for parameter in model.parameters()} == {device},
        "logits": difference <= allowed,
        "saved": sorted(stored) == sorted(originals)
        and all(torch.equal(tensor.to(dtype), stored[name]) for name, tensor in originals.items() if name in stored),
    }
    if dtype == torch.float32:
        checks["tokens"] = torch.equal(model.generate(prompt, **greedy), stock.generate(prompt, **greedy))
    model.train()
    model(ids, labels=ids).loss.backward()
    checks["gradients"] = all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "difference": difference,
        "allowed": allowed,
        "largest_logit": largest,
        "kernels": kernels,
        "stock_ms": _milliseconds(lambda: logits(stock), device),
        "exported_ms": _milliseconds(lambda: logits(model), device),
    }


def _milliseconds(run: Any, device: str) -> float:
    import torch

    times = []
    for _ in range(12):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 3)


def run_job(job: dict[str, str], device: str) -> dict[str, Any]:
    """`look` in a process of its own, without network, and with the cache that the job names."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_KERNELS", "KERNELS_CACHE")}
    environment |= {"HF_HOME": job["cache"], "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--device", device, "--job", json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"ok": False, "error": (done.stderr or done.stdout)[-4000:]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--job", help="for the processes that this script starts")
    arguments = parser.parse_args()
    if arguments.job:
        try:
            print(json.dumps(look(json.loads(arguments.job), arguments.device)))
        except Exception:  # noqa: BLE001 - the one who started this process prints it
            traceback.print_exc()
            return 1
        return 0
    if find_spec("accelerate") is None:
        print(
            json.dumps({"verdict": "failed", "error": "transformers loads to a device only with accelerate installed"})
        )
        return 1
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # kconvert need not be installed
    with tempfile.TemporaryDirectory() as directory:
        answers = {job["name"]: run_job(job, arguments.device) for job in prepare(Path(directory))}
    ok = len(answers) == len(RECIPES) * len(PLACES) * len(DTYPES) and all(answer["ok"] for answer in answers.values())
    versions = {name: version(name) for name in ("torch", "transformers", "kernels", "huggingface_hub")}
    print(
        json.dumps(
            {"verdict": "ok" if ok else "failed", "device": _device(arguments.device), **versions, "loads": answers},
            indent=2,
        )
    )
    return 0 if ok else 1


def _device(kind: str) -> str:
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind


if __name__ == "__main__":
    sys.exit(main())
