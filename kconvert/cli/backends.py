"""What commands do about torch backends that are installed and broken: go on without, and say so in one line."""

from __future__ import annotations

from kconvert.backends import hide_broken_backends
from kconvert.cli.output import warn

__all__ = ["prepare_torch"]


def prepare_torch() -> None:
    """Make torch importable in this process; call it before anything imports torch."""
    for name, reason in hide_broken_backends().items():
        warn(f"{name} is installed but does not import ({reason}); going on without it")
