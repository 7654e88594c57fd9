"""`kconvert list-kernels`: what there is, what runs on this machine, and why the rest does not."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, KernelDevice
from kconvert.cli.output import foreign_output_apart, note, print_folded, print_json, print_table
from kconvert.errors import UsageError
from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.registry import Registry, check_deps_reason, kernel_entry_points
from kconvert.kernels.specs import kernel_specs

__all__ = ["list_kernels_command"]


def list_kernels_command(
    device: KernelDevice = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Do not look at the machine; imports no torch.")] = False,
    json: Json = False,
) -> None:
    """List every kernel, and whether it runs here."""
    known = [kind.value for kind in DeviceType]
    if device is not None and device not in known:
        raise UsageError(f"unknown device {device!r}", fix=f"one of {', '.join(known)}")
    if not no_probe:
        prepare_torch()
    with foreign_output_apart():
        rows = [row for row in (_declared() if no_probe else _probed()) if device in (None, row["device"])]
    if json:
        print_json(rows)
        return
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["available"] is False))
    print_table(
        "Kernels",
        ("id", "device", "layout", "runs here"),
        [(row["id"], row["device"], row["layout"] or "-", _verdict(row, reasons)) for row in rows],
        whole=("id", "device", "layout"),
    )
    for number, reason in enumerate(reasons, start=1):
        print_folded(reason, first=f"no ({number}): ", indent=8)
    if no_probe and kernel_entry_points():
        names = ", ".join(point.name for point in kernel_entry_points())
        note(f"kconvert: other packages bring kernels too ({names}); leave out --no-probe to see them")


def _verdict(row: dict[str, Any], reasons: list[str]) -> str:
    """Reasons stand below the table, by number: many kernels have one and the same."""
    if row["available"] is None:
        return "not probed"
    return "yes" if row["available"] else f"no ({reasons.index(row['reason']) + 1})"


def _declared() -> list[dict[str, Any]]:
    return [
        {"id": kernel_id, "device": entry.device, "layout": spec.name, "available": None, "reason": "not probed"}
        for kernel_id, (spec, entry) in sorted(kernel_specs().items())
    ]


def _probed() -> list[dict[str, Any]]:
    rows = []
    for kernel_id, kernel in Registry.catalog().items():
        reason = check_deps_reason(kernel)
        layout = kernel.layout.spec.name if issubclass(kernel, LayoutKernel) else None
        rows.append(
            {
                "id": kernel_id,
                "device": kernel.device().value,
                "layout": layout,
                "available": reason is None,
                "reason": reason or "",
            }
        )
    return rows
