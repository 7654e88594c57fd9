"""Loads converted directories as a user of transformers does, through KernelConfig: a program for a process of its own.

KernelConfig changes transformers for good, so every job runs in a fork of its own.  The jobs are a JSON file, and the
answers another one.  transformers 5.22 refuses the CPU as a device of KernelConfig; a job that loads there adds it to
the list that is asked, and everything else is as it is.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import KernelConfig
from transformers.utils import kernel_config as kernel_config_module

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def _config(text: str) -> KernelConfig:
    names: dict[str, Any] = {}
    exec(text, names)
    config: KernelConfig = names["kernel_config"]
    return config


def _files(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.double()
    return found


def look(job: dict[str, Any]) -> dict[str, Any]:
    """Load, and say what there is."""
    source, converted = Path(job["source"]), Path(job["converted"])
    cls = getattr(transformers, job["model_class"])
    stock = cls.from_pretrained(source, dtype="auto")
    wanted = _logits(stock)
    if job.get("allow_cpu", True):
        kernel_config_module.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    variant = None if job.get("from_source") else "kconvert"
    config = _config(job["config"])
    config.use_local_kernel = job.get("use_local_kernel", False)
    model, info = cls.from_pretrained(
        source if job.get("from_source") else converted,
        variant=variant,
        dtype="auto",
        use_kernels=True,
        kernel_config=config,
        output_loading_info=True,
    )
    answer: dict[str, Any] = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "classes": sorted({type(module).__name__ for module in model.modules()}),
        "forwards": sorted({module.forward.__func__.__qualname__ for module in model.modules()}),
    }
    files, state = _files(converted), model.state_dict()
    answer["names_equal"] = sorted(files) == sorted(state)
    answer["values_equal"] = all(torch.equal(tensor, state[name]) for name, tensor in files.items() if name in state)
    answer["difference"] = (_logits(model) - wanted).abs().max().item()
    answer["tokens_equal"] = torch.equal(
        model.generate(IDS, max_new_tokens=6, do_sample=False), stock.generate(IDS, max_new_tokens=6, do_sample=False)
    )
    if job.get("own_forward", True):  # else transformers leaves it empty where it puts no kernel in
        model.train()
        model(IDS, labels=IDS).loss.backward()
        answer["gradients"] = all(parameter.grad is not None for parameter in model.parameters())
        model.eval()
        later = cls.from_pretrained(source, dtype="auto")  # transformers keeps the layouts registered
        answer["later_difference"] = (_logits(later) - wanted).abs().max().item()
    saved = converted.parent / f"{job['name']}-saved"
    model.save_pretrained(saved)
    stored, originals = _files(saved), _files(source)
    answer["saved_names_equal"] = sorted(stored) == sorted(originals)
    answer["saved_equal"] = all(
        torch.equal(stored[name], tensor) for name, tensor in originals.items() if name in stored
    )
    state = stock.state_dict()
    answer["saved_in_module_names"] = sorted(stored) == sorted(state) and all(
        torch.equal(stored[name], tensor) for name, tensor in state.items()
    )
    return answer


def _warm_up(job: dict[str, Any]) -> None:
    """Import once, before the forks, what loading and generating import."""
    import kernels  # noqa: F401

    stock = getattr(transformers, job["model_class"]).from_pretrained(job["source"])
    stock.generate(IDS, max_new_tokens=1)


def _answer(job: dict[str, Any], place: Path) -> None:
    try:
        answer = look(job)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    place.write_text(json.dumps(answer), encoding="utf-8")


def main(jobs_path: str) -> int:
    """Run the jobs; each has `out`, where its answer goes."""
    jobs = json.loads(Path(jobs_path).read_text(encoding="utf-8"))
    _warm_up(jobs[0])
    for job in jobs:
        child = os.fork()
        if child == 0:
            _answer(job, Path(job["out"]))
            os._exit(0)
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
