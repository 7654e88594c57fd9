"""The work of `apply` done by others: a script as a person would write it, and libraries that can do it or come near it.

    python benchmarks/rewriting/others.py NAME SOURCE OUTPUT SHARD_BYTES

Runs in a process of its own, with an interpreter that has what NAME needs; the benchmark starts it.  `script`,
`compressed-tensors` and `fastsafetensors` put gate and up into one tensor, as the benchmark's recipe does; mergekit and
transformers are only asked to write the model again, which is less.  None of them puts its files on the disk (fsync).
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["INDEX", "WORK", "load_cat_save"]

INDEX = "model.safetensors.index.json"
_GATE, _UP, _PACKED = (f".mlp.{name}.weight" for name in ("gate_proj", "up_proj", "gate_up_proj"))


def _partner(name: str) -> str | None:
    """The up projection that goes behind the gate projection `name`."""
    return name.removesuffix(_GATE) + _UP if name.endswith(_GATE) else None


def _pack(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors with each gate and up projection in one."""
    import torch

    packed = dict(tensors)
    for name in tensors:
        partner = _partner(name)
        if partner is not None:
            parts = packed.pop(name), packed.pop(partner)
            packed[name.removesuffix(_GATE) + _PACKED] = torch.cat(parts)
    return packed


def _load_packed(source: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """All tensors, packed, and the file that each one goes to: that of its first part."""
    from safetensors.torch import load_file

    files: dict[str, str] = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"]
    tensors: dict[str, Any] = {}
    for file in sorted(set(files.values())):
        tensors.update(load_file(source / file))
    packed = _pack(tensors)
    return packed, {name: files.get(name) or files[name.removesuffix(_PACKED) + _GATE] for name in packed}


def _write_rest(source: Path, output: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (output / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    shutil.copy(source / "config.json", output / "config.json")


def load_cat_save(source: Path, output: Path, shard_bytes: int) -> None:
    """Load with safetensors, `torch.cat`, save shard by shard; `shard_bytes` is not needed, the source's shards stay."""
    from safetensors.torch import save_file

    output.mkdir()
    packed, files = _load_packed(source)
    for file in sorted(set(files.values())):
        save_file({name: packed[name] for name in packed if files[name] == file}, output / file, {"format": "pt"})
    _write_rest(source, output, files, sum(tensor.nbytes for tensor in packed.values()))


class _GateUpConverter:
    """The converter that compressed-tensors runs over each shard, with the methods that its protocol asks for."""

    def process(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return _pack(tensors)

    def validate(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return _pack(tensors)

    def get_dependencies(self, weight_name: str) -> set[str]:
        partner = _partner(weight_name)
        return set() if partner is None else {partner}

    def update_config(self, config: Any) -> None:
        """No tensor is quantised."""

    def update_model_config(self, model_config: dict[str, Any]) -> dict[str, Any]:
        return model_config


def _compressed_tensors(source: Path, output: Path, shard_bytes: int) -> None:
    convert = importlib.import_module("compressed_tensors.entrypoints.convert")
    convert.convert_checkpoint(source, output, _GateUpConverter())


def _fastsafetensors(source: Path, output: Path, shard_bytes: int) -> None:
    fastsafetensors = importlib.import_module("fastsafetensors.saver")
    output.mkdir()
    packed, files = _load_packed(source)
    saver = fastsafetensors.ParallelSaver(num_shards=len(set(files.values())))
    written = saver.save(packed, str(output / "model"), metadata={"format": "pt"})
    weight_map = {name: Path(path).name for path in written for name in _names(Path(path))}
    _write_rest(source, output, weight_map, sum(tensor.nbytes for tensor in packed.values()))


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def _mergekit(source: Path, output: Path, shard_bytes: int) -> None:
    config = importlib.import_module("mergekit.config")
    merge = importlib.import_module("mergekit.merge")
    options = importlib.import_module("mergekit.options")
    layers = json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    wanted = {
        "merge_method": "passthrough",
        "dtype": "bfloat16",
        "slices": [{"sources": [{"model": str(source), "layer_range": [0, layers]}]}],
    }
    chosen = options.MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, out_shard_size=shard_bytes)
    merge.run_merge(config.MergeConfiguration.model_validate(wanted), str(output), chosen)


def _transformers(source: Path, output: Path, shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(output, max_shard_size=shard_bytes)


WORK: Mapping[str, Callable[[Path, Path, int], None]] = {
    "script": load_cat_save,
    "compressed-tensors": _compressed_tensors,
    "fastsafetensors": _fastsafetensors,
    "mergekit": _mergekit,
    "transformers": _transformers,
}


if __name__ == "__main__":
    WORK[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
