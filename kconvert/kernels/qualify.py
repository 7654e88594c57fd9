"""Where in a live model a layout may go.

The structure has to fit, the reference on a copy has to give the bits of the stock forward on what the model really
passes, and packing must lose nothing: hooks, gradients, weights that are shared with a module outside.  The model
is left as it is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.assign import load_layout
from kconvert.kernels.dataflow import check_chains
from kconvert.kernels.layout import Layout, is_patched
from kconvert.kernels.probe import Call, capture_calls, forked_random_state, same_output
from kconvert.transforms import claims_overlap, is_taken

__all__ = ["qualify"]


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that stand in the model more than once: packing one place would untie them."""
    counts = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}


def qualify(
    model: nn.Module, layout: type[Layout], *, supports: Callable[[nn.Module], str | None] | None = None
) -> dict[tuple[str, ...], str | None]:
    """Every place in the model that has the structure of the layout, and why it must not have it, or None.

    A place is the module paths in pair order.  It may have the layout where on a copy of its modules the reference
    gives the bits of the stock forward, nothing of it is shared with a module outside, and packing loses nothing.

    Args:
        model: a transformers model with its weights in memory; it is not changed.
        layout: the layout to look for.
        supports: a kernel's own word on the packed copy, where a kernel has to run there.
    """
    places = list(_candidates(layout, model))
    shared = _shared_parameters(model)
    calls: dict[str, Call] = {}
    failure = None
    if places and not layout.takes_one_tensor:
        calls, failure = capture_calls(model, [paths[0] for paths in places])
    found: dict[tuple[str, ...], str | None] = {}
    for paths in places:
        modules = [model.get_submodule(path) for path in paths]
        weights = [weight for module in modules for weight in module.parameters()]
        taken = [weight for path, module in zip(paths, modules, strict=True) for weight in _taken(layout, path, module)]
        if any(id(weight) in shared for weight in taken):
            found[paths] = "shares parameters with another module"
        elif any(weight.is_meta for weight in weights) or (weights and layout.spec.rules and not taken):
            found[paths] = "has parameters that are not in memory"
        elif not layout.takes_one_tensor and paths[0] not in calls:
            found[paths] = f"cannot be tried: {failure or 'a forward on tokens does not reach it'}"
        else:
            lost = _lost_by_packing(layout, modules, taken)
            found[paths] = lost or _refusal(layout, modules, calls.get(paths[0]), supports)
    return found


def _taken(layout: type[Layout], path: str, module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that the layout takes."""
    named = module.named_parameters(prefix=path)
    return [weight for name, weight in named if is_taken(name, path, layout.spec.takes)]


def _candidates(layout: type[Layout], model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Module paths (pair order) whose structure fits, outside of what patched modules have taken."""
    taken = {path: _takes(module) for path, module in model.named_modules() if is_patched(module)}

    def is_free(path: str) -> bool:
        return not any(claims_overlap(path, layout.spec.takes, other, takes) for other, takes in taken.items())

    modules = {path: module for path, module in model.named_modules() if path and is_free(path)}
    if not layout.spec.is_fusion:
        yield from ((path,) for path, module in modules.items() if layout.unfit([module]) is None)
        return
    pairs = [
        (f"{parent}.{first}".lstrip("."), f"{parent}.{second}".lstrip("."))
        for parent, module in model.named_modules()
        for first, one in module.named_children()
        for second, two in module.named_children()
        if one is not two and layout.unfit([one, two]) is None
    ]
    pairs = [pair for pair in pairs if all(path in modules for path in pair)]
    if pairs:
        reasons = check_chains(_meta_twin(model), pairs)
        yield from (pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None)


def _takes(module: nn.Module) -> frozenset[str]:
    """The children that the layout of a patched module has taken; empty for all."""
    layout = load_layout(str(module.__dict__.get("kconvert_layout")))
    return frozenset() if layout is None else layout.spec.takes


def _meta_twin(model: Any) -> nn.Module:
    """The stock model of the same config, on meta."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    stock = getattr(type(model), "kconvert_stock_class", type(model))
    with torch.device("meta"):
        return cast("nn.Module", stock(config))


def _refusal(
    layout: type[Layout],
    modules: list[nn.Module],
    call: Call | None,
    supports: Callable[[nn.Module], str | None] | None,
) -> str | None:
    """Why a packed copy of the modules does not stand for their stock forwards, or None.

    Args:
        layout: the layout to try.
        modules: stock modules in pair order.
        call: what the model gives to the (one) module; without it a random tensor is made.
        supports: what else is asked of the packed copy.
    """
    # a module without any takes rows of every size
    weight = next(chain(modules[0].parameters(), modules[0].buffers()), torch.empty(48))
    if call is None:
        rows = torch.randn(2, 3, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        call = Call((rows.to(device=weight.device, dtype=weight.dtype),), {}, None)
    with torch.no_grad(), forked_random_state(weight.device):
        try:
            expected: Any = modules[0](*call.args, **call.kwargs)
            for module in modules[1:]:
                expected = module(expected)
        except Exception as error:  # noqa: BLE001 - foreign forward: another signature means it does not qualify
            return f"does not take one tensor ({type(error).__name__})"
    if layout.takes_one_tensor and not isinstance(expected, torch.Tensor):
        return "does not give one tensor"
    packed = cast("Any", layout.patch([copy.deepcopy(module) for module in modules]))
    with torch.no_grad(), forked_random_state(weight.device):
        found = packed.reference(*call.args, **call.kwargs)
    if not same_output(found, expected):
        return "has a forward that the packed reference does not reproduce bit for bit"
    unsupported = None if supports is None else supports(packed)
    return None if unsupported is None else f"is not for the kernel: {unsupported}"


def _lost_by_packing(layout: type[Layout], modules: list[nn.Module], taken: list[nn.Parameter]) -> str | None:
    """What of these modules would silently go when their parameters are packed, or None."""
    if not layout.spec.changes_parameters:
        return None
    takes = layout.spec.takes
    parts = [
        child
        for module in modules
        for name, child in module.named_modules()
        if name and (not takes or name.partition(".")[0] in takes)
    ]
    for child in parts:
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return "has hooks on its parts"
    if any(weight.grad is not None or weight._backward_hooks for weight in taken):
        return "has gradients or hooks on its parameters; patch before training"
    return None
