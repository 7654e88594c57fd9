"""`kconvert verify`: does a converted directory hold what its source holds, and compute what it computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kconvert.cli.backends import prepare_torch
from kconvert.cli.options import Json, TrustKernel, complete_path, trusted_kernels
from kconvert.cli.output import (
    foreign_output_apart,
    note,
    print_folded,
    print_json,
    print_table,
    printable,
    warn,
)
from kconvert.cli.progress import Progress
from kconvert.cli.verify_bytes import bytes_verdict, show_bytes
from kconvert.errors import VerificationError
from kconvert.names import PARITY_NAME, starred
from kconvert.parity import (
    LEVELS,
    BytesLevel,
    LogitsLevel,
    LogitsResult,
    ModuleResult,
    ModulesLevel,
    ParityReport,
    Result,
    Verdict,
    needs_model,
    verify,
    worst,
    write_report,
)

__all__ = ["verify_command"]


def _complete_level(incomplete: str) -> list[str]:
    return [name for name in LEVELS if name.startswith(incomplete)]


def verify_command(
    converted: Annotated[
        Path,
        typer.Argument(metavar="CONVERTED", help="The folder that apply wrote.", autocompletion=complete_path),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="DIR",
            help="The checkpoint that was converted.  Without it the stock weights come from CONVERTED itself, and bytes "
            "are compared with the digests that `apply --digests` kept, if it did.",
            autocompletion=complete_path,
        ),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            metavar="|".join(LEVELS),
            help="What to compare.  bytes: every byte of every tensor and file, without torch; modules: every patched "
            "module, on random inputs; logits: the whole model, on random tokens.  Only what is named runs; give it again "
            "for more.  [default: modules; logits too where tensors such as experts were joined, and the source is given]",
            autocompletion=_complete_level,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where both models run: cpu, cuda, cuda:1, npu.")
    ] = "cpu",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the kernel packages and the model code that come along.")
    ] = False,
    trust_kernel: TrustKernel = None,
    require_proof: Annotated[
        bool,
        typer.Option(
            "--require-proof", help="Exit code 5 also where nothing is wrong, but something could not be shown to hold."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Compare a converted directory with its source, or with the stock model.

    Exit code 5 where they do not agree.  Level bytes reads every byte and runs nothing.  At the others the reference of
    every patched module has to give the stock bits, in the checkpoint's dtype and in others.  The kernel that
    load_converted chooses may round otherwise, within limits that the report states.  One model is in memory at a
    time.  The report is also written to CONVERTED/kconvert_parity.json.

    Example: kconvert verify my-model-kconvert --source my-model --level bytes --level modules
    """
    trust_kernels = trusted_kernels(trust_kernel)
    if needs_model(level or None):
        prepare_torch()
    with Progress(f"verifying {printable(converted.name or str(converted))}") as progress, foreign_output_apart():
        report = verify(
            converted,
            source=source,
            levels=level or None,
            device=device,
            trust_remote_code=trust_remote_code,
            trust_kernels=trust_kernels,
            on_start=progress.comparing,
            on_progress=progress.advance,
        )
    _keep(report, converted)
    if not json:
        _show(report)
    _note_limits(report)
    if report.failures:
        raise _error(report)
    if require_proof and not report.proved:
        raise VerificationError(
            f"nothing is wrong, but not everything is proved: {'; '.join(report.unproved)}",
            where=printable(str(converted)),
            fix=report.proof,
            details=report.to_json(),
        )
    if json:
        print_json(report.to_json())
        return
    for result in report.levels.values():
        print_folded(f"OK: {_verdict(result)}.")


def _note_limits(report: ParityReport) -> None:
    """What the levels that ran do not show."""
    if report.not_run:
        note(f"kconvert: level {' and '.join(report.not_run)} did not run: the files are not those of the manifest")
    if report.ran_model and not report.from_source:
        note(
            "kconvert: stock weights come from the converted directory itself; --source DIR compares with the checkpoint"
        )
    elif report.ran_model and "bytes" not in report.levels:
        note("kconvert: tensors outside the patched modules are not compared one by one; --level bytes does that")
    found = report.levels.get("bytes")
    if found is not None and found.unproved is not None and not report.failures:
        note(f"kconvert: not proved: {found.unproved}" + (f"; {report.proof}" if report.proof else ""))


def _keep(report: ParityReport, directory: Path) -> None:
    try:
        path = write_report(report, directory)
    except OSError as error:
        warn(f"{PARITY_NAME} cannot be written ({error.strerror or error}); going on without it")
    else:
        note(f"kconvert: the report is in {printable(str(path))}")


def _error(report: ParityReport) -> VerificationError:
    first, count = report.failures[0], len(report.failures)
    more = f" (and {count - 1} more)" if count > 1 else ""
    return VerificationError(f"{first.what}{more}", where=first.where, fix=report.fix, details=report.to_json())


