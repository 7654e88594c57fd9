"""A sample of the errors and interrupts that `tests.crash.run` does everywhere, and some of them on the command line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.crash.bench import VARIANTS, Bench, Place, finished_in, told, write_larger, write_small
from tests.crash.layer import MOVING, Action, Fault
from tests.crash.server import Outcome, Run, Server
from tests.crash.sweeps import error_trial, errors, go_on, interrupts

ROOT = Path(__file__).parents[2]
FRESH = VARIANTS["fresh"]
SECOND = "model.kconvert-00002-of-00004.safetensors"
TREE = "./out.partial/output"


@pytest.mark.parametrize("name", ["fresh", "overwrite-by-two-renames", "hardlinks-and-digests", "kernel"])
def test_errors(bench: Bench, name: str) -> None:
    trials = list(errors(bench, VARIANTS[name]))
    for trial in Random(name).sample(trials, 10):
        assert trial().fired == 1


@pytest.mark.parametrize("name", ["fresh", "overwrite"])
def test_interrupts(bench: Bench, name: str) -> None:
    trials = list(interrupts(bench, VARIANTS[name], source_too=False))
    for trial in Random(name).sample(trials, 5):
        assert trial().outcome.endswith(" 130")


@pytest.mark.parametrize(
    ("label", "number", "ended"),
    [
        (f"pwrite {TREE}/{SECOND} 2", errno.ENOSPC, "PreflightError 6"),
        (f"pwrite {TREE}/{SECOND} 2", errno.EDQUOT, "PreflightError 6"),
        (f"posix_fallocate {TREE}/{SECOND} 1", errno.ENOSPC, "PreflightError 6"),
        (f"fsync {TREE}/{SECOND} 1", errno.EIO, "PreflightError 6"),
        ("fsync ./out.partial/journal.jsonl 2", errno.EIO, "PreflightError 6"),
        (f"fsync {TREE} 1", errno.EIO, "PreflightError 6"),
        ("fsync . 1", errno.EIO, "PreflightError 6"),
        ("rename ./out.partial/output 1", errno.EIO, "PreflightError 6"),
        ("fsync ./out.partial/output/kconvert_manifest.json 1", errno.EDQUOT, "PreflightError 6"),
        (f"fsync {TREE} 1", errno.EINVAL, "well"),
        (f"posix_fallocate {TREE}/{SECOND} 1", errno.EOPNOTSUPP, "well"),
    ],
)
def test_an_error(bench: Bench, label: str, number: int, ended: str) -> None:
    assert error_trial(bench, FRESH, Fault(label, "fail", number))().outcome == ended


@pytest.mark.parametrize(
    ("number", "ended"),
    [
        (errno.ENOSPC, "PreflightError 6"),
        (errno.EDQUOT, "PreflightError 6"),
        (errno.EINVAL, "well"),
        (errno.EIO, "well"),
    ],
)
def test_the_kernel_does_not_copy(bench: Bench, number: int, ended: str) -> None:
    """A full disk is one whoever copies; anything else is told by reading and writing."""
    fault = Fault(f"copy_file_range {TREE}/{SECOND} 2", "fail", number)
    assert error_trial(bench, VARIANTS["kernel"], fault)().outcome == ended


@pytest.mark.parametrize("action", ["short", "zero"])
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("kernel", f"copy_file_range {TREE}/{SECOND} 2"),
        ("fresh", f"pwrite {TREE}/{SECOND} 2"),
        ("fresh", "pwrite ./out.partial/journal.jsonl 2"),
    ],
)
def test_less_than_was_asked_for(bench: Bench, name: str, label: str, action: Action) -> None:
    """A short write is finished, a way that copies nothing is given up; only a file that takes nothing is an error."""
    ended = error_trial(bench, VARIANTS[name], Fault(label, action))().outcome
    assert ended == ("PreflightError 6" if action == "zero" and "pwrite" in label else "well")


@pytest.mark.parametrize("stays", [False, True])
def test_reads_that_fail(bench: Bench, stays: bool) -> None:
    variant = FRESH
    label = next(label for label in bench.labels(variant) if label.startswith("preadv source/model-00003"))
    assert error_trial(bench, variant, Fault(label, "fail", errno.EIO, stays))().outcome == "CheckpointError 4"
    assert error_trial(bench, variant, Fault(label, "short", stays=stays))().outcome == "well"
    assert error_trial(bench, variant, Fault(label, "zero", stays=stays))().outcome == "CheckpointError 4"


def test_the_kernel_stops_in_the_middle(bench: Bench) -> None:
    """What it has copied of a file is good, and the rest goes through memory."""
    variant = VARIANTS["kernel"]
    place = bench.place(variant)
    outcome = bench.run(place, Fault(f"copy_file_range {TREE}/{SECOND} 3", "fail", errno.EIO, stays=True))
    assert outcome.ended == "well", told(outcome)
    ways = [call.name for call in outcome.calls if call.place == f"{TREE}/{SECOND}" and call.name in MOVING]
    assert ways == ["pwrite", "copy_file_range", "copy_file_range", *["pwrite"] * (len(ways) - 3)]
    assert go_on(bench, place, "in the middle") == 0


# ---- a source that is changed while it is copied


def shrunk(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(10))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.rename(path)


def touched(path: Path) -> None:
    os.utime(path)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-50, os.SEEK_END)
        file.write(bytes(50))


@pytest.mark.parametrize("change", [shrunk, grown, replaced, touched, overwritten])
def test_a_source_that_changes_meanwhile(
    change: Callable[[Path], None], folder: Path, bench: Bench, server: Server
) -> None:
    source = write_small(folder / f"source-{change.__name__}")
    path = source / "model-00003-of-00004.safetensors"
    place = bench.place(VARIANTS["one-worker"])
    run = bench.command(place, source=str(source), fault=Fault(f"pwrite {TREE}/{SECOND} 2", "pause"))
    server.start(run)
    server.wait_for_pause(run)
    change(path)
    server.go_on(run)
    outcome = server.finish()
    assert (outcome.error, outcome.code) == ("CheckpointError", 4), told(outcome)
    assert "model-00003" in outcome.text
    assert "ends early" in outcome.text if change is shrunk else "has changed" in outcome.text
    assert not outcome.threads
    assert not outcome.descriptors
    assert list(place.root.iterdir()) == []


# ---- on the command line


def command(bench: Bench, place: Place, fault: Fault | None, *more: str) -> Outcome:
    arguments = ("apply", "qwen3", str(bench.source), "-o", str(place.output), "--no-model-check", "-q", *more)
    return bench.run(place, fault, command=arguments)


@pytest.mark.parametrize("where", ["main thread", "copy thread"])
def test_ctrl_c(bench: Bench, where: str) -> None:
    label = f"pwrite {TREE}/{SECOND} 2" if where == "copy thread" else f"open {TREE}/config.json 1"
    place = bench.place(FRESH)
    outcome = command(bench, place, Fault(label, "interrupt-after"))
    assert outcome.code == 130
    assert outcome.printed.splitlines()[-1].startswith("kconvert: error: interrupted")
    if where == "main thread":  # all four files are finished
        assert "4 of 4 weight files are kept" in outcome.printed
        assert "the same command goes on from there" in outcome.printed
        assert len(finished_in(place.partial)) == 4
    check_goes_on(bench, place)


def test_disk_full(bench: Bench) -> None:
    place = bench.place(FRESH)
    label = f"open {TREE}/kconvert_manifest.json 1"
    outcome = command(bench, place, Fault(label, "fail", errno.ENOSPC))
    assert outcome.code == 6
    first, second = outcome.printed.splitlines()
    assert first.startswith(f"kconvert: error: {place.partial}/output/kconvert_manifest.json: cannot be written: ")
    assert "the disk is full" in first
    assert "4 of 4 weight files are kept" in second
    check_goes_on(bench, place)


# argv of the shell: a folder, the size of the disk to be, python, its program, the source
SMALL_DISK = """
mount -t tmpfs -o size="$2" tmpfs "$1" || exit 99
"$3" -c "$4" apply qwen3 "$5" -o "$1/out" --no-model-check -q
code=$?
ls -A "$1"
exit $code
"""
PROGRAM = "import sys; from kconvert.cli import main; sys.exit(main(sys.argv[1:]))"
TOLD_OF_ROOM = """
import os
from types import SimpleNamespace
os.statvfs = lambda path: SimpleNamespace(
    f_bavail=10**9, f_frsize=4096, f_files=0, f_favail=0, f_namemax=255, f_bfree=10**9, f_bsize=4096
)
"""


@pytest.mark.parametrize("is_told", [True, False])
def test_a_disk_of_half_the_size(folder: Path, tmp_path: Path, is_told: bool) -> None:
    """B2, on a real one: seen before the first byte, and where the disk has told of more room than it has, when it is full."""
    if shutil.which("unshare") is None:
        pytest.skip("nobody may mount here")
    source = write_larger(folder / f"source-of-a-small-disk-{is_told}", layers=4, scale=16, shards=3)
    size = sum(path.stat().st_size for path in source.iterdir()) // 2
    (tmp_path / "disk").mkdir()
    arguments = (tmp_path / "disk", str(size), sys.executable, PROGRAM if is_told else TOLD_OF_ROOM + PROGRAM, source)
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare" in done.stderr or done.returncode == 99:
        pytest.skip("nobody may mount here")
    assert done.returncode == 6, done.stderr
    first, *more = done.stderr.splitlines()
    assert first.startswith("kconvert: error: ")
    assert ("needed" if is_told else "the disk is full") in first
    assert len(more) <= (0 if is_told else 1)
    assert done.stdout.split() in ([[]] if is_told else [[], ["out.partial"]])


def test_no_resume(bench: Bench) -> None:
    place = bench.place(FRESH)
    command(bench, place, Fault("fsync ./out.partial/journal.jsonl 3", "kill-after"))
    outcome = command(bench, place, None, "--digests")
    assert outcome.code == 7
    assert "--no-resume" in outcome.printed
    outcome = command(bench, place, None, "--no-resume", "--json")
    assert outcome.code == 0
    assert go_on(bench, place, "after --no-resume") == 0


def check_goes_on(bench: Bench, place: Place) -> None:
    outcome = command(bench, place, None)
    assert (outcome.ended, outcome.printed) == ("well", "")
    assert go_on(bench, place, "after the command line") == 0  # it is whole, and a run of the same says that it exists


def test_a_run_pauses_and_goes_on(bench: Bench, server: Server) -> None:
    """What the tests of changes rest on."""
    place = bench.place(FRESH)
    run: Run = bench.command(place, fault=Fault(f"pwrite {TREE}/{SECOND} 2", "pause"))
    server.start(run)
    server.wait_for_pause(run)
    assert (place.partial / "output" / SECOND).exists()
    server.go_on(run)
    assert server.finish().ended == "well"
    assert go_on(bench, place, "paused") == 0
