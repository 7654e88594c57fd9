"""Commands in processes of their own, with packages on the path that stand in for real ones, whole or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

__all__ = ["environment", "run_command", "write_distribution", "write_package"]

ROOT = Path(__file__).parents[2]
COMMAND = "import sys\nfrom kconvert.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """This process's environment, with folders first on Python's path and nothing that says how backends load."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", **more}


def run_command(env: Mapping[str, str], *argv: str | Path, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `kconvert` command."""
    command = [sys.executable, "-c", COMMAND, *map(str, argv)]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def write_package(folder: Path, name: str, text: str, *, version: str | None = None, **modules: str) -> None:
    """A package, with metadata where a version is given; `modules` are its submodules, `a__b` for `a.b`."""
    files = {"__init__": text, **{module.replace("__", "/"): source for module, source in modules.items()}}
    for module, source in files.items():
        path = folder / name / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source), encoding="utf-8")
    if version is not None:
        write_distribution(folder, name, version)


def write_distribution(folder: Path, name: str, version: str, *, metadata: str = "", entry_points: str = "") -> None:
    """The metadata that pip leaves."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
    (info / "METADATA").write_text(about, encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
