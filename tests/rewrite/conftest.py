"""Small real source files, and a job over them with its expected result."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from kconvert.rewrite import Copy, Extent, Job, OutputFile, copying
from kconvert.rewrite.ways import KernelCopies


@dataclass(frozen=True)
class Case:
    """A job, and the bytes that every file of its output must have."""

    job: Job
    expected: Mapping[str, bytes]
    source: Path


def no_copy_threads() -> bool:
    """Whether every copy thread has ended; other tests in the process may have left threads of their own."""
    return not [thread for thread in threading.enumerate() if thread.name.startswith("kconvert-copy")]


def let_the_kernel_copy(monkeypatch: pytest.MonkeyPatch, where: KernelCopies = KernelCopies.ALWAYS) -> None:
    """As on a network disk, or on one that shares blocks; the test's own disk may be any."""
    monkeypatch.setattr(copying, "kernel_copies", lambda source_fd, target_fd: where)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(7)
    data = {name: rng.randbytes(size) for name, size in [("a", 300_000), ("b", 200_001), ("config.json", 77)]}
    for name, content in data.items():
        (source / name).write_bytes(content)
    a, b = source / "a", source / "b"
    one = OutputFile("one", b"prefix", (Extent(a, 0, 1000), Extent(a, 1000, 0), Extent(a, 1000, 5000), Extent(b, 3, 9)))
    two = OutputFile("two", b"", (Extent(b, 0, 200_001), Extent(a, 7, 299_993)))
    empty = OutputFile("empty", b"", ())
    copies = (Copy("config.json", source / "config.json", 77), Copy("code/deep/x.py", source / "config.json", 77))
    final = (("index.json", b"{}"), ("kconvert_manifest.json", b'{"schema": 1}'))
    expected = {
        "one": b"prefix" + data["a"][:6000] + data["b"][3:12],
        "two": data["b"] + data["a"][7:],
        "empty": b"",
        "config.json": data["config.json"],
        "code/deep/x.py": data["config.json"],
        **dict(final),
    }
    return Case(Job((one, two, empty), copies, final), expected, source)
