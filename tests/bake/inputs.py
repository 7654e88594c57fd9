"""A forward on a few simple inputs, for whatever a model takes: token IDs, an image, sound.

What cannot be run on these gives nothing: its tensors are compared all the same.  Images of a size that takes long
are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from kconvert.kernels.probe import sample_ids

__all__ = ["run_forward"]

_MAX_VALUES = 2 * 3 * 256 * 256


def run_forward(model: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors of the output on the first inputs that the model takes, None where it takes none of them.

    Args:
        model: with its weights in memory, in eval mode.
    """
    names = set(inspect.signature(model.forward).parameters)
    for inputs in _candidates(model):
        if not inputs.keys() <= names or any(tensor.numel() > _MAX_VALUES for tensor in inputs.values()):
            continue
        with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):  # the model's own code may raise
            torch.manual_seed(0)
            output = model(**inputs)
            found = tuple(_tensors(output))
            if found and all(tensor.isfinite().all() for tensor in found if tensor.is_floating_point()):
                return found
    return None


def _candidates(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = sample_ids(model, batch=2, tokens=9, seed=1)
    height, width = _image_size(model.config)
    image = torch.rand((2, 3, height, width), generator=generator)
    mels = torch.rand((2, _first(model.config, ("num_mel_bins", "input_feat_size"), 32), 64), generator=generator)
    wave = torch.rand((2, 1600), generator=generator)
    yield {"input_ids": ids, "pixel_values": image}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"pixel_values": image}
    yield {"pixel_values": image[:, None].expand(-1, 16, -1, -1, -1)}
    yield {"input_features": mels}
    yield {"input_features": mels.transpose(1, 2)}
    yield {"input_values": wave}
    yield {"input_values": wave[:, None]}
    yield {"input_values": mels.transpose(1, 2)}


def _image_size(config: Any) -> tuple[int, int]:
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
    return 64, 64


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    return next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), default)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, those in lists and mappings as well."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
