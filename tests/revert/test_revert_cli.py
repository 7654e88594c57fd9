"""`kconvert revert` as it is run: what it prints, its exit codes, how it is stopped and gone on with, its memory."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kconvert.cli import main
from kconvert.convert import revert
from kconvert.errors import OutputError
from kconvert.transforms import BoundRule, Collected, Transpose
from tests.cli.stand_ins import environment, run_command
from tests.convert.test_convert_target_dtype import mlp_recipe
from tests.revert.checks import digests
from tests.revert.generated import Case, Module, Tensor, convert_case, write_case
from tests.support import convert, qwen3_config, qwen3_tensors, write_checkpoint

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source of four files, and its conversion; only read."""
    folder = tmp_path_factory.mktemp("made")
    names = list(qwen3_tensors())
    shards = [names[place::4] for place in range(4)]
    source = write_checkpoint(folder / "source", qwen3_tensors(), qwen3_config(), shards)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    return source, convert("qwen3", source, folder / "converted", model_check=False, digests=True).output


@pytest.fixture
def converted(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "my-model-kconvert"))


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    code = main([*map(str, argv)])
    return (code, *capsys.readouterr())


def expected(made: tuple[Path, Path]) -> dict[str, str]:
    found = digests(made[0])
    del found["pytorch_model.bin"]
    return found


# --- what is printed --------------------------------------------------------------------------------------


def test_the_summary(
    made: tuple[Path, Path], converted: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted.parent)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "revert", converted.name, "-o", "again")
    assert (code, out) == (0, "again\n")
    assert digests(converted.parent / "again") == expected(made)
    assert "Restored from my-model-kconvert" in err
    words = " ".join(err.split())
    for text in (
        "in 4 files, e.g. model-00001-of-00004.safetensors",
        "index model.safetensors.index.json",
        "beside them 2 files, e.g. config.json",
        "exact all of it is as in the source; the weights were copied, and not looked at",
        "Not restored pytorch_model.bin was not brought over: a stock loader could take it for weights",
        "output again",
        "kconvert verify my-model-kconvert --level bytes",
    ):
        assert text in words, err
    assert max(map(len, err.splitlines())) <= 80


def test_quiet(converted: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "revert", converted, "-o", tmp_path / "again", "-q") == (0, f"{tmp_path / 'again'}\n", "")


def test_json(made: tuple[Path, Path], converted: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "revert", converted, "-o", tmp_path / "again", "--json")
    value: dict[str, Any] = json.loads(out)
    assert code == 0
    times = [value.pop(name) for name in ("copy_seconds", "sync_seconds", "total_seconds")]
    assert times[2] >= times[0] + times[1] > 0
    assert value.pop("peak_rss_bytes") > 1_000_000
    (item,) = value.pop("not_restored")
    assert (item["name"], "was not brought over" in item["reason"]) == ("pytorch_model.bin", True)
    assert value == {
        "output": str(tmp_path / "again"),
        "bytes_written": sum((made[0] / name).stat().st_size for name in expected(made)),
        "bytes_resumed": 0,
        "files": [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)],
        "index": "model.safetensors.index.json",
        "sidecars": ["config.json", "tokenizer.json"],
        "exact": True,
        "weights_checked": False,
        "notes": [],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_writes_nothing(converted: Path, tmp_path: Path, capsys: Capture, as_json: bool) -> None:
    before = sorted(tmp_path.rglob("*"))
    options = ["--json"] if as_json else []
    code, out, _ = run(capsys, "revert", converted, "-o", tmp_path / "again", "--dry-run", *options)
    assert code == 0
    assert sorted(tmp_path.rglob("*")) == before
    if as_json:
        assert json.loads(out)["files"][0] == "model-00001-of-00004.safetensors"
    else:
        assert re.search(r"model-00001-of-00004\.safetensors +\d+\.\d kB", out)
        assert "not restored: pytorch_model.bin (was not brought over" in out
    (converted / "tokenizer.json").write_text("[]")
    assert run(capsys, "revert", converted, "-o", tmp_path / "again", "--dry-run")[0] == 5


