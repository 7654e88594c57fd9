"""The figures as a picture: one bar for each subject, a group for each kernel and case, as shares of the reference's time."""

from __future__ import annotations

from pathlib import Path

from kconvert.benching.run import BenchReport
from kconvert.errors import PreflightError, UsageError

__all__ = ["write_chart"]


def write_chart(report: BenchReport, path: Path) -> None:
    """Write a chart; the file's ending chooses the format.

    Raises:
        UsageError: matplotlib is not installed, nothing was timed, or a format that it does not write.
        PreflightError: the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError("a chart needs matplotlib", fix="pip install matplotlib, or leave out --chart") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.seconds.get("reference")]
    if not rows:
        raise UsageError("nothing was timed, so there is nothing to draw")
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.22 * len(rows) * len(names)), layout="constrained")
    for place, name in enumerate(names):
        shown = [
            (number, row.seconds[name] / row.seconds["reference"])
            for number, row in enumerate(rows)
            if name in row.seconds
        ]
        axes.barh(
            [number + place * 0.8 / len(names) for number, _ in shown],
            [share for _, share in shown],
            height=0.8 / len(names),
            label=name,
        )
    axes.set_yticks(
        [number + 0.4 - 0.4 / len(names) for number in range(len(rows))],
        [f"{row.kernel}\n{row.case}, {row.mode}" for row in rows],
        fontsize=7,
    )
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("time, as a share of the reference's")
    axes.set_title(f"{report.device_name}, {rows[0].dtype}")
    axes.legend(fontsize=7)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the chart cannot be written: {error}", where=str(path), fix="end its name in .png") from None
    except OSError as error:
        raise PreflightError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    finally:
        pyplot.close(figure)
