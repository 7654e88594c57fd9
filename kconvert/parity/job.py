"""What a level gets: the converted directory, its manifest, the source and where to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kconvert.checkpoint import Checkpoint
from kconvert.manifest import Manifest

__all__ = ["SEED", "VerifyJob", "no_progress"]

SEED = 0
"""Of tokens and random inputs; every run compares the same."""


def no_progress(size_bytes: int) -> None:
    """For a caller who wants no progress."""


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
        checkpoint: the source, opened.
        on_start: told how many bytes will be compared.
        on_progress: told how many were just compared.
    """

    directory: Path
    manifest: Manifest
    source: Path | None
    device: str
    trust_remote_code: bool
    trust_kernels: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    on_start: Callable[[int], None] = no_progress
    on_progress: Callable[[int], None] = no_progress
