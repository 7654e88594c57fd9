"""What is taken over from a run that was stopped, and what is not: other work, changed files, rubbish, live runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kconvert.recipe import find_recipe
from tests.crash.bench import VARIANTS, Bench, Place, finished_in, snapshot, told, write_small
from tests.crash.layer import Fault
from tests.crash.races import races
from tests.crash.server import Outcome, Server
from tests.crash.sweeps import go_on

FRESH = VARIANTS["fresh"]
ONE = VARIANTS["one-worker"]
NAMES = [f"model.kconvert-0000{number}-of-00004.safetensors" for number in range(1, 5)]
JOURNAL = "journal.jsonl"
LOCK = ".kconvert-lock"


def stopped(bench: Bench, num_finished: int = 3, **changes: Any) -> Place:
    """A place with a run that was killed when so many files were finished."""
    place = bench.place(ONE)
    outcome = bench.run(place, Fault(f"fsync ./out.partial/{JOURNAL} {num_finished + 1}", "kill-after"), **changes)
    assert outcome.ended == "killed", told(outcome)
    assert list(finished_in(place.partial)) == NAMES[:num_finished]
    return place


def sizes(place: Place, names: list[str]) -> int:
    return sum((place.partial / "output" / name).stat().st_size for name in names)


# ---- files


def touched(path: Path) -> None:
    os.utime(path)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replaced(path: Path) -> None:
    data, times = bytes(path.stat().st_size), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.unlink()
    path.with_name("other").write_bytes(b"")  # so that the inode is another one
    path.write_bytes(data)
    path.with_name("other").unlink()
    os.utime(path, ns=times)


def written_over(path: Path) -> None:
    """And the time is put back, as rsync and tar do."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"12345678")
    os.utime(path, ns=times)


def removed(path: Path) -> None:
    path.unlink()


def made_a_link(path: Path) -> None:
    kept = path.rename(path.parent.parent.parent / path.name)
    path.symlink_to(kept)


@pytest.mark.parametrize("change", [touched, shortened, replaced, written_over, removed, made_a_link])
def test_a_finished_file_that_was_changed_is_done_again(bench: Bench, change: Callable[[Path], None]) -> None:
    place = stopped(bench)
    left = sizes(place, [NAMES[0], NAMES[2]])
    change(place.partial / "output" / NAMES[1])
    outcome = bench.run(place)
    assert outcome.ended == "well", told(outcome)
    assert outcome.result["bytes_resumed"] == left
    assert snapshot(place.output) == bench.undisturbed(ONE)[1]
    assert not place.partial.exists()


def test_files_that_do_not_belong_there_go(bench: Bench) -> None:
    place = stopped(bench)
    (place.partial / "output" / "deep" / "er").mkdir(parents=True)
    (place.partial / "output" / "deep" / "er" / "model.safetensors").write_bytes(b"x")
    (place.partial / "output" / "link").symlink_to(bench.source)
    assert go_on(bench, place, "files that do not belong there") > 0
    assert (bench.source / "config.json").exists()


# ---- the journal


def lines(place: Place) -> list[bytes]:
    return (place.partial / JOURNAL).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_line_is_not_there(bench: Bench, cut: int) -> None:
    place = stopped(bench)
    left = sizes(place, NAMES[:2])
    (place.partial / JOURNAL).write_bytes(b"".join(lines(place))[:-cut])
    assert go_on(bench, place, "a torn line") == left


def test_what_stands_behind_a_torn_line_is_not_there(bench: Bench) -> None:
    place = stopped(bench)
    first, second, third, last = lines(place)
    (place.partial / JOURNAL).write_bytes(first + second + third[:50] + b"\n" + last)
    assert bench.run(place).result["bytes_resumed"] == (place.output / NAMES[0]).stat().st_size


def test_a_journal_is_gone_on_with_behind_its_last_whole_line(bench: Bench) -> None:
    place = stopped(bench, 2)
    (place.partial / JOURNAL).write_bytes(b"".join(lines(place))[:-20])
    assert bench.run(place, Fault(f"fsync ./out.partial/{JOURNAL} 2", "kill-after")).ended == "killed"
    assert list(finished_in(place.partial)) == NAMES[:3]
    left = sizes(place, NAMES[:3])
    assert go_on(bench, place, "twice") == left


