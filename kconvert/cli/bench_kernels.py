"""`kconvert bench-kernels`: whether the kernels are right on this machine, and how fast beside what people use now."""

from __future__ import annotations

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
    """Time kernels beside the stock forward, torch.compile, and Liger where it is installed.

    A kernel whose result or gradients are not the stock module's, within the limits of `verify`, is not timed, and that is
    exit code 5.  `copy` is its share of the speed of a copy of as many bytes, measured in the same run.

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
    others = list(dict.fromkeys(name for row in report.rows for name in row.seconds if name != "kernel"))
    rows = []
    for row in report.rows:
        if row.problem is not None:
            rows.append((row.kernel, row.case, row.problem, *[""] * (len(others) + 1)))
            continue
        ours = row.seconds["kernel"]
        shares = [f"{ours / row.seconds[name]:.2f}" if name in row.seconds else "" for name in others]
        copied = "" if row.copy_share is None else f"{row.copy_share:.0%}"
        mode = "" if row.mode == "forward" else " and back"
        rows.append((row.kernel, row.case + mode, _time_text(ours), *shares, copied))
    columns = ("kernel", "case", "time", *(f"/ {name}" for name in others), "copy")
    print_table("Kernels", columns, rows, right=columns[2:], whole=("kernel",))
    speed = report.copy_bytes_per_second / 1e9
    print_text(f"{report.device_name}; a copy of 1 GiB: {speed:.0f} GB/s read and written")
    print_folded("; ".join(f"{name} {version}" for name, version in report.versions.items()))


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
