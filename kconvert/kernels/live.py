"""Patching a live model: `apply_kernel` and `apply_default_kernels`.

A module is patched where `qualify` says that the layout may go there and the kernel computes its forward; one that
does not qualify is left exactly as it was.  Parameters are packed in place and only this model changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kconvert.errors import KernelUnavailableError, UsageError
from kconvert.kernels.assign import assign_kernels
from kconvert.kernels.base import BaseKernel, LayoutKernel
from kconvert.kernels.layout import Layout, is_patched
from kconvert.kernels.model import adopt_model
from kconvert.kernels.packing import Packing, packings_of_targets
from kconvert.kernels.qualify import qualify
from kconvert.kernels.registry import Registry, check_deps_reason, get_known_kernel
from kconvert.transforms import Arrangement, bind_spec, whole

__all__ = ["apply_default_kernels", "apply_kernel", "apply_layout_kernel", "place_layout"]


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
        named = module.__dict__["kconvert_named"]
        assign_kernels(module, layout, named, origin="call", with_defaults=False, parts_with_defaults=True)
    adopt_model(model, packings)
    return model


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
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    inputs = {name: whole(name, shape) for name, shape in shapes.items()}
    made: dict[str, Arrangement] = {}
    for rule in bind_spec(layout.spec, paths, tuple(before)):
        made.update(rule.arrange(inputs))
    place_layout(model, paths, layout.patch(modules), layout.spec.name)
    return list(packings_of_targets(made, shapes))
