"""The report of a `verify` run, and the file that keeps it beside the model.

Canonical JSON without times: the same run on the same machine gives the same bytes.  The manifest's digest is in
it, so a report that belongs to an earlier conversion is told by it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kconvert.manifest import canonical_json
from kconvert.names import PARITY_NAME
from kconvert.parity.results import Failure, LevelResult
from kconvert.rewrite.durable import write_synced

__all__ = ["ParityReport", "write_report"]


@dataclass(frozen=True)
class ParityReport:
    """What was compared, and what was found.

    Attributes:
        levels: name to result, in the order in which they ran.
        from_source: whether the stock weights came from the source; else they are those of the converted file.
        manifest_digest: of the converted directory.
        device: `type` as torch names it, and `name`.
        versions: of kconvert, torch and transformers.
    """

    levels: dict[str, LevelResult]
    from_source: bool
    manifest_digest: str
    device: dict[str, str]
    versions: dict[str, str]

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What does not hold, level by level, the worst of each first."""
        return tuple(failure for level in self.levels.values() for failure in level.failures())

    @property
    def fix(self) -> str:
        """What to do about the failures."""
        if all(failure.is_kernel for failure in self.failures):
            return 'load it with kernels="reference", which gives the stock results, and tell who wrote the kernel'
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
            "failures": [{"where": failure.where, "what": failure.what} for failure in self.failures],
            "stock_weights": "source" if self.from_source else "converted file",
            "manifest_digest": self.manifest_digest,
            "device": self.device,
            "versions": self.versions,
            "levels": {name: level.to_json() for name, level in self.levels.items()},
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