RUBBISH = [
    b"",
    b"\n",
    b"\0" * 5000,
    bytes(range(256)) * 10,
    b"[" * 100_000 + b"\n",
    b"null\n",
    b'{"identity": []}\n',
    b'{"identity": {"x": 1}}\n',
    b'{"identity": {}}\n{"file": "x"}\n',
]
BEHIND = [
    b'"file"\n',
    b"[1, 2]\n",
    b"1" * 5000 + b"\n",
    b'{"published": {"device": 1, "inode": 2, "last": "x", "state": 3}}\n',
    b'{"published": []}\n',
    b'{"file": ["x"], "size_bytes": 1, "modified_ns": 1, "changed_ns": 1, "inode": 1, "digests": {}}\n',
    b'{"file": "../../x", "size_bytes": 1, "modified_ns": 1, "changed_ns": 1, "inode": 1, "digests": {}}\n',
    b'{"file": "%s", "size_bytes": 1, "modified_ns": Infinity, "changed_ns": [], "inode": {}, "digests": {"a": 1}}\n'
    % NAMES[3].encode(),
]


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_a_journal_of_rubbish_says_nothing(bench: Bench, rubbish: bytes) -> None:
    place = stopped(bench)
    (place.partial / JOURNAL).write_bytes(rubbish)
    outcome = bench.run(place)
    assert (outcome.ended, outcome.result.get("bytes_resumed")) == ("well", 0), told(outcome)
    assert snapshot(place.output) == bench.undisturbed(ONE)[1]
    assert place.names() == {"out"}


@pytest.mark.parametrize("rubbish", BEHIND)
def test_rubbish_behind_good_lines(bench: Bench, rubbish: bytes) -> None:
    place = stopped(bench)
    with (place.partial / JOURNAL).open("ab") as file:
        file.write(rubbish)
    left = sizes(place, NAMES[:3])
    assert bench.run(place).result["bytes_resumed"] == left
    assert snapshot(place.output) == bench.undisturbed(ONE)[1]
    assert place.names() == {"out"}


def test_a_journal_that_claims_too_much(bench: Bench) -> None:
    """A line that names a file which is not finished."""
    place = stopped(bench, 2)
    value = json.loads(lines(place)[-1])
    with (place.partial / JOURNAL).open("ab") as file:
        file.write(json.dumps({**value, "file": NAMES[3]}).encode() + b"\n")
    assert go_on(bench, place, "claims too much") > 0


# ---- what is not ours


def as_a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def as_a_folder(path: Path) -> None:
    path.mkdir()


def as_a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, make) for name in (LOCK, JOURNAL, "output", "replaced") for make in (as_a_link, as_a_pipe)),
        (LOCK, as_a_folder),
        (JOURNAL, as_a_folder),
    ],
)
def test_something_else_in_the_partial_directory(bench: Bench, name: str, make: Callable[[Path], None]) -> None:
    place = bench.place(FRESH)
    (place.partial / "elsewhere").mkdir(parents=True)
    (place.partial / "elsewhere" / "thesis").write_text("x")
    (place.partial / "elsewhere").rename(place.root / "elsewhere")
    (place.partial / LOCK).touch()
    (place.partial / name).unlink(missing_ok=True)
    make(place.partial / name)
    if make is as_a_link:
        (place.partial / name).unlink()
        (place.partial / name).symlink_to(place.root / "elsewhere")
    before = sorted(path.name for path in place.partial.iterdir())
    outcome = bench.run(place)
    assert (outcome.error, outcome.code) == ("OutputError", 7), told(outcome)
    assert "is not left from a kconvert run" in outcome.text
    assert sorted(path.name for path in place.partial.iterdir()) == before
    assert (place.root / "elsewhere" / "thesis").read_text() == "x"
    assert not place.output.exists()


@pytest.mark.parametrize("kind", ["file", "link", "folder with files", "folder with a lock and files"])
def test_a_partial_directory_that_is_not_ours(bench: Bench, kind: str) -> None:
    place = bench.place(FRESH)
    if kind == "file":
        place.partial.write_text("x")
    elif kind == "link":
        (place.root / "elsewhere").mkdir()
        place.partial.symlink_to("elsewhere")
    else:
        place.partial.mkdir()
        (place.partial / "thesis").write_text("x")
        if "lock" in kind:
            (place.partial / LOCK).touch()
    before = sorted(path.relative_to(place.root) for path in place.root.rglob("*"))
    outcome = bench.run(place)
    assert (outcome.error, outcome.code) == ("OutputError", 7), told(outcome)
    assert sorted(path.relative_to(place.root) for path in place.root.rglob("*")) == before


@pytest.mark.parametrize("holds", [(), (LOCK,)])
def test_a_run_that_was_killed_as_it_began_or_ended(bench: Bench, holds: tuple[str, ...]) -> None:
    """An empty partial directory, or one with a lock that nobody holds, goes; also where the output is there already."""
    place = bench.place(FRESH)
    for _ in range(2):
        place.partial.mkdir()
        for name in holds:
            (place.partial / name).touch()
        assert go_on(bench, place, "as it began or ended") == 0


