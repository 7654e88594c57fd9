"""`kconvert bench-kernels`: whether the kernels are right on this machine, and how fast beside what people use now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import foreign_output_apart, print_folded, print_json, print_table, print_text
from kconvert.cli.progress import Progress

if TYPE_CHECKING:
    from kconvert.benching import BenchReport, BenchRow

__all__ = ["bench_kernels_command"]


def bench_kernels_command(
    kernel: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KERNEL]...", help="Kernel IDs; every kernel of the device if left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, npu; the accelerator if left out."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16.")] = "bfloat16",
    chart: Annotated[
        Path | None,
        typer.Option(
            "--chart", metavar="FILE", help="Draw the figures too; needs matplotlib.", autocompletion=complete_path
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time kernels beside the stock forward, torch.compile, torch's own function, and Liger where it is installed.

    A kernel whose result or gradients are not the stock module's, within the limits of `verify`, is not timed, and that is
    exit code 5.  `/ liger` is its time as a share of Liger's.  `copy` is its share of the speed of a copy of as many bytes,
    measured in the same run.  A call that the device is done with soon is timed on the host too.

    Example: kconvert bench-kernels cuda_fused_rmsnorm --chart norms.png
    """
    prepare_torch()
    from kconvert.benching import bench_kernels  # loads torch
    from kconvert.errors import VerificationError
    from kconvert.kernels.device import current_accelerator

    where = device or current_accelerator().value
    with Progress(f"timing kernels on {where}"), foreign_output_apart():
        report = bench_kernels(where, kernels=kernel or (), dtype=dtype)
    if chart is not None:
        from kconvert.benching.chart import write_chart

        write_chart(report, chart)
    wrong = [row for row in report.rows if row.problem is not None and row.error is not None]
    if wrong and json:
        raise VerificationError(_said(wrong[0]), details=report.to_json())
    if json:
        print_json(report.to_json())
        return
    _show(report)
    if wrong:
        raise VerificationError(_said(wrong[0]), fix="do not use this kernel here")


def _said(row: BenchRow) -> str:
    return f"kernel {row.kernel!r}, {row.case}, {row.mode}: {row.problem}"


def _show(report: BenchReport) -> None:
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
        shown = [row for row in report.rows if row.kernel == kernel]
        others = list(dict.fromkeys(name for row in shown for name in row.seconds if name != "kernel"))
        columns = ("case", "time", *(f"/ {name}" for name in others), "copy")
        rows = []
        for row in shown:
            if row.problem is not None:
                rows.append((f"{row.case}: {row.problem}", *[""] * (len(columns) - 1)))
                continue
            case = row.case if row.mode == "forward" else f"{row.case}, and back"
            copied = "" if row.copy_share is None else f"{row.copy_share:.0%}"
            rows.append((case, *_times(row.seconds, others), copied))
            if row.host_seconds:
                rows.append((f"{case}, on the host", *_times(row.host_seconds, others), ""))
        print_table(kernel, columns, rows, right=columns[1:])
    speed = report.copy_bytes_per_second / 1e9
    print_text(f"{report.device_name}; a copy of 1 GiB: {speed:.0f} GB/s read and written")
    print_folded("; ".join(f"{name} {version}" for name, version in report.versions.items()))


def _times(seconds: Mapping[str, float], others: Sequence[str]) -> list[str]:
    """The kernel's time, and its ratio to that of the others."""
    ours = seconds["kernel"]
    return [_time_text(ours), *(f"{ours / seconds[name]:.2f}" if name in seconds else "" for name in others)]


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
