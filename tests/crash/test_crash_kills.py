"""A sample of the kills that `tests.crash.run` does everywhere: what stands under the name, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from tests.crash.bench import VARIANTS, Bench, Variant
from tests.crash.layer import Fault
from tests.crash.sweeps import Trial, kill_trial, kills, order_faults, power_cuts, repeated_kills
from tests.crash.traced import CannotTraceError, check_nothing_escapes

ALL = [pytest.param(variant, id=name) for name, variant in VARIANTS.items()]


def sample(trials: Iterable[Trial], number: int, seed: str) -> list[Trial]:
    return Random(seed).sample(list(trials), number)


def test_the_layer_sees_everything(bench: Bench) -> None:
    """What a run has to do for its output is there, and each of it has an address of its own."""
    labels = bench.labels(VARIANTS["overwrite-by-two-renames"])
    assert len(labels) == len({*labels}) > 200
    names = {label.split(" ", 1)[0] for label in labels}
    wanted = {"open", "mkdir", "flock", "pwrite", "preadv", "ftruncate", "posix_fallocate", "fsync", "rename"}
    assert wanted | {"unlink", "rmdir", "scandir", "listdir", "close", "exchange", "statvfs"} <= names
    assert {
        "pwrite ./out.partial/journal.jsonl 1",
        "fsync ./out.partial/output/model.kconvert-00004-of-00004.safetensors 1",
        "pwrite ./out.partial/output/kconvert_manifest.json 1",
        "fsync ./out.partial/output/kconvert_manifest.json 1",
        "rename ./out 1",
        "rename ./out.partial/output 1",
        "unlink ./out.partial/replaced/kconvert_manifest.json 1",
        "unlink ./out.partial/.kconvert-lock 1",
        "rmdir ./out.partial 1",
    } <= {*labels}


def test_nothing_escapes_the_layer(bench: Bench) -> None:
    try:
        assert check_nothing_escapes(bench, VARIANTS["overwrite-by-two-renames"])["rename"] == 2
    except CannotTraceError as error:
        pytest.skip(str(error))


def test_all_ways_come_to_the_same(bench: Bench) -> None:
    expected = bench.undisturbed(VARIANTS["fresh"])[1]
    others = {"digests", "hardlinks-and-digests", "shard-size"}  # another manifest, or other files
    for name in VARIANTS.keys() - others:
        assert bench.undisturbed(VARIANTS[name])[1] == expected, name
    names = {call.name for call in bench.undisturbed(VARIANTS["kernel-aligned"])[0].calls}
    assert {"copy_file_range", "preadv"} <= names
    assert "start_writing" in {call.name for call in bench.undisturbed(VARIANTS["flushes"])[0].calls}


@pytest.mark.parametrize("variant", ALL)
def test_kills(bench: Bench, variant: Variant) -> None:
    for trial in sample(kills(bench, variant, source_too=False), 3, variant.name):
        assert trial().fired == 1


@pytest.mark.parametrize("name", ["overwrite", "overwrite-by-two-renames"])
def test_kills_while_the_outputs_are_swapped(bench: Bench, name: str) -> None:
    variant = VARIANTS[name]
    labels = [label for label in bench.labels(variant) if label.startswith(("rename", "exchange"))]
    assert len(labels) == (1 if name == "overwrite" else 3)
    for label in labels:
        for afresh in (False, True):
            assert kill_trial(bench, variant, [Fault(label, "kill-after")], afresh=afresh)().fired == 1


@pytest.mark.parametrize("name", ["fresh", "overwrite-by-two-renames"])
def test_kills_of_runs_that_go_on(bench: Bench, name: str) -> None:
    assert sum(trial().fired for trial in repeated_kills(bench, VARIANTS[name], 3, seed=5)) > 3


def test_finished_files_are_kept(bench: Bench) -> None:
    """Killed where the last file is noted, all four of them are taken over; where the first is, none."""
    variant = VARIANTS["one-worker"]
    size = sum(path.stat().st_size for path in bench.source.glob("*.safetensors"))
    labels = [label for label in bench.labels(variant) if label.startswith("fsync ./out.partial/journal.jsonl")]
    resumed = [kill_trial(bench, variant, [Fault(label, "kill-after")])().resumed for label in labels[:5]]
    assert resumed[0] == 0
    assert resumed == sorted({*resumed})
    assert 0.9 * size < resumed[4] < 1.1 * size


@pytest.mark.parametrize("variant", ALL)
def test_order_of_syncs(bench: Bench, variant: Variant) -> None:
    assert order_faults(bench.undisturbed(variant)[0].calls) == []


@pytest.mark.parametrize("name", ["fresh", "overwrite-by-two-renames", "digests"])
def test_power_cuts(bench: Bench, name: str) -> None:
    for trial in sample(power_cuts(bench, VARIANTS[name]), 4, name):
        assert trial().fired == 1