# ---- identity


def check_refused(bench: Bench, place: Place, said: str, **changes: Any) -> None:
    """The run is refused and says what has changed; what was finished stays."""
    before = snapshot(place.partial)
    outcome = bench.run(place, **changes)
    assert (outcome.error, outcome.code) == ("OtherRunError", 7), told(outcome)
    assert "left from a run that was stopped, and since then" in outcome.text
    assert said in outcome.text
    assert "--no-resume" in outcome.text
    assert snapshot(place.partial) == before
    assert not place.output.exists()


def check_afresh(bench: Bench, place: Place, outcome: Outcome, **changes: Any) -> None:
    """A run with `--no-resume` came to what an undisturbed one comes to."""
    assert outcome.ended == "well", told(outcome)
    assert outcome.result["bytes_resumed"] == 0
    other = bench.place(ONE)
    assert bench.run(other, **changes).ended == "well"
    assert snapshot(place.output) == snapshot(other.output)
    assert place.names() == {"out"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"digests": True}, "the plan"),
        ({"max_shard_bytes": 900}, "the plan"),
        ({"reuse": "hardlink"}, "--reuse"),
    ],
)
def test_other_options(bench: Bench, options: dict[str, Any], said: str) -> None:
    place = stopped(bench)
    check_refused(bench, place, said, options=options)
    afresh = bench.run(place, options={**options, "resume": False})
    check_afresh(bench, place, afresh, options=options)


def test_another_version(bench: Bench) -> None:
    place = stopped(bench, version="0.0.1")
    check_refused(bench, place, "the kconvert version")
    check_afresh(bench, place, bench.run(place, options={"resume": False}))


@pytest.mark.parametrize("text", ["# a comment\n", ""])
def test_another_recipe(bench: Bench, folder: Path, text: str) -> None:
    """Also one that comes to the same plan: the manifest holds the recipe."""
    place = stopped(bench)
    recipe = folder / f"recipe-{len(text)}.yaml"
    known = Path(find_recipe("qwen3")).read_text(encoding="utf-8")
    recipe.write_text(text + (known if text else known[: known.rindex("  - kernel")]), encoding="utf-8")
    check_refused(bench, place, "the recipe", recipe=str(recipe))
    check_afresh(bench, place, bench.run(place, recipe=str(recipe), options={"resume": False}), recipe=str(recipe))


def time_changed(source: Path) -> str:
    os.utime(source / "model-00002-of-00004.safetensors", ns=(1, 10**18))
    return "model-00002-of-00004.safetensors"


def header_changed(source: Path) -> str:
    """The same size and time, and two tensors of one shape have changed names."""
    path = source / "model-00001-of-00004.safetensors"
    times, data = (path.stat().st_atime_ns, path.stat().st_mtime_ns), path.read_bytes()
    one, other, between = b'"model.embed_tokens.weight"', b'"lm_head.weight"', b'"@"'
    data = data.replace(one, between).replace(other, one).replace(between, other)
    path.write_bytes(data)
    os.utime(path, ns=times)
    return path.name


def size_changed(source: Path) -> str:
    path = source / "model-00004-of-00004.safetensors"
    times, data = (path.stat().st_atime_ns, path.stat().st_mtime_ns), path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :])
    os.utime(path, ns=times)
    return path.name


def config_changed(source: Path) -> str:
    path = source / "config.json"
    path.write_text(path.read_text().replace("1e-06", "1e-05"))
    return path.name


def sidecar_changed(source: Path) -> str:
    (source / "tokenizer.json").write_text("{}")
    return "the other files"


@pytest.mark.parametrize("change", [time_changed, header_changed, size_changed, config_changed, sidecar_changed])
def test_another_source(bench: Bench, folder: Path, change: Callable[[Path], str]) -> None:
    source = write_small(folder / f"source-{change.__name__}")
    place = stopped(bench, source=str(source))
    said = change(source)
    check_refused(bench, place, said, source=str(source))
    afresh = bench.run(place, source=str(source), options={"resume": False})
    check_afresh(bench, place, afresh, source=str(source))


def test_published_and_then_changed(bench: Bench, folder: Path) -> None:
    """Killed when it had got its name and before it had tidied up: the same is done, and anything else has an output there."""
    source = write_small(folder / "source-published")
    for change in (None, sidecar_changed, config_changed):
        place = bench.place(ONE)
        assert (
            bench.run(place, Fault("rename ./out.partial/output 1", "kill-after"), source=str(source)).ended == "killed"
        )
        before = snapshot(place.output)
        if change is not None:
            change(source)
        outcome = bench.run(place, source=str(source))
        if change is None:
            assert outcome.ended == "well"
            assert place.names() == {"out"}
        else:
            assert (outcome.code, "output exists" in outcome.text) == (7, True), told(outcome)
        assert snapshot(place.output) == before


