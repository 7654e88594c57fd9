"""A bench for the session, in memory where the machine has that: an fsync costs nothing there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.bench import Bench, write_small
from tests.crash.server import Server


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="kconvert-crash-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    with Server(write_small(folder / "source")) as server:
        yield server


@pytest.fixture(scope="session")
def bench(folder: Path, server: Server) -> Bench:
    return Bench(folder, folder / "source", write_small(folder / "older-source", 1), server)
