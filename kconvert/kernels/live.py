"""Patching a live model: `apply_kernel` and `apply_default_kernels`.

A module is patched where the layout's structure fits it and its reference gives the stock output bit for
bit; both are tried on a copy of the module first, so a module that does not qualify is left exactly as it
was.  Parameters are packed in place and only this model changes.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from kconvert.errors import KernelUnavailableError, UsageError
from kconvert.kernels.assign import assign_kernels, load_layout
from kconvert.kernels.base import BaseKernel, LayoutKernel
from kconvert.kernels.dataflow import check_chains
from kconvert.kernels.layout import Layout, is_patched
from kconvert.kernels.model import adopt_model
from kconvert.kernels.packing import Packing
from kconvert.kernels.probe import Call, capture_calls, forked_random_state, same_output
from kconvert.kernels.registry import Registry, check_deps_reason, get_known_kernel
from kconvert.transforms import bind_spec, claims_overlap, is_taken

__all__ = ["apply_default_kernels", "apply_kernel", "apply_layout_kernel", "place_layout", "qualify"]


def apply_kernel(kernel_id: str, **kwargs: Any) -> Any:
    """Put one kernel into a live model and return the model, which is changed in place.

    Packed parameters are new ones: make the optimizer afterwards.

    Args:
        kernel_id: e.g. `cpu_fused_swiglu`.
        kwargs: `model=` for every layout kernel; others say what they need.

    Raises:
        UnknownKernelError: (a `ValueError`) no such kernel; with near misses.
        UsageError: (a `ValueError`) `model` is missing.
        KernelUnavailableError: (a `RuntimeError`) the kernel is for another device, or lacks something.
    """
    return _usable_kernel(kernel_id).apply(**kwargs)


def _usable_kernel(kernel_id: str) -> type[BaseKernel]:
    kernel = get_known_kernel(kernel_id)
    reason = check_deps_reason(kernel)
    if reason is not None:
        raise KernelUnavailableError(f"kernel {kernel_id!r} cannot run on this machine: {reason}")
    if Registry.get(kernel_id) is None:
        raise KernelUnavailableError(f"kernel {kernel_id!r} is for {kernel.device()}, which this process does not use")
    return kernel


def apply_default_kernels(model: Any, include_kernels: str | bool | None = None) -> Any:
    """Put kernels into a live model and return it.

    Args:
        model: any transformers model.
        include_kernels: `"auto"` or True for every default kernel that runs here, a comma-separated list of
            IDs, or None, False or "" for nothing.

    Raises:
        UnknownKernelError, KernelUnavailableError: as `apply_kernel`, for IDs that are named.
    """
    if not include_kernels:
        return model
    if include_kernels is True or include_kernels == "auto":
        usable = [name for name, kernel in Registry.catalog().items() if kernel.default and _is_usable(name, kernel)]
        for kernel_id in usable:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", _NothingPatchedWarning)
                apply_kernel(kernel_id, model=model)
        if not any(is_patched(module) for module in model.modules()):
            message = "no module of the model fits the layout of any default kernel, nothing is patched"
            warnings.warn(message, _NothingPatchedWarning, stacklevel=3)
        return model
    if not isinstance(include_kernels, str):
        raise UsageError(f"include_kernels is {include_kernels!r}", fix='pass "auto", True, "id,id" or None')
    kernel_ids = [item.strip() for item in include_kernels.split(",") if item.strip()]
    for kernel_id in kernel_ids:
        _usable_kernel(kernel_id)  # all of them, before the model is touched
    for kernel_id in kernel_ids:
        apply_kernel(kernel_id, model=model)
    return model


def _is_usable(kernel_id: str, kernel: type[BaseKernel]) -> bool:
    return check_deps_reason(kernel) is None and Registry.get(kernel_id) is not None


class _NothingPatchedWarning(UserWarning):
    """A kernel found no module to patch."""


def apply_layout_kernel(kernel: type[LayoutKernel], model: Any) -> Any:
    """Patch every module of `model` that qualifies for the kernel's layout, and let the kernel run there."""
    is_wrapper = not isinstance(model, PreTrainedModel) and (
        not isinstance(model, nn.Module) or any(isinstance(inner, PreTrainedModel) for inner in model.modules())
    )
    if is_wrapper:
        raise UsageError(
            f"model is a {type(model).__name__}, no transformers model",
            fix="patch the model itself, before PEFT, torch.compile or another wrapper goes around it",
        )
    layout = kernel.layout
    refused: list[str] = []
    patched: list[str] = []
    for path, module in model.named_modules():
        if getattr(module, "kconvert_layout", None) == layout.spec.name:
            unfit = kernel.supports(module)
            if unfit is None:
                patched.append(path)
            else:
                refused.append(f"{path} is not for the kernel: {unfit}")
    fresh: list[tuple[str, ...]] = []
    for paths, reason in qualify(model, layout, supports=kernel.supports).items():
        if reason is None:
            fresh.append(paths)
        else:
            refused.append(f"{paths[0]} {reason}")
    packings = [packing for paths in fresh for packing in _patch_live(layout, model, paths)]
    if not patched and not fresh:
        why = f"; e.g. {refused[0]}" if refused else ""
        message = (
            f"{kernel.kernel_id()}: no module of the model fits layout {layout.spec.name!r}, nothing is patched{why}"
        )
        warnings.warn(message, _NothingPatchedWarning, stacklevel=4)
        return model
    for path in (*patched, *(paths[0] for paths in fresh)):
        module = model.get_submodule(path)
        named = [kernel.kernel_id(), *module.__dict__.get("kconvert_named", ())]
        module.__dict__["kconvert_named"] = tuple(dict.fromkeys(named))
        assign_kernels(module, layout, module.__dict__["kconvert_named"], origin="call", with_defaults=False)
    adopt_model(model, packings)
    return model


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
        taken = [weight for path, module in zip(paths, modules, strict=True) for weight in _taken(layout, path, module)]
        if any(id(weight) in shared for weight in taken):
            found[paths] = "shares parameters with another module"
        elif any(weight.is_meta for module in modules for weight in module.parameters()) or not taken:
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
    weight = next(modules[0].parameters())
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


def place_layout(root: nn.Module, paths: tuple[str, ...], packed: nn.Module, layout_name: str) -> None:
    """Put a packed module at the first path and `nn.Identity` at the others."""
    packed.__dict__["kconvert_layout"] = layout_name
    root.set_submodule(paths[0], packed)
    for path in paths[1:]:
        root.set_submodule(path, nn.Identity())


def _patch_live(layout: type[Layout], model: nn.Module, paths: tuple[str, ...]) -> list[Packing]:
    modules = [model.get_submodule(path) for path in paths]
    before: Mapping[str, torch.Tensor] = {
        f"{path}.{name}": tensor
        for path, module in zip(paths, modules, strict=True)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    packings = [
        Packing(rule.target, rule.axis, tuple((name, before[name].shape[rule.axis]) for name in rule.sources))
        for rule in bind_spec(layout.spec, paths, tuple(before))
    ]
    place_layout(model, paths, layout.patch(modules), layout.spec.name)
    return packings