@pytest.mark.parametrize("made", ["nothing", "empty", "foreign"])
def test_published_and_then_removed(bench: Bench, made: str) -> None:
    """A folder that has come to the inode of a removed output is not that output."""
    place = bench.place(ONE)
    assert bench.run(place, Fault("rename ./out.partial/output 1", "kill-after")).ended == "killed"
    shutil.rmtree(place.output)
    if made != "nothing":
        place.output.mkdir()
    if made == "foreign":
        (place.output / "thesis").write_text("x")
        outcome = bench.run(place)
        assert "did not write" in outcome.text
        assert [path.name for path in place.output.iterdir()] == ["thesis"]
    else:
        assert go_on(bench, place, "removed") == 0


# ---- the old output


def test_the_old_output_is_never_lost(bench: Bench) -> None:
    """Killed between the two renames, and an empty folder is made under the name: it is refused, and the old one kept."""
    place = bench.place(VARIANTS["overwrite-by-two-renames"])
    assert bench.run(place, Fault("rename ./out 1", "kill-after")).ended == "killed"
    place.output.mkdir()
    outcome = bench.run(place)
    assert (outcome.error, outcome.code) == ("OutputError", 7), told(outcome)
    assert "old output" in outcome.text
    assert snapshot(place.partial / "replaced") == bench.older
    place.output.rmdir()
    assert go_on(bench, place, "never lost") > 0


@pytest.mark.parametrize("afresh", [False, True])
def test_without_overwrite_the_old_output_comes_back(bench: Bench, afresh: bool) -> None:
    place = bench.place(VARIANTS["overwrite-by-two-renames"])
    assert bench.run(place, Fault("rename ./out 1", "kill-after")).ended == "killed"
    outcome = bench.run(place, options={"resume": not afresh})
    assert (outcome.error, "output exists" in outcome.text) == ("OutputError", True), told(outcome)
    assert snapshot(place.output) == bench.older


# ---- two runs


def apply(bench: Bench, place: Place) -> subprocess.CompletedProcess[str]:
    command = ["apply", "qwen3", str(bench.source), "-o", str(place.output), "--no-model-check", "-q"]
    return subprocess.run([sys.executable, "-m", "kconvert", *command], capture_output=True, text=True, check=False)


def test_two_runs_at_once(bench: Bench, server: Server) -> None:
    place = bench.place(FRESH)
    run = bench.command(place, fault=Fault(f"pwrite ./out.partial/output/{NAMES[1]} 2", "pause"))
    server.start(run)
    server.wait_for_pause(run)
    second = apply(bench, place)
    server.go_on(run)
    first = server.finish()
    assert second.returncode == 7
    assert second.stderr.splitlines() == [
        f"kconvert: error: {place.partial}: another live run is writing this output; wait for it or choose another output"
    ]
    assert first.ended == "well", told(first)
    assert snapshot(place.output) == bench.undisturbed(FRESH)[1]
    assert place.names() == {"out"}


def test_two_runs_that_start_at_once(bench: Bench, server: Server) -> None:
    with Server(bench.source) as other:
        for name in ("fresh", "overwrite"):
            for trial in races(bench, server, other, VARIANTS[name], 4):
                assert trial().outcome in ("1 well", "2 well")


@pytest.mark.parametrize(
    ("label", "again"),
    [
        (f"pwrite ./out.partial/output/{NAMES[1]} 2", False),
        (f"pwrite ./out.partial/output/{NAMES[1]} 2", True),
        ("open ./out.partial/output/kconvert_manifest.json 1", False),
        ("open ./out.partial/output/kconvert_manifest.json 1", True),
        ("rename ./out.partial/output 1", False),
    ],
)
def test_a_partial_directory_that_vanishes(bench: Bench, server: Server, label: str, again: bool) -> None:
    """And, `again`, another that is made in its place: nothing incomplete gets the name."""
    place = bench.place(FRESH)
    run = bench.command(place, fault=Fault(label, "pause"))
    server.start(run)
    server.wait_for_pause(run)
    shutil.rmtree(place.partial)
    if again:
        (place.partial / "output").mkdir(parents=True)
    server.go_on(run)
    outcome = server.finish()
    assert (outcome.ended, outcome.code in (6, 7)) == ("error", True), told(outcome)
    assert "\n" not in outcome.text
    assert not outcome.threads
    assert not place.output.exists()
