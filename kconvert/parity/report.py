"""The report of a `verify` run, and the file that keeps it beside the model.

Canonical JSON without times: the same run on the same machine gives the same bytes.  The manifest's digest is in
it, so a report that belongs to an earlier conversion is told by it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kconvert.manifest import canonical_json
from kconvert.names import PARITY_NAME
from kconvert.parity.bytes_result import BytesLevel
from kconvert.parity.results import Failure, LogitsLevel, ModulesLevel
from kconvert.rewrite.durable import write_synced

__all__ = ["LevelResult", "ParityReport", "write_report"]

LevelResult: TypeAlias = BytesLevel | ModulesLevel | LogitsLevel


@dataclass(frozen=True)
class ParityReport:
    """What was compared, and what was found.

    Attributes:
        levels: name to result, in the order in which they ran.
        from_source: whether the source was given; else the stock weights are those of the converted file.
        manifest_digest: of the converted directory.
        device: `type` as torch names it, and `name`; None where no model ran.
        versions: of kconvert and, where a model ran, of torch and transformers.
        not_run: levels that were asked for, and did not run because the files are not those of a model.
        written_by: as in the manifest.
    """

    levels: dict[str, LevelResult]
    from_source: bool
    manifest_digest: str
    device: dict[str, str] | None
    versions: dict[str, str]
    not_run: tuple[str, ...] = ()
    written_by: str = "apply"

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What does not hold, level by level, the worst of each first."""
        return tuple(failure for level in self.levels.values() for failure in level.failures())

    @property
    def ran_model(self) -> bool:
        """Whether a level ran that loads the two models."""
        return any(not isinstance(level, BytesLevel) for level in self.levels.values())

    @property
    def stock_weights(self) -> str | None:
        """Where the weights of the stock model came from; None where no model ran."""
        if not self.ran_model:
            return None
        return "source" if self.from_source else "converted file"

    @property
    def unproved(self) -> tuple[str, ...]:
        """What was not shown, level by level."""
        found = [f"level {name} was not run" for name in self.not_run]
        for name, level in self.levels.items():
            if level.unproved is not None:
                found.append(f"{name}: {level.unproved}")
        if self.ran_model and not self.from_source:
            found.append("the stock weights were taken out of the converted file, and may be wrong there")
        return tuple(found)

    @property
    def proof(self) -> str | None:
        """What would show it, where that is known."""
        if self.written_by != "apply":
            return None
        if not self.from_source:
            return "give the source with --source DIR" + (
                "" if self.ran_model else ", or convert with `apply --digests`"
            )
        is_bytes = any(isinstance(level, BytesLevel) and level.unproved for level in self.levels.values())
        return "convert with `apply --digests`" if is_bytes else None

    @property
    def proved(self) -> bool:
        """Whether everything that the levels look at was shown to hold."""
        return not self.failures and not self.unproved

    @property
    def fix(self) -> str:
        """What to do about the failures."""
        if all(failure.is_kernel for failure in self.failures):
            return 'load it with kernels="reference", which gives the stock results, and tell who wrote the kernel'
        fix = self.failures[0].fix
        if fix is not None:
            return fix
        if self.from_source:
            return (
                "make sure that --source is the checkpoint that was converted, not another one of its shape; if it is, "
                "do not use this conversion: convert again, and verify"
            )
        return "find out which of the two is at fault: --source DIR"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": 1,
            "holds": not self.failures,
            "proved": self.proved,
            "unproved": list(self.unproved),
            "failures": [{"where": failure.where, "what": failure.what} for failure in self.failures],
            "stock_weights": self.stock_weights,
            "manifest_digest": self.manifest_digest,
            "device": self.device,
            "versions": self.versions,
            "levels": {name: level.to_json() for name, level in self.levels.items()},
            "not_run": list(self.not_run),
        }


def write_report(report: ParityReport, directory: Path) -> Path:
    """Write the report into the converted directory, in place of an older one.

    Raises:
        OSError: the directory cannot be written; an older report is still whole.
    """
    path = directory / PARITY_NAME
    beside = path.with_name(f"{PARITY_NAME}.partial")
    try:
        beside.unlink(missing_ok=True)  # a link in a foreign directory may lead to any file
        write_synced(beside, canonical_json(report.to_json()))
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return path
