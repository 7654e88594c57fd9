"""What the figures depend on: the machine, as far as that says nothing about whose it is, and versions.

Linux only, as kconvert's offline side is.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["installed_versions", "machine_facts", "peer_versions"]


def machine_facts(work: Path, load: float | None) -> dict[str, Any]:
    """What the figures depend on, and nothing that says whose machine it is."""
    cp = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(work),
        "system": platform.system(),
        "kernel": platform.release().partition("-")[0],
        "cp": cp[0] if cp else "unknown",
        "unwritten_bytes": _unwritten_bytes(),
        "load_at_start": load,
    }


def _unwritten_bytes() -> int:
    """How much may wait to be written before the kernel slows writers down: half way between its two limits."""
    available = int(Path("/proc/meminfo").read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0]) * 1024
    return sum(_dirty_limit(name, available) for name in ("dirty_background", "dirty")) // 2


def _dirty_limit(name: str, available: int) -> int:
    """A limit in bytes; it is set as such, or else in percent of the memory that is available."""
    size, percent = (int(Path("/proc/sys/vm", f"{name}_{unit}").read_text()) for unit in ("bytes", "ratio"))
    return size or available * percent // 100


def _file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, by its device number."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of distributions, in this interpreter."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def peer_versions(python: str, peers: Sequence[str]) -> dict[str, str]:
    """Versions of the peers and of what they need, in their interpreter; what is not installed is left out."""
    names = [*peers, "torch", "safetensors"]
    code = "import json, sys; from importlib.metadata import distributions; "
    code += "print(json.dumps({d.metadata['Name'].lower(): d.version for d in distributions()}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"rewrite.py: --peer-python {python} does not run: {done.stderr.strip()[-200:]}")
    installed: dict[str, str] = json.loads(done.stdout)
    return {name: installed[name] for name in names if name in installed}