def _verdict(result: BytesLevel | ModulesLevel | LogitsLevel) -> str:
    if isinstance(result, BytesLevel):
        return bytes_verdict(result)
    if isinstance(result, LogitsLevel):
        run = [item.dtype for item in result.results if item.verdict is not Verdict.NOT_RUN]
        return f"the logits agree in {' and '.join(dict.fromkeys(run))}"
    total, unshown = len(result.modules), result.unshown
    missed = total - result.num_reached
    parts = [f"{total - len(unshown) - missed} of {total} patched modules agree"]
    if unshown:
        dtypes = dict.fromkeys(dtype for module in unshown for dtype in module.unshown_dtypes)
        everywhere = all(set(module.unshown_dtypes) == set(_compared_dtypes(module)) for module in unshown)
        where = "any dtype" if everywhere else " or ".join(dtypes)
        example = f"{'' if len(unshown) == 1 else 'e.g. '}{printable(unshown[0].path)}"
        parts.append(f"{len(unshown)} could not be shown in {where} ({example})")
    if missed:
        parts.append(f"{missed} {'was' if missed == 1 else 'were'} not compared")
    return "; ".join(parts)


def _compared_dtypes(*modules: ModuleResult) -> list[str]:
    """The dtypes in which something was compared."""
    found = [item for module in modules for item in module.results if item.verdict is not Verdict.NOT_RUN]
    return list(dict.fromkeys(item.dtype for item in found))


def _show(report: ParityReport) -> None:
    weights = "the source" if report.from_source else "the converted file"
    device = report.device or {"type": "", "name": ""}
    where = f"{device['type']} ({device['name']}), stock weights from {weights}"
    for result in report.levels.values():
        if isinstance(result, BytesLevel):
            show_bytes(result)
        elif isinstance(result, ModulesLevel):
            _show_modules(result, f"Modules on {where}")
        else:
            _show_logits(result, f"Logits on {where}")


def _show_modules(level: ModulesLevel, title: str) -> None:
    groups: dict[tuple[str, ...], list[ModuleResult]] = {}
    for module in level.modules:
        groups.setdefault(tuple(map(starred, module.paths)), []).append(module)
    rows = [row for paths, modules in groups.items() for row in _group_rows("\n+ ".join(paths), modules)]
    columns = ("modules", "n", "runs", "difference")
    print_table(title, columns, rows, right=("n",), whole=("runs",), names="modules")
    dtypes = ", ".join(_compared_dtypes(*level.modules))
    if dtypes:
        print_folded(f"Compared in {dtypes}; a difference is a share of the largest stock value.")
    if level.stopped is not None:
        print_folded(f"The stock model does not run: {level.stopped}")


def _group_rows(path: str, modules: list[ModuleResult]) -> list[tuple[str, ...]]:
    """One row for the references and one for each kernel, with the worst of all dtypes; one for what is not reached."""
    rows: list[tuple[str, ...]] = []
    found = [(module.path, result) for module in modules for result in module.results]
    found = [item for item in found if item[1].verdict is not Verdict.NOT_RUN]
    for kernels, kernel in dict.fromkeys((result.kernels, result.kernel) for _, result in found):
        same = [item for item in found if (item[1].kernels, item[1].kernel) == (kernels, kernel)]
        bad = worst(result for _, result in same)
        label = [] if rows else [path]
        if bad.verdict is not Verdict.EQUAL:
            label.append(f"  worst: {next(path for path, result in same if result is bad)}")
        rows.append(("\n".join(label), str(len({path for path, _ in same})), kernel, _cell(bad)))
    missing = sum(not module.results for module in modules)
    if missing:
        rows.append(("" if rows else path, str(missing), "-", Verdict.NOT_REACHED.value))
    return rows


def _cell(result: Result) -> str:
    """The difference beside its limit, and the dtype below."""
    if result.verdict is Verdict.EQUAL:
        return Verdict.EQUAL.value
    if result.verdict is Verdict.NO_PROOF:
        return f"no proof: all zero\nor NaN, {result.dtype}"
    shown = "not comparable" if result.difference is None else f"{result.difference:.1e}, allowed {result.limit:.2g}"
    return f"{shown}\n{'FAILED ' if result.verdict is Verdict.FAILED else ''}in {result.dtype}"


def _show_logits(level: LogitsLevel, title: str) -> None:
    run = [item for item in level.results if item.verdict is not Verdict.NOT_RUN]
    columns = ("dtype", "kernels", "largest", "mean", "largest\nstock", "KL", "top-1", "")
    print_table(title, columns, [_logits_row(item) for item in run], right=columns[2:7], whole=("dtype", "kernels"))
    if run:
        print_folded("Absolute differences of logits, beside the largest stock logit; KL in nats.")
    for item in level.results:
        if item.verdict is Verdict.NOT_RUN:
            print_folded(f"{item.dtype}, {item.kernels}: not run: {item.reason}")
    if level.stopped is not None:
        print_folded(f"Nothing was compared: {level.stopped}")


def _logits_row(item: LogitsResult) -> tuple[str, ...]:
    figures = (_number(value) for value in (item.max_abs, item.mean_abs, item.largest, item.kl))
    top1 = "-" if item.top1 is None else f"{item.top1:.1%}"
    return (
        item.dtype,
        item.kernels,
        *figures,
        top1,
        item.verdict.upper() if not item.verdict.is_pass else item.verdict,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else ("0" if value == 0 else f"{value:.1e}")
