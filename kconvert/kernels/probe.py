"""Running a model on a few random tokens, and what its modules are given and give meanwhile.

An attention module takes positions, masks and caches that only its own model can make, so these are taken from
one real forward instead of being invented.  Nothing of the model is changed: hooks go, the mode and the random
state are as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from kconvert.errors import one_line

__all__ = ["Call", "capture_calls", "eval_mode", "forked_random_state", "same_output", "sample_ids"]

_NUM_TOKENS = 7


@dataclass(frozen=True)
class Call:
    """One call of a module: what it was given, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module inside; the mode of each is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def forked_random_state(device: torch.device) -> Iterator[None]:
    """The generators that a dropout on `device` draws from are seeded inside, and then as they were: they are the user's.

    Only these: `torch.manual_seed` would seed those of every device, which nothing gives back.
    """
    if device.type in ("cpu", "meta"):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
        return
    accelerator = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[device], device_type=device.type), accelerator.device(device):
        torch.default_generator.manual_seed(0)
        accelerator.manual_seed(0)
        yield


def sample_ids(model: Any, *, batch: int = 2, tokens: int = _NUM_TOKENS, seed: int = 0) -> torch.Tensor:
    """Random token IDs `[batch, tokens]` below the vocabulary size, on the CPU; the same for the same seed.

    IDs that the config gives a meaning (`image_token_id`, `pad_token_id`) are left out: a placeholder for an image
    asks for one.
    """
    config = model.config.get_text_config(decoder=True)
    size = int(getattr(config, "vocab_size", None) or 2)
    special = _special_ids(model.config) | _special_ids(config)
    plain = [number for number in range(size) if number not in special] or list(range(size))
    chosen = torch.randint(0, len(plain), (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(plain)[chosen]


def _special_ids(config: Any) -> set[int]:
    named = (value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index")))
    return {value for value in named if isinstance(value, int)}


def capture_calls(
    model: Any, paths: Collection[str], *, seed: int = 0, batch: int = 2, tokens: int = _NUM_TOKENS
) -> tuple[dict[str, Call], str | None]:
    """Run the model once on random tokens and record the first call of each module.

    Args:
        model: a transformers model with its weights in memory; it runs in eval mode, without gradients.
        paths: module paths.
        seed: of the tokens.
        batch: number of sequences.
        tokens: number of tokens in each.

    Returns:
        The calls by path, without the modules that the forward does not reach, and why the model did not run,
        or None.
    """
    calls: dict[str, Call] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.setdefault(path, Call(args, dict(kwargs), output))

        return hook

    handles = [
        model.get_submodule(path).register_forward_hook(note(path), with_kwargs=True) for path in dict.fromkeys(paths)
    ]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    failure = None
    try:
        for extra in ({"use_cache": False}, {}):
            calls.clear()
            try:
                with torch.no_grad(), forked_random_state(device), eval_mode(model):
                    model(input_ids=sample_ids(model, batch=batch, tokens=tokens, seed=seed).to(device), **extra)
                return calls, None
            except Exception as error:  # noqa: BLE001 - foreign model code may raise anything: it does not run
                failure = failure or one_line(error)
    finally:
        for handle in handles:
            handle.remove()
    return {}, failure


def same_output(found: Any, expected: Any) -> bool:
    """Whether two results of a forward, tensors in any containers, have the same structure, dtypes and bits."""
    values, structure = tree_flatten(found)
    others, other_structure = tree_flatten(expected)
    if structure != other_structure:
        return False
    for one, two in zip(values, others, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            if one.dtype != two.dtype or not torch.equal(one, two):  # `equal` alone compares values across dtypes
                return False
        elif one is not two and one != two:
            return False
    return True
