"""What only another process can show: locks, kills, signals, memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kconvert.errors import OutputError
from kconvert.rewrite import Extent, Job, OutputFile, rewrite
from kconvert.rewrite.output import LOCK_NAME

ROOT = Path(__file__).parents[2]
SIZE = 300_000_000

# argv: source, output, what to do once some bytes are copied
CHILD = """
import resource, sys, time
from pathlib import Path
from kconvert.rewrite import Extent, Job, OutputFile, rewrite
source, output, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
size = source.stat().st_size
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def progress(size_bytes):
    if mode == "wait":
        print("copying", flush=True)
        time.sleep(60)
if mode in ("kernel", "memory"):
    from kconvert.rewrite import copying
    from kconvert.rewrite.ways import KernelCopies
    copying.kernel_copies = lambda source_fd, target_fd: KernelCopies.NEVER if mode == "memory" else KernelCopies.ALWAYS
files = tuple(OutputFile(f"f{n}", b"p", (Extent(source, n * size // 3, size // 3),)) for n in range(3))
rewrite(Job(files, (), (("kconvert_manifest.json", b"{}"),)), output, on_progress=progress)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


@pytest.fixture
def start(source: Path, tmp_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def run(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "out"), mode]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        children.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate()


def wait_for_bytes(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "copying\n"


def small_job(source: Path) -> Job:
    return Job((OutputFile("f0", b"", (Extent(source, 0, 1000),)),), (), (("kconvert_manifest.json", b"{}"),))


def test_live_run_then_killed(start: Start, source: Path, tmp_path: Path) -> None:
    child = start("wait")
    wait_for_bytes(child)
    with pytest.raises(OutputError, match="another live run") as caught:
        rewrite(small_job(source), tmp_path / "out")
    assert caught.value.exit_code == 7
    assert (tmp_path / "out.partial" / LOCK_NAME).exists()

    child.kill()
    child.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "source"]
    rewrite(small_job(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out" / "f0").read_bytes() == bytes(1000)


def test_ctrl_c(start: Start, tmp_path: Path) -> None:
    child = start("wait")
    wait_for_bytes(child)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, text = child.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert text.rstrip().endswith("KeyboardInterrupt")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("mode", ["kernel", "memory"])
def test_memory_is_bounded(start: Start, tmp_path: Path, mode: str) -> None:
    text, errors = start(mode).communicate(timeout=120)
    assert not errors
    assert int(text) < 32 * 1024, "KiB more than before"
    assert (tmp_path / "out" / "f2").stat().st_size == SIZE // 3 + 1
