"""Assignment: fill a patched module's dispatch table from the kernels that there are.

Candidates come in order: what the recipe or the call named, then every default kernel of the layout.  The
facts about machine and module are gathered here; the choice itself is `select`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, cast

from torch import nn

from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import Layout
from kconvert.kernels.registry import Registry, check_deps_reason
from kconvert.kernels.report import module_device
from kconvert.kernels.select import Candidate, Mode, select
from kconvert.kernels.specs import layout_specs

__all__ = ["assign_kernels", "assign_selections", "layout_kernels", "load_layout"]


def load_layout(name: str) -> type[Layout] | None:
    """The class of a layout: a built-in one by its spec, else one that a registered kernel brings; None if unknown."""
    spec = layout_specs().get(name)
    if spec is not None:
        module_name, _, class_name = spec.module.partition(":")
        return cast("type[Layout]", getattr(import_module(module_name), class_name))
    brought = (kernel.layout for kernel in Registry.catalog().values() if issubclass(kernel, LayoutKernel))
    return next((layout for layout in brought if layout.spec.name == name), None)


def layout_kernels(layout: type[Layout]) -> dict[str, type[LayoutKernel]]:
    """Every registered kernel of a layout, by ID, in the order of its spec and then by ID."""
    found = {
        kernel_id: kernel
        for kernel_id, kernel in Registry.catalog().items()
        if issubclass(kernel, LayoutKernel) and kernel.layout is layout
    }
    order = [entry.kernel_id for entry in layout.spec.kernels]
    return {name: found[name] for name in (*order, *sorted(set(found) - set(order))) if name in found}


def _dtype_name(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def assign_selections(
    module: nn.Module,
    candidates: Sequence[Candidate],
    kernels: dict[str, Any],
    *,
    unavailable: dict[str, str],
    unsupported: dict[str, str],
) -> None:
    """Choose for every device type that a candidate names, the CPU and where the module is now."""
    dispatch = cast("Dispatch", module.kconvert_dispatch)
    for device in dict.fromkeys(["cpu", module_device(module), *(candidate.device for candidate in candidates)]):
        for mode in Mode:
            selection = select(
                candidates,
                device=device,
                dtype=_dtype_name(module),
                mode=mode,
                unavailable=unavailable,
                unsupported=unsupported,
            )
            dispatch.set(device, mode, selection, kernels.get(selection.kernel_id or ""))


def assign_kernels(
    module: nn.Module,
    layout: type[Layout],
    named: Iterable[str],
    *,
    origin: str,
    with_defaults: bool,
    parts_with_defaults: bool = False,
) -> None:
    """Fill the table of a module of a built-in layout.

    Args:
        module: the patched module.
        layout: its layout.
        named: kernel IDs in order of preference; those of other layouts are passed over.
        origin: who named them, for the trace.
        with_defaults: whether the layout's default kernels stand in where none of these can run.
        parts_with_defaults: whether those of the layouts of its parts do.
    """
    known, named = layout_kernels(layout), tuple(named)
    order = {kernel_id: origin for kernel_id in named if kernel_id in known}
    if with_defaults:
        for kernel_id, kernel in known.items():
            if kernel.default:
                order.setdefault(kernel_id, "default")
    candidates, unavailable, unsupported = [], {}, {}
    for kernel_id, source in order.items():
        kernel = known[kernel_id]
        candidates.append(Candidate(kernel_id, kernel.device().value, source, kernel.has_backward, kernel.dtypes))
        missing = check_deps_reason(kernel)
        if missing is not None:
            unavailable[kernel_id] = missing
            continue
        unfit = kernel.supports(module)
        if unfit is not None:
            unsupported[kernel_id] = unfit
    for name, part in cast("Layout", module).kconvert_parts().items():
        assign_kernels(
            module.get_submodule(name), part, named, origin=origin, with_defaults=with_defaults or parts_with_defaults
        )
    assign_selections(module, candidates, dict(known), unavailable=unavailable, unsupported=unsupported)
