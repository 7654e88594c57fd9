"""`verify`: check everything that costs nothing, then run the levels that were asked for.

Before a weight is read: the manifest and the source; where a level loads models also config.json, trust, the device, and
whether a model fits into memory.  Level `bytes` loads none, so it imports no torch and runs no code of the directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kconvert import __version__
from kconvert.errors import PreflightError, TrustError, UsageError
from kconvert.garbage import collector_stopped
from kconvert.kernels.base import DeviceType
from kconvert.kernels.device import device_reason
from kconvert.manifest import Manifest, load_manifest
from kconvert.names import KERNELS_DIR
from kconvert.parity.bytes_result import BytesLevel
from kconvert.parity.job import VerifyJob, no_progress
from kconvert.parity.memory import free_bytes, model_bytes
from kconvert.parity.report import LevelResult, ParityReport
from kconvert.parity.source import check_config, check_source

__all__ = ["LEVELS", "needs_model", "verify"]


def _bytes(job: VerifyJob) -> LevelResult:
    from kconvert.parity.bytes import compare_bytes

    return compare_bytes(job)


def _modules(job: VerifyJob) -> LevelResult:
    from kconvert.parity.modules import compare_modules

    return compare_modules(job)


def _logits(job: VerifyJob) -> LevelResult:
    from kconvert.parity.logits import compare_logits

    return compare_logits(job)


LEVELS: Mapping[str, Callable[[VerifyJob], LevelResult]] = {"bytes": _bytes, "modules": _modules, "logits": _logits}
"""Level to the function that runs it, in the order in which they run."""


def needs_model(levels: Sequence[str] | None) -> bool:
    """Whether one of the levels loads models, for which torch is needed; None stands for the default ones."""
    return levels is None or any(level != "bytes" for level in levels)


def verify(
    directory: Path,
    *,
    source: Path | None = None,
    levels: Sequence[str] | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ParityReport:
    """Compare a converted directory with its source, or with the stock model.

    Args:
        directory: what `apply` wrote.
        source: what it was made of; without it bytes are compared with the digests that `apply --digests` kept, if it
            did, and the stock weights are taken out of the converted file.
        levels: of `LEVELS`; if left out `modules`, and `logits` where no module is patched, or where transformers' joined
            tensors are stored and the source is given.
        device: where both models run, `cpu` or `cuda:1`.
        trust_remote_code: run the kernel packages and the model code that come with the directories; `bytes` runs none.
        trust_kernels: package ID to digest: run just these packages.
        on_start: called once level `bytes` knows how many bytes it compares.
        on_progress: called with the number of bytes just compared.

    Returns:
        The report; `failures` is empty where everything holds, `proved` says whether all of it was shown.

    Raises:
        UsageError: an unknown level or device, or a source where there can be none.
        CheckpointError: the converted directory is damaged, or the source is not the one; for level `bytes` only where
            the manifest cannot be used, the rest is in the report.
        TrustError: code would run that is not trusted.
        PreflightError: the model does not fit into memory.
        LoadError: a model did not load whole.
        VerificationError: config.json of the converted directory is not the one of the conversion.
    """
    unknown = [level for level in levels or () if level not in LEVELS]
    if unknown or (levels is not None and not levels):
        raise UsageError(
            f"no level {', '.join(map(repr, unknown)) or 'is given'}", fix=f"levels are {', '.join(LEVELS)}"
        )
    with collector_stopped():
        manifest = load_manifest(directory)
    levels = levels or _default_levels(manifest, has_source=source is not None)
    has_models = needs_model(levels)
    if has_models:
        _check_can_run(directory, manifest, levels, has_source=source is not None)
        check_config(directory, manifest)
    checkpoint = check_source(source, manifest) if source is not None else None
    if has_models:
        _check_trust(directory, manifest, trust_remote_code, trust_kernels or {})
        _check_device(device)
        _check_memory(directory, manifest, device)
    job = VerifyJob(
        directory,
        manifest,
        source,
        device,
        trust_remote_code,
        dict(trust_kernels or {}),
        checkpoint,
        on_start or no_progress,
        on_progress or no_progress,
    )
    results, not_run = _run(job, levels)
    ran_models = needs_model([*results])
    return ParityReport(
        levels=results,
        from_source=source is not None,
        manifest_digest=manifest.digest(),
        device={"type": device, "name": _device_name(device)} if ran_models else None,
        versions=_versions(with_models=ran_models),
        not_run=not_run,
        written_by=manifest.written_by,
    )


def _default_levels(manifest: Manifest, *, has_source: bool) -> tuple[str, ...]:
    if not any(record.modules for record in manifest.patches):
        return ("logits",)
    # what was joined outside the patched modules shows in the logits alone
    is_baked = any(record.patch is None and record.op != "copy" for record in manifest.tensors)
    return ("modules", "logits") if is_baked and has_source else ("modules",)


def _check_can_run(directory: Path, manifest: Manifest, levels: Sequence[str], *, has_source: bool) -> None:
    """Refuse levels that would compare nothing."""
    is_patched = any(record.modules for record in manifest.patches)
    if not is_patched and "modules" in levels:
        raise UsageError(
            "no module is patched, so there are none to compare", where=str(directory), fix="use --level logits"
        )
    if not is_patched and not has_source:
        raise UsageError(
            "no module is patched, so the converted tensors can only be compared with the source's",
            where=str(directory),
            fix="give the source with --source DIR, or use --level bytes alone",
        )


def _run(job: VerifyJob, levels: Sequence[str]) -> tuple[dict[str, LevelResult], tuple[str, ...]]:
    """The results, and the levels that could not run: no model is loaded of files that are not the manifest's."""
    results: dict[str, LevelResult] = {}
    for name in (name for name in LEVELS if name in levels):
        found = results.get("bytes")
        if isinstance(found, BytesLevel) and not found.is_whole:
            return results, tuple(other for other in LEVELS if other in levels and other not in results)
        if name != "bytes":
            from kconvert.runtime.checks import check_files

            check_files(job.directory, job.manifest)
        results[name] = LEVELS[name](job)
    return results, ()


