"""How much memory there is, so that a model that does not fit is refused and not killed."""

from __future__ import annotations

from pathlib import Path

from kconvert.checkpoint import DTYPE_BITS
from kconvert.manifest import Manifest

__all__ = ["free_bytes", "model_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def model_bytes(manifest: Manifest) -> int:
    """The size of all tensors of a converted checkpoint."""
    total = 0
    for record in manifest.tensors:
        count = 1
        for size in record.shape:
            count *= size
        total += count * DTYPE_BITS.get(record.dtype, 16) // 8
    return total


def free_bytes(device: str) -> int | None:
    """Memory that this process may still take on a GPU, else of the machine or its cgroup; None if unknown."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    found = [size for size in (_machine_bytes(), _cgroup_bytes()) if size is not None]
    return min(found, default=None)


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_bytes() -> int | None:
    """What the cgroup (version 2) has left; pages of files that it could drop count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(int(limit) - used + cached, 0)
