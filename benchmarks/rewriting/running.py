"""Runs one thing in processes of its own, and says how long it took and how much memory it had.

A run starts with its source in the page cache and with nothing waiting to be written; what it wrote is removed after
it.  Only the time between the start of its first process and the end of its last one counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "FailedRun", "Finished", "clear", "run_all", "settled", "sync_files", "warm"]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK_BYTES = 1 << 20
_PATH = re.compile(r"/[^\s'\":,;)]+")


class FailedRun(RuntimeError):
    """A process ended badly; `code` is its exit code, the text its last line without paths."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Finished:
    """How a run went: its seconds, the largest peak of its processes in bytes, and what it printed.

    A process begins as a copy of the one that starts it, and its peak counts from there: one that is not above the peak
    of this process is not known, and None.
    """

    seconds: float
    peak_bytes: int | None
    output: str


def _environment() -> dict[str, str]:
    """No network, kconvert from this checkout, and as many threads as each tool takes by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    search_path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": search_path}


def run_all(commands: Sequence[Sequence[str]], *, after: Callable[[], None] | None = None) -> Finished:
    """Run the commands side by side, and then `after`, which counts too.

    Raises:
        FailedRun: one of them did not end with exit code 0.
    """
    with contextlib.ExitStack() as stack:
        logs = [(stack.enter_context(_log()), stack.enter_context(_log())) for _ in commands]
        environment = _environment()
        started = time.perf_counter()
        processes = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=error, env=environment)
            for command, (out, error) in zip(commands, logs, strict=True)
        ]
        peak_bytes = _wait(processes)
        failed = [number for number, process in enumerate(processes) if process.returncode]
        if after is not None and not failed:
            after()
        seconds = time.perf_counter() - started
        for number in failed:
            raise FailedRun(processes[number].returncode, _last_line(_text(logs[number][1])))
        return Finished(seconds, peak_bytes, "".join(_text(out) for out, _ in logs))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits for all processes; gives the largest peak of resident bytes, if it is known."""
    peak_bytes = 0
    try:
        for process in processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            peak_bytes = max(peak_bytes, usage.ru_maxrss * 1024)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise
    return peak_bytes if peak_bytes > _own_peak_bytes() else None


def _own_peak_bytes() -> int:
    """The peak since this program began; `getrusage` would count what the process was before."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _log() -> contextlib.AbstractContextManager[tempfile._TemporaryFileWrapper[bytes]]:
    return tempfile.NamedTemporaryFile()


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    return Path(file.name).read_text(encoding="utf-8", errors="replace")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PATH.sub("PATH", lines[-1])[:300] if lines else "no message"


def sync_files(folder: Path) -> None:
    """Puts every file of `folder`, and then the folder, on the disk."""
    for path in [*sorted(each for each in folder.rglob("*") if each.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def warm(folder: Path) -> None:
    """Reads all files of a folder, so that they are in the page cache."""
    block = bytearray(_BLOCK_BYTES)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def clear(*folders: Path) -> None:
    """Removes what a run wrote, also where it did not finish, and waits until the disk is at rest."""
    for folder in folders:
        for path in (folder, folder.with_name(f"{folder.name}.partial")):
            shutil.rmtree(path, ignore_errors=True)
    os.sync()


@contextlib.contextmanager
def settled(sources: Sequence[Path], output: Path) -> Iterator[None]:
    """Everything around a run that does not count."""
    clear(output)
    for source in sources:
        warm(source)
    try:
        yield
    finally:
        clear(output)
