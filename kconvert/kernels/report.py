"""The report: per patched module which kernel runs, and why the others do not.

Made from the modules at the moment it is asked for, so it follows `model.to(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import is_patched, stock_class_of
from kconvert.kernels.select import Mode, Selection

__all__ = ["ModuleReport", "Report", "build_report", "module_device"]

REFERENCE = "reference"


@dataclass(frozen=True)
class ModuleReport:
    """One patched module: its path, stock class, layout, device, and the choice for inference there."""

    path: str
    class_name: str
    layout: str
    device: str
    selection: Selection
    training_kernel: str | None

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
        """A table with one row per group of modules that differ in nothing but their numbers."""
        if not self.modules:
            return "no module is patched"
        groups: dict[tuple[str, ...], list[ModuleReport]] = {}
        for module in self.modules:
            shape = ".".join("*" if part.isdecimal() else part for part in module.path.split("."))
            key = (shape, module.class_name, module.layout, module.device, module.kernel, module.selection.reasons())
            groups.setdefault(key, []).append(module)
        rows = [("modules", "n", "device", "runs", "layout", "not used")]
        rows += [
            (shape, str(len(members)), device, kernel, layout, why or "-")
            for (shape, _, layout, device, kernel, why), members in groups.items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = []
        for row in rows:
            lines.append(
                "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), ""]).rstrip()
            )
            for number, reason in enumerate(row[5].split("; ")):
                if row is not rows[0] and reason != "-":
                    lines.append(f"    {'not used: ' if number == 0 else '          '}{reason}")
        return "\n".join(lines)

    __repr__ = __str__


def module_device(module: nn.Module) -> str:
    """The device type of the module's parameters; where accelerate moves them, that of execution."""
    hook_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if hook_device is not None:
        return str(hook_device).split(":")[0] if not isinstance(hook_device, int) else "cuda"
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _patched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Dispatch]]:
    for path, module in model.named_modules():
        if is_patched(module) and cast("Dispatch", module.kconvert_dispatch).devices():
            yield path, module, cast("Dispatch", module.kconvert_dispatch)


def build_report(model: nn.Module) -> Report:
    """The report of a model, patched or not."""
    modules = []
    for path, module, dispatch in _patched_modules(model):
        device = module_device(module)
        nothing = Selection(None, ())
        training = dispatch.selection(device, Mode.TRAINING) or nothing
        modules.append(
            ModuleReport(
                path=path,
                class_name=stock_class_of(module).__name__,
                layout=str(module.kconvert_layout),
                device=device,
                selection=dispatch.selection(device, Mode.INFERENCE) or nothing,
                training_kernel=training.kernel_id,
            )
        )
    return Report(tuple(modules))
