"""What a level gets: the converted directory, its manifest, the source and where to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kconvert.manifest import Manifest

__all__ = ["SEED", "VerifyJob"]

SEED = 0
"""Of tokens and random inputs; every run compares the same."""


@dataclass(frozen=True)
class VerifyJob:
    """One run of `verify`.

    Attributes:
        directory: the converted directory.
        manifest: its manifest.
        source: the checkpoint that it was converted from; None takes the stock weights out of the converted file.
        device: a device as torch names it, `cpu` or `cuda:1`.
        trust_remote_code: run kernel packages and model code of both directories.
        trust_kernels: package ID to digest: run just these packages.
    """

    directory: Path
    manifest: Manifest
    source: Path | None
    device: str
    trust_remote_code: bool
    trust_kernels: Mapping[str, str] = field(default_factory=dict)
