"""The collector that is stopped while plans are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kconvert.garbage import collector_stopped


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_running = gc.isenabled()
    yield
    (gc.enable if was_running else gc.disable)()


def test_it_stands_still_inside_and_runs_again_after() -> None:
    gc.enable()
    with collector_stopped():
        assert not gc.isenabled()
        with collector_stopped():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error() -> None:
    gc.enable()
    with pytest.raises(KeyError), collector_stopped():
        raise KeyError
    assert gc.isenabled()


def test_who_has_stopped_it_before_keeps_it_stopped() -> None:
    gc.disable()
    with collector_stopped():
        pass
    assert not gc.isenabled()


def test_it_is_stopped_for_each_call_of_a_function() -> None:
    @collector_stopped()
    def found() -> bool:
        return gc.isenabled()

    gc.enable()
    assert [found(), found(), gc.isenabled()] == [False, False, True]
