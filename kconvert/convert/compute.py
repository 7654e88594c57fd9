"""Tensors that a conversion op computes: run through transformers, a group at a time.

Most ops move elements, and their tensors are copied as bytes.  An op of transformers that changes values has no such
form: it is run on the tensors of its group alone, when these are written.  What it gives cannot be given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from safetensors import safe_open

from kconvert.checkpoint import Checkpoint
from kconvert.errors import KconvertError, one_line
from kconvert.kernels.rearrange import rearrange
from kconvert.plan import Made, ModuleTensor
from kconvert.transforms import BoundRule, Computed

__all__ = ["compute"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def compute(
    rule: BoundRule,
    tensors: Mapping[str, ModuleTensor],
    checkpoint: Checkpoint,
    model: Any,
    *,
    error: type[KconvertError],
    where: str,
) -> dict[str, Made]:
    """What a rule with a `Computed` operation makes, by full name; nothing is read before `Made.make` is called.

    Args:
        rule: the bound rule.
        tensors: its sources.
        checkpoint: where their data are.
        model: the stock model on meta, which ops may ask.
        error: what is raised where the op does not run, or gives a dtype that no file holds.
        where: the place that it names.
    """
    _check_dtypes(rule, tensors, checkpoint, error, where)
    (operation,) = rule.operations
    assert isinstance(operation, Computed)

    def run(device: str) -> dict[str, torch.Tensor]:
        converter = deepcopy(operation.converter)
        for each in rule.collected:
            for name in each.names:
                tensor = _meta(tensors[name], checkpoint) if device == "meta" else _read(tensors[name], checkpoint)
                converter.add_tensor(rule.target, name, each.pattern, tensor)
        try:
            with torch.no_grad():
                made = converter.convert(rule.target, model=model, config=model.config)
        except Exception as raised:  # whatever an op raises on tensors that it was not made for
            raise error(
                f"{operation} does not run on {', '.join(rule.sources[:4])} ({one_line(raised)})",
                where=where,
                fix="check the conversion mapping and config.json",
            ) from raised
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def made(name: str, tensor: torch.Tensor) -> Made:
        if tensor.dtype not in _NAMES:
            raise error(f"{operation} gives {name!r} in {tensor.dtype}", where=where)
        return Made(
            _NAMES[tensor.dtype],
            tuple(tensor.shape),
            lambda: run("cpu")[name].contiguous().reshape(-1).view(torch.uint8).numpy().data,
        )

    return {name: made(name, tensor) for name, tensor in run("meta").items()}


def _meta(tensor: ModuleTensor, checkpoint: Checkpoint) -> torch.Tensor:
    dtype = checkpoint.tensors[tensor.stored.sources[0]].dtype
    return torch.empty(tensor.stored.shape, dtype=_DTYPES[dtype], device="meta")


def _check_dtypes(
    rule: BoundRule, tensors: Mapping[str, ModuleTensor], checkpoint: Checkpoint, error: type[KconvertError], where: str
) -> None:
    for tensor in tensors.values():
        for name in tensor.stored.sources:
            dtype = checkpoint.tensors[name].dtype
            if dtype not in _DTYPES:
                raise error(f"{name!r} is {dtype}, which {rule.label} cannot be run on", where=where)


def _read(tensor: ModuleTensor, checkpoint: Checkpoint) -> torch.Tensor:
    paths = {file.name: file.path for file in checkpoint.files}
    found = {}
    for name in tensor.stored.sources:
        with safe_open(str(paths[checkpoint.tensors[name].file]), framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return rearrange(tensor.stored, found)