def test_many_things_that_are_not_restored(converted: Path, tmp_path: Path, capsys: Capture) -> None:
    for number in range(20):
        (converted / f"extra{number:02d}").touch()
    (converted / "evil\x1b[2J").touch()
    (converted / os.fsdecode(b"z\xff")).touch()
    code, _, err = run(capsys, "revert", converted, "-o", tmp_path / "again")
    assert code == 0
    assert "\x1b[2J" not in err
    assert re.findall(r"extra\d\d|and \d+ more", err) == [
        *(f"extra{number:02d}" for number in range(10)),
        "and 11 more",
    ]
    _, out, _ = run(capsys, "revert", converted, "-o", tmp_path / "more", "--dry-run", "--json")
    names = [item["name"] for item in json.loads(out)["not_restored"]]
    assert (len(names), names[1], names[-1]) == (23, "evil\x1b[2J", "z\\udcff")


# --- exit codes -------------------------------------------------------------------------------------------


def test_the_output_has_to_be_named(converted: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "revert", converted)
    assert (code, out) == (2, "")
    assert "'--output'" in err


@pytest.mark.parametrize("name", ["my-model-kconvert", "my-model-kconvert/sub", "."])
def test_an_output_that_touches_the_converted_directory(
    converted: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    before = digests(converted)
    assert run(capsys, "revert", converted, "-o", tmp_path / name)[0] == 2
    assert run(capsys, "revert", converted, "-o", tmp_path / name, "--dry-run")[0] == 2
    assert digests(converted) == before


@pytest.mark.parametrize("name", ["link", "link/new", "up", "my-model-kconvert/../link"])
def test_an_output_that_touches_it_through_a_link(converted: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    """B3."""
    (tmp_path / "link").symlink_to(converted)
    (tmp_path / "up").symlink_to(tmp_path)
    before = digests(converted)
    for source in (converted, tmp_path / "link"):
        code, out, err = run(capsys, "revert", source, "-o", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
    assert digests(converted) == before


def test_an_output_that_holds_something(converted: Path, tmp_path: Path, capsys: Capture) -> None:
    """Whatever it is; there is no --overwrite, and no word about it."""
    again = tmp_path / "again"
    again.mkdir()
    assert run(capsys, "revert", converted, "-o", again, "-q")[0] == 0
    code, out, err = run(capsys, "revert", converted, "-o", again)
    assert (code, out) == (7, "")
    assert err == f"kconvert: error: {again}: output is not empty; choose another output\n"
    shutil.copytree(converted, tmp_path / "another")
    code, _, err = run(capsys, "revert", converted, "-o", tmp_path / "another")
    assert (code, "overwrite" in err) == (7, False)
    (tmp_path / "file").touch()
    assert run(capsys, "revert", converted, "-o", tmp_path / "file")[0] == 7


@pytest.mark.parametrize("kind", ["missing", "source", "file"])
def test_no_converted_directory(made: tuple[Path, Path], tmp_path: Path, capsys: Capture, kind: str) -> None:
    (tmp_path / "file").touch()
    path = {"missing": tmp_path / "nothing", "source": made[0], "file": tmp_path / "file"}[kind]
    code, out, err = run(capsys, "revert", path, "-o", tmp_path / "again")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_a_rounded_conversion(tmp_path: Path, capsys: Capture) -> None:
    source = write_checkpoint(tmp_path / "source", qwen3_tensors(), qwen3_config())
    recipe = mlp_recipe(tmp_path, "bfloat16")
    converted = convert(recipe, source, tmp_path / "converted", model_check=False).output
    code, _, err = run(capsys, "revert", converted, "-o", tmp_path / "again")
    assert code == 5
    assert re.fullmatch(
        r"kconvert: error: .*converted: 'model\.layers\.0\.mlp\.\w+_proj\.weight' was rounded from F32 to BF16 for "
        r"'model\.layers\.0\.mlp\.gate_up_proj\.weight' \(concatenate\(0\)\), which has no exact inverse; "
        r"use the source itself\n",
        err,
    )


def test_completion(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "kconvert\nrevert\n--d", "COMP_CWORD": "2"}
    code, out, err = run_command(environment(_KCONVERT_COMPLETE="complete_bash", **words), cwd=tmp_path)
    assert (code, out.split(), err) == (0, ["--dry-run"], "")


# --- stopped and gone on with -----------------------------------------------------------------------------


def interrupted(converted: Path, output: Path) -> None:
    """A revert that is stopped once a file is finished."""
    journal = output.with_name(f"{output.name}.partial") / "journal.jsonl"

    def stop(size_bytes: int) -> None:
        ends = time.monotonic() + 20
        while '"file"' not in journal.read_text():
            assert time.monotonic() < ends
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        revert(converted, output, on_progress=stop)
    assert not output.exists()


def test_going_on(made: tuple[Path, Path], converted: Path, tmp_path: Path) -> None:
    interrupted(converted, tmp_path / "again")
    result = revert(converted, tmp_path / "again")
    assert result.bytes_resumed > 0
    assert digests(tmp_path / "again") == expected(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", converted.name]


def test_not_going_on_with_something_else(made: tuple[Path, Path], converted: Path, tmp_path: Path) -> None:
    interrupted(converted, tmp_path / "again")
    shard = sorted(converted.glob("*.safetensors"))[0]
    os.utime(shard, ns=(1, 1))
    with pytest.raises(OutputError, match=f"since then {re.escape(shard.name)} changed; start afresh with --no-resume"):
        revert(converted, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert revert(converted, tmp_path / "again", resume=False).bytes_resumed == 0
    assert digests(tmp_path / "again") == expected(made)


# --- another process --------------------------------------------------------------------------------------

SIZES = (24, 72)
"""Megabytes of the two checkpoints that are compared."""


def large_case(megabytes: int) -> Case:
    """A tensor that is turned over, two halves that are joined as float32, and one that is as it was."""
    rows = megabytes * 1_000_000 // 640
    turned, one, two = Tensor("a", "F32", (rows, 64)), Tensor("b", "F16", (rows, 32)), Tensor("c", "BF16", (rows, 32))
    plain = Tensor("d", "F32", (rows, 64))

    def module(path: str, rule: BoundRule, *tensors: Tensor, dtype: str | None = None) -> Module:
        renamed = tuple(BoundRule.renamed(tensor.name, f"{path}.{tensor.name}") for tensor in tensors)
        return Module(path, tensors, renamed, (rule,), dtype)

    transposed = BoundRule((Collected("m0.a", ("m0.a",)),), "m0.t", (Transpose(0, 1),))
    modules = (
        module("m0", transposed, turned),
        module("m1", BoundRule.joined(["m1.b", "m1.c"], "m1.t"), one, two, dtype="F32"),
    )
    return Case(modules, (plain,), {"model.safetensors": (turned, one, two, plain)}, megabytes, None)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Copied, gathered and converted tensors; and neither torch nor transformers is loaded."""
    peaks = []
    for megabytes in SIZES:
        folder = tmp_path / str(megabytes)
        case = large_case(megabytes)
        source = write_case(folder / "source", case)
        converted = convert_case(source, folder / "converted", case)
        value, heavy = child("revert", converted, "-o", folder / "again", "--json")
        assert heavy == []
        assert value["bytes_written"] > megabytes * 999_000
        peaks.append(value["peak_rss_bytes"])
        for name in ("config.json", "model.safetensors"):
            assert filecmp.cmp(folder / "again" / name, source / name, shallow=False)
        shutil.rmtree(folder)
    assert peaks[1] - peaks[0] < 32 << 20, peaks


PROBE = """
import json, sys
from kconvert.cli import main
code = main(sys.argv[1:])
print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))), file=sys.stderr)
sys.exit(code)
"""


def child(*argv: object) -> tuple[dict[str, Any], list[str]]:
    """The JSON value of a command, and which heavy packages it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, argv)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return value, json.loads(done.stderr.splitlines()[-1])
