"""A stand-in Hub for each test, with two versions of a kernel, and this process told to talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.helpers import REPO, forget_packages, norm_layers
from tests.hub.stand_in import StandInHub, built_package, use_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """`kernels-community/norm` in versions 1 and 2, online."""
    with StandInHub() as made:
        made.publish(REPO, built_package(norm_layers("one")), branch="v1")
        commit = made.publish(REPO, built_package(norm_layers("two"), version=2), branch="v2")
        made.tag(REPO, "release", commit)
        use_hub(monkeypatch, made, tmp_path / "cache")
        forget_packages()
        yield made
    forget_packages()