def _check_trust(
    directory: Path, manifest: Manifest, trust_remote_code: bool, trust_kernels: Mapping[str, str]
) -> None:
    """Refuse what loading would refuse, before anything is read; loading then looks at the code itself."""
    packages = [record.layout.package for record in manifest.patches if record.layout.package is not None]
    for package in packages if not trust_remote_code else ():
        if package.package_id not in trust_kernels:
            option = shlex.quote(f"{package.package_id}={package.digest}")
            raise TrustError(
                f"kernel package {package.package_id!r} would run code from this directory",
                where=str(directory / KERNELS_DIR),
                fix=f"read it, then pass --trust-kernel {option} or --trust-remote-code",
            )


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    known = [item.value for item in DeviceType]
    if kind not in known or not (index.isdecimal() or device == kind):
        raise UsageError(f"unknown device {device!r}", fix=f"one of {', '.join(known)}, with a number as in cuda:1")
    reason = device_reason(DeviceType(kind))
    if reason is not None:
        raise UsageError(f"device {device!r} cannot be used: {reason}", fix="leave --device out to run on the CPU")
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _check_memory(directory: Path, manifest: Manifest, device: str) -> None:
    needed, free = model_bytes(manifest), free_bytes(device)
    if free is not None and needed > free:
        raise PreflightError(
            f"the model has {needed / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB of memory are free; "
            "models are compared in memory, one at a time, and not offloaded",
            where=str(directory),
            fix="verify on a machine with more memory",
        )


def _device_name(device: str) -> str:
    """The GPU's name; for a CPU its instruction set, on which the rounding of sums depends."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(torch.backends.cpu.get_cpu_capability()) if device == "cpu" else device


def _versions(*, with_models: bool) -> dict[str, str]:
    if not with_models:
        return {"kconvert": __version__}
    import torch
    import transformers

    return {"kconvert": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
