"""The report: per patched module which kernel runs, and why the others do not.

Made from the modules at the moment it is asked for, so it follows `model.to(...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import Layout, is_patched, stock_class_of
from kconvert.kernels.select import Mode, Selection
from kconvert.names import starred

__all__ = ["ModuleReport", "Report", "build_report", "device_in", "module_device"]

REFERENCE = "reference"

_WIDTH = 80


@dataclass(frozen=True)
class ModuleReport:
    """One patched module: its path, stock class, layout, device, and the choice for inference there.

    `by_view` says whether the kernel reads weights through a view, because they are stored for another device.
    """

    path: str
    class_name: str
    layout: str
    device: str
    selection: Selection
    training_kernel: str | None
    by_view: bool = False

    @property
    def kernel(self) -> str:
        """The kernel ID, or `reference`."""
        return self.selection.kernel_id or REFERENCE


@dataclass(frozen=True)
class Report:
    """All patched modules of a model.  `print(report)` shows a table, `to_dict()` gives plain data."""

    modules: tuple[ModuleReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Kernel counts, and every module with the trace of its choice."""
        counts: dict[str, int] = {}
        for module in self.modules:
            counts[module.kernel] = counts.get(module.kernel, 0) + 1
        return {
            "kernels": dict(sorted(counts.items())),
            "modules": [
                {
                    "path": module.path,
                    "class": module.class_name,
                    "layout": module.layout,
                    "device": module.device,
                    "kernel": module.kernel,
                    "training_kernel": module.training_kernel or REFERENCE,
                    "by_view": module.by_view,
                    "trace": [
                        {
                            "kernel": item.kernel_id,
                            "origin": item.origin,
                            "accepted": item.accepted,
                            "reason": item.reason,
                        }
                        for item in module.selection.trace
                    ],
                }
                for module in self.modules
            ],
        }

    def __str__(self) -> str:
        """A table with one row per group of modules that differ in nothing but their numbers, then why not others."""
        if not self.modules:
            return "no module is patched"
        counts: Counter[tuple[str, str, str]] = Counter()
        for module in self.modules:
            path = starred(module.path)
            runs = module.kernel
            if (module.training_kernel or REFERENCE) != module.kernel:
                runs += f" (training: {module.training_kernel or REFERENCE})"
            counts[path, module.device, runs] += 1
        rows = [("modules", "n", "device", "runs")]
        rows += [(path, str(count), device, runs) for (path, device, runs), count in counts.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]
        views = sorted({module.kernel for module in self.modules if module.by_view})
        if views:
            lines += ["through views of weights that are stored for another device:", f"  {', '.join(views)}"]
        rejected = list(self._rejection_lines())
        return "\n".join([*lines, "not used:", *rejected] if rejected else lines)

    __repr__ = __str__

    def _rejection_lines(self) -> Iterator[str]:
        """Each reason behind all kernels that it keeps out.

        A default kernel was not asked for by anyone, so it counts only where a module is left with its reference.
        """
        kernels: dict[str, set[str]] = {}
        for module in self.modules:
            for item in module.selection.trace:
                if not item.accepted and (item.origin != "default" or module.kernel == REFERENCE):
                    kernels.setdefault(item.reason, set()).add(item.kernel_id)
        for reason, names in sorted(kernels.items(), key=lambda item: sorted(item[1])):
            text = f"{', '.join(sorted(names))}: {reason}"
            yield from wrap(
                text,
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def module_device(module: nn.Module) -> str:
    """The device type of the module's parameters; where accelerate moves them, that of execution."""
    hook_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if hook_device is not None:
        return torch.device(hook_device).type
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def device_in(model: nn.Module, module: nn.Module) -> str:
    """The device type of a module of a model; one without parameters is where its model is."""
    return module_device(module if any(True for _ in module.parameters()) else model)


def _patched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Dispatch]]:
    for path, module in model.named_modules():
        if is_patched(module) and cast("Dispatch", module.kconvert_dispatch).devices():
            yield path, module, cast("Dispatch", module.kconvert_dispatch)


def build_report(model: nn.Module) -> Report:
    """The report of a model, patched or not."""
    modules = []
    for path, module, dispatch in _patched_modules(model):
        device = device_in(model, module)
        nothing = Selection(None, ())
        training = dispatch.selection(device, Mode.TRAINING) or nothing
        selection = dispatch.selection(device, Mode.INFERENCE) or nothing
        modules.append(
            ModuleReport(
                path=path,
                class_name=stock_class_of(module).__name__,
                layout=str(module.kconvert_layout),
                device=device,
                selection=selection,
                training_kernel=training.kernel_id,
                by_view=selection.kernel_id is not None
                and isinstance(module, Layout)
                and device in module.kconvert_views(),
            )
        )
    return Report(tuple(modules))
