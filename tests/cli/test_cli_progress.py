"""What `apply` shows while it works and at the end: on terminals of many kinds, in pipes, quiet, interrupted."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kconvert.convert.apply as convert_apply
import kconvert.rewrite.execute as execute
import kconvert.rewrite.tasks as tasks
from kconvert.cli import main
from kconvert.cli import plan as cli_plan
from kconvert.cli.output import format_duration, format_share, printable, shell_quote
from kconvert.cli.progress import Meter, Progress, Reading, bar_line, plain_line
from kconvert.convert import prepare
from kconvert.convert.prepare import check
from kconvert.names import MANIFEST_NAME
from kconvert.rewrite.copying import Copier
from tests.support import qwen3_config, qwen3_tensors, write_checkpoint, write_recipe

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).parents[2]
OUTPUT = "my-model-kconvert"
GB = 10**9


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with an extra tensor and a file that is left out."""
    tensors = qwen3_tensors() | {"mtp.fc.weight": torch.ones(2, 2)}
    folder = write_checkpoint(tmp_path / "my-model", tensors, qwen3_config())
    (folder / "training_args.bin").write_bytes(b"pickle")
    return folder


# --- the meter and its lines --------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    meter = Meter(10_000, 0, clock=clock)
    assert meter.read() == Reading(0, 10_000, None, None)
    for _ in range(20):  # 100 bytes a second, then 10
        clock.now += 1
        meter.add(100)
        meter.read()
    assert meter.read() == Reading(2000, 10_000, 100.0, None)
    assert meter.read().seconds_left == 80.0
    for _ in range(20):
        clock.now += 1
        meter.add(10)
        meter.read()
    assert meter.read() == Reading(2200, 10_000, 10.0, None)


def test_the_wait_for_the_disk_begins_when_all_but_the_final_files_are_written() -> None:
    clock = Clock()
    meter = Meter(1000, 30, clock=clock)
    clock.now += 2
    meter.add(969)
    assert meter.read().sync_seconds is None
    meter.add(1)
    clock.now += 3
    meter.add(10)
    assert meter.read().sync_seconds == 3.0
    assert meter.read().seconds_left is None


@pytest.mark.parametrize(
    ("reading", "line"),
    [
        (Reading(1_200_000_000, 3 * GB, 410_300_000.0, None), "1.2 of 3.0 GB, 410.3 MB/s, 4 s left"),
        (Reading(0, 3 * GB, None, None), "0.0 of 3.0 GB"),
        (Reading(900_000_000, 16 * GB, 1e6, None), "0.9 of 16.0 GB, 1.0 MB/s, 4 h 11 min left"),
        (Reading(GB, 2 * GB, 0.0, None), "1.0 of 2.0 GB, 0 B/s"),
        (Reading(3 * GB, 3 * GB, 5e8, 12.0), "3.0 GB written, waiting for the disk (sync) for 12 s"),
    ],
)
def test_plain_lines(reading: Reading, line: str) -> None:
    assert plain_line(reading) == line


WRITING = Reading(1_230_000_000, 3 * GB, 410_300_000.0, None)


@pytest.mark.parametrize(
    ("reading", "width", "line"),
    [
        (WRITING, 77, "writing  ━━━━━━───────────   41%  1.2 of 3.0 GB  410.3 MB/s  4 s left"),
        (WRITING, 37, "writing  ━━─────   41%  1.2 of 3.0 GB"),
        (WRITING, 24, "writing  ━━━──────   41%"),
        (replace(WRITING, done_bytes=2_999_999_999), 24, "writing  ━━━━━━━━─   99%"),
        (replace(WRITING, sync_seconds=12.0), 77, f"syncing  {'━' * 19}  100%  3.0 of 3.0 GB  waiting for the disk, 12 s"),
        (Reading(0, 0, None, None), 24, "writing  ━━━━━━━━━  100%"),
    ],
)  # fmt: skip
def test_the_bar(reading: Reading, width: int, line: str) -> None:
    assert bar_line(reading, width).plain == line


@pytest.mark.parametrize("seconds", [None, 70_000.0])
def test_the_bar_is_never_wider_than_there_is_room(seconds: float | None) -> None:
    slow = Reading(1, 3 * GB, 700_000.0, seconds)
    for width in range(160):
        assert bar_line(slow, width).cell_len <= width


def test_the_bar_stays_in_place_while_figures_change() -> None:
    for width in (37, 77, 117):
        lines = [bar_line(Reading(done, 16 * GB, rate, None), width).plain for done, rate in ((1, 1e6), (10 * GB, 5e8))]
        places = [re.search(r"[━─]+ +\d+%", line) for line in lines]
        assert len({place.span() for place in places if place}) == 1


def test_the_bar_in_ascii() -> None:
    assert bar_line(WRITING, 24, ascii_only=True).plain == "writing  ###......   41%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3720, "1 h 02 min")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "text"), [(5, 999, "  5 of 999 B"), (1, 2_000_000, "0.0 of 2.0 MB"), (10**10, 10**10, "10.0 of 10.0 GB")]
)  # fmt: skip
def test_format_share(done: int, total: int, text: str) -> None:
    assert format_share(done, total) == text


@pytest.mark.parametrize(
    "path",
    ["plain", "with blank", "it's", '$HOME"`x`', "-q", "a\nb", "tab\t'\\", os.fsdecode(b"mod\xe9l"), "Modèle 模型", "a\x1b[31m"],
)  # fmt: skip
def test_quoted_paths_are_one_word_for_a_shell(path: str) -> None:
    word = shell_quote(path)
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}".encode(errors="surrogateescape")], capture_output=True, check=True)  # fmt: skip
    assert os.fsdecode(done.stdout) == ("./-q" if path == "-q" else path)


def test_printable() -> None:
    assert printable("mod\u00e8le a\x1b[31m\n\udce9") == "mod\u00e8le a\\x1b[31m\\n\\udce9"


# --- plain lines --------------------------------------------------------------------------------------


def test_plain_lines_come_at_intervals_also_while_nothing_is_written(capsys: Capture) -> None:
    clock = Clock()
    with Progress("checking", clock=clock, line_seconds=0.02) as progress:
        time.sleep(0.1)
        progress.writing(3 * GB, final_bytes=10)
        progress.advance(GB)
        clock.now += 2
        time.sleep(0.2)
        progress.advance(2 * GB - 10)
        clock.now += 7
        time.sleep(0.2)
    time.sleep(0.1)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert set(lines) == {
        "kconvert: 1.0 of 3.0 GB, 500.0 MB/s, 4 s left",
        "kconvert: 3.0 GB written, waiting for the disk (sync) for 7 s",
    }
    assert 4 <= len(lines) <= 21


@pytest.mark.parametrize(("quiet", "seconds"), [(True, 0.01), (False, 5.0)])
def test_no_plain_line_when_quiet_or_done_before_the_first_interval(
    capsys: Capture, quiet: bool, seconds: float
) -> None:
    with Progress("checking", quiet=quiet, line_seconds=seconds) as progress:
        progress.writing(100)
        progress.advance(100)
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors: list[object] = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with Progress("checking", line_seconds=0.01) as progress:
            progress.writing(100)
            time.sleep(0.1)
            progress.advance(100)
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            gone.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
    assert errors == []


# --- the command on a terminal and in a pipe ------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """What a run gave: exit code, stdout, and stderr as it was sent to the terminal or pipe."""

    code: int
    out: str
    raw: str

    def frames(self) -> list[str]:
        """Every state of the last line that was drawn, without colours."""
        plain = re.sub(r"\x1b\[[\d;]*m", "", self.raw)
        return [part.split("\r")[0] for part in plain.split("\x1b[2K")[1:]]

    def styles(self) -> set[str]:
        """Every number of an SGR code: 0 plain, 1 bold, 32 green, 36 cyan."""
        return {style for codes in re.findall(r"\x1b\[([\d;]*)m", self.raw) for style in codes.split(";")}

    def screen(self, columns: int = 1000) -> list[str]:
        """The lines that a terminal shows in the end; refuses control codes that it does not know."""
        rows, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|[\s\S]", self.raw):
            if column == columns and not token.startswith(("\x1b", "\r", "\n")):
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            if token == "\n":
                row += 1
            elif token == "\r":
                column = 0
            elif token == "\x1b[1A":
                row -= 1
            elif token == "\x1b[2K":
                rows[row] = ""
            elif token.startswith("\x1b"):
                assert token.endswith("m"), repr(token)
            else:
                rows[row] = f"{rows[row]:<{column}}"[:column] + token + rows[row][column + 1 :]
                column += 1
        assert column == 0, "the cursor is left within a line"
        return "\n".join(text.rstrip() for text in rows).rstrip().split("\n")

    def check_clean(self, columns: int = 1000) -> None:
        """No bar is left, and nothing ever hid the cursor."""
        assert "\x1b[?25l" not in self.raw
        assert "Traceback" not in self.raw
        assert [line for line in self.screen(columns) if re.search("writing|syncing|checking|[━─]", line)] == []


Apply = Callable[..., Shown]


@pytest.fixture
def apply(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Apply:
    """`kconvert apply qwen3 my-model --no-model-check ...` in this process, with stderr on a terminal or a pipe."""

    def run(*more: str, command: str = "apply", tty: bool = True, **environment: str | None) -> Shown:
        for name, value in {"TERM": "xterm-256color", "NO_COLOR": None, "FORCE_COLOR": None, **environment}.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        reader, writer = pty.openpty() if tty else os.pipe()
        with ThreadPoolExecutor() as pool, os.fdopen(writer, "w", encoding="utf-8", errors="backslashreplace") as file:
            raw = pool.submit(_read_all, reader)
            with monkeypatch.context() as context:
                context.setattr(sys, "stderr", file)
                code = main([command, "qwen3", str(source), "--no-model-check", *more])
            file.close()
            return Shown(code, capsys.readouterr().out, raw.result())

    return run


def _read_all(reader: int) -> str:
    raw = b""
    with contextlib.suppress(OSError), os.fdopen(reader, "rb", buffering=0) as file:  # EIO: how a terminal ends
        while data := file.read(65536):
            raw += data
    return raw.decode()


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each of many small pieces takes a while, and the disk lets wait; gives the pieces so far."""
    pieces: list[object] = []
    monkeypatch.setattr(tasks, "PIECE_BYTES", 128)
    monkeypatch.setattr(Copier, "copy", _slow(Copier.copy, 0.02, pieces))
    monkeypatch.setattr(execute.Writing, "_write_final", _slow(execute.Writing._write_final, 0.5, []))
    return pieces


@pytest.fixture
def slow_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes long enough to be shown on a terminal."""
    monkeypatch.setattr(convert_apply, "check", _slow(check, 0.6, []))


def _slow(function: Callable[..., Any], seconds: float, calls: list[object]) -> Callable[..., Any]:
    def slow(*arguments: Any, **keywords: Any) -> Any:
        calls.append(function)
        time.sleep(seconds)
        return function(*arguments, **keywords)

    return slow


def _at_piece(monkeypatch: pytest.MonkeyPatch, pieces: list[object], number: int, action: Callable[[], None]) -> None:
    """Let `action` happen in the middle of the copy, in the thread that copies."""
    copy = Copier.copy

    def copy_after(self: Copier, piece: Any) -> None:
        if len(pieces) == number:
            action()
        copy(self, piece)

    monkeypatch.setattr(Copier, "copy", copy_after)


@pytest.mark.usefixtures("slowly", "slow_check")
def test_a_terminal_sees_a_bar_that_is_gone_in_the_end(source: Path, apply: Apply) -> None:
    shown = apply()
    assert (shown.code, shown.out) == (0, f"{source.parent / OUTPUT}\n")
    frames = shown.frames()
    words = "checking my-model for recipe qwen3, ", "writing", "syncing"
    first = [next(number for number, frame in enumerate(frames) if frame.startswith(word)) for word in words]
    assert first == sorted(first)
    percents = [int(found[1]) for frame in frames if (found := re.search(r"(\d+)%  .*B", frame))]
    assert percents == sorted(percents)
    assert len({percent for percent in percents if percent < 100}) > 1
    assert re.fullmatch(r"syncing  ━{10,}  100%  (\d+\.\d) of \1 kB  waiting for the disk, [01] s", frames[first[2]])
    assert len(frames) < 40, "redrawn at a moderate rate"
    assert shown.styles() == {"0", "1", "32", "36"}, "what is seen on light and on dark"
    shown.check_clean()
    screen = shown.screen()
    assert screen[0].startswith("kconvert: recipe qwen3 patches ")
    assert "Converted with recipe qwen3" in screen


def test_a_plan_says_that_it_is_checking(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_plan, "prepare", _slow(prepare, 0.6, []))
    shown = apply(command="plan")
    assert shown.code == 0
    assert [frame for frame in shown.frames() if frame.startswith("checking my-model for recipe qwen3, ")]
    assert shown.screen() == [""], "nothing is left of it"
    shown.check_clean()


@pytest.mark.usefixtures("slow_check")
@pytest.mark.parametrize("force", [None, "1"])
def test_a_pipe_sees_no_bar(source: Path, apply: Apply, force: str | None) -> None:
    shown = apply(tty=False, FORCE_COLOR=force)
    assert (shown.code, shown.out) == (0, f"{source.parent / OUTPUT}\n")
    assert [code for code in ("\r", "\x1b[2K", "writing", "checking") if code in shown.raw] == []
    assert ("\x1b" in shown.raw) == (force is not None)
    assert "Converted" in shown.raw


@pytest.mark.usefixtures("slow_check")
@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_erase_gets_plain_text(apply: Apply, term: str | None) -> None:
    shown = apply(TERM=term)
    assert shown.code == 0
    assert "Converted with recipe qwen3" in shown.screen()
    assert [code for code in ("\x1b", "writing", "checking") if code in shown.raw] == []


@pytest.mark.usefixtures("slow_check")
def test_a_status_is_cut_to_the_width(apply: Apply) -> None:
    frames = [frame for frame in apply(COLUMNS="24").frames() if frame.startswith("checking")]
    assert set(frames) == {"checking my-model for"}


@pytest.mark.usefixtures("slowly")
def test_json_is_one_value_beside_a_bar_without_colours(source: Path, apply: Apply) -> None:
    shown = apply("--json", NO_COLOR="1")
    assert json.loads(shown.out)["output"] == str(source.parent / OUTPUT)
    assert any(frame.startswith("writing  ━") for frame in shown.frames())
    assert "Converted" not in shown.raw
    assert shown.styles() == {"0", "1"}
    shown.check_clean()


@pytest.mark.usefixtures("slow_check")
@pytest.mark.parametrize("more", [["-q"], ["--quiet", "--json"]])
def test_quiet_on_a_terminal(source: Path, apply: Apply, more: list[str]) -> None:
    shown = apply(*more)
    assert (shown.code, shown.raw) == (0, "")
    assert source.parent / OUTPUT == Path(json.loads(shown.out)["output"] if "--json" in more else shown.out.strip())


def test_a_warning_in_the_middle_stands_whole_above_the_bar(
    apply: Apply, slowly: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = f"see /{'a-long-folder/' * 8}[bold]file[/bold] :smile: 12"
    _at_piece(monkeypatch, slowly, 30, lambda: warnings.warn(warning, stacklevel=1))
    shown = apply()
    assert shown.code == 0
    before, _, after = shown.raw.partition(warning)
    assert "writing" in before
    assert "writing" in after
    assert shown.screen().count(f"kconvert: warning: {warning}") == 1
    shown.check_clean()


@pytest.mark.parametrize("quiet", [False, True])
def test_an_error_in_the_middle_is_one_line_on_a_clean_terminal(
    apply: Apply, slowly: list[object], monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "full", "some file")

    _at_piece(monkeypatch, slowly, 30, fail)
    shown = apply(*(["-q"] if quiet else []))
    assert (shown.code, shown.out) == (6, "")
    lines = shown.screen()
    assert lines[-1] == "kconvert: error: some file: cannot be written: the disk is full"
    assert len(lines) == (1 if quiet else 2)
    assert ("writing" in shown.raw) == (not quiet)
    shown.check_clean()


# --- in a process of its own, for signals and for the size of a terminal ------------------------------------

CHILD = """
import sys, time
import kconvert.rewrite.execute as execute
import kconvert.rewrite.tasks as tasks
from kconvert.cli import main
from kconvert.rewrite.copying import Copier

def slow(function, seconds):
    return lambda *arguments: (time.sleep(seconds), function(*arguments))[1]

tasks.PIECE_BYTES = 128
Copier.copy = slow(Copier.copy, float(sys.argv[1]))
execute.Writing._write_final = slow(execute.Writing._write_final, float(sys.argv[2]))
sys.exit(main(sys.argv[3:]))
"""


def _run_child(source: Path, *, columns: int = 80, term: str = "xterm", interrupt_at: str | None = None) -> Shown:
    """`kconvert apply qwen3 my-model -o out` beside the source, slowly, with stderr on a terminal.

    The child is interrupted once `interrupt_at` is seen; it is slow enough then that a busy machine is in time.
    """
    more = {"TERM": term, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CHILD,
            "0.4" if interrupt_at == "writing" else "0.02",
            "20" if interrupt_at == "syncing" else "0.5",
            "apply",
            "qwen3",
            source.name,
            "-o",
            "out",
            "--no-model-check",
        ],
        cwd=source.parent,
        env={**kept, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
    )
    os.close(writer)
    raw = b""
    try:
        with contextlib.suppress(OSError):
            while data := os.read(reader, 65536):
                raw += data
                if interrupt_at is not None and interrupt_at.encode() in raw:
                    child.send_signal(signal.SIGINT)
                    interrupt_at = None
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        os.close(reader)
    assert interrupt_at is None
    return Shown(child.returncode, out, raw.decode())


def test_a_narrow_terminal(source: Path) -> None:
    shown = _run_child(source, columns=40)
    assert (shown.code, shown.out) == (0, "out\n")
    frames = [frame for frame in shown.frames() if frame.startswith(("writing", "syncing"))]
    assert any(re.fullmatch(r"writing  ━+─+ +\d+%  .* of .* kB", frame) for frame in frames), frames
    assert max(map(len, frames)) <= 37, "^C takes two columns, and must not begin a new line"
    shown.check_clean(columns=40)
    assert max(map(len, shown.screen()[1:])) <= 40


def test_a_narrow_dumb_terminal(source: Path) -> None:
    shown = _run_child(source, columns=40, term="dumb")
    assert (shown.code, shown.out) == (0, "out\n")
    assert "\x1b" not in shown.raw
    assert 30 < max(map(len, shown.screen()[1:])) <= 40


@pytest.mark.parametrize(("moment", "left"), [("writing", []), ("syncing", ["out.partial"])])
def test_an_interrupt_leaves_a_clean_terminal(source: Path, moment: str, left: list[str]) -> None:
    shown = _run_child(source, interrupt_at=moment)
    assert (shown.code, shown.out) == (130, "")
    assert shown.screen()[-1] == "kconvert: error: interrupted; no output was changed"
    said = f"kconvert: 1 of 1 weight files are kept in {source.parent / 'out.partial'}; the same command goes on"
    assert (said in "".join(shown.screen())) == bool(left)
    shown.check_clean()
    assert sorted(path.name for path in source.parent.iterdir()) == ["my-model", *left]


# --- the summary --------------------------------------------------------------------------------------


def _run(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    code = main([str(item) for item in argv])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


PATCHES = """\
  - kernel: cpu_fused_rmsnorm
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
  - kernel: cpu_fused_rmsnorm
    replace: {class: Qwen3RMSNorm, path: "model.norm"}
"""


def test_the_summary(source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(source.parent)
    recipe = write_recipe(source.parent / "my.yaml", PATCHES, name="mine")
    code, out, err = _run(capsys, "apply", recipe, "my-model", "-o", "out")
    assert (code, out) == (0, "out\n")
    warning, start, *rest = [line.rstrip() for line in err.splitlines()]
    assert warning.endswith("1 tensors have no place in the model and are carried along, e.g. mtp.fc.weight")
    assert re.fullmatch(r"kconvert: recipe mine patches 5 modules; \d+\.\d kB to write", start)
    figures = re.compile(r"^(time +)\d.*?: check \d.*$|^(memory +)\d.*$", re.MULTILINE)
    assert figures.sub(r"\1\2...", "\n".join(rest)) == """
Converted with recipe mine

layout           path                                      modules
rms_norm         model.layers.*.input_layernorm                  2
                 model.norm                                      1
norm_gated_mlp   model.layers.*.post_attention_layernorm         2
                 + model.layers.*.mlp

weights          4.7 kB as they are, 1.5 kB packed
devices          cpu, cuda, npu
carried          1 tensor: mtp.fc.weight
left out         1 file: training_args.bin
time             ...
memory           ...
output           out

Check it
  kconvert verify out --source my-model
Load it, in Python
  model = kconvert.load_converted('out')
"""  # fmt: skip


def test_the_figures_of_the_summary_are_those_of_json(source: Path, capsys: Capture) -> None:
    from kconvert.cli.output import format_bytes

    value = json.loads(_run(capsys, "apply", "qwen3", source, "--no-model-check", "--json")[1])
    err = _run(capsys, "apply", "qwen3", source, "--no-model-check", "--overwrite")[2]
    copied, packed = format_bytes(value["bytes_copied"]), format_bytes(value["bytes_transformed"])
    assert re.search(rf"weights +{copied} as they are, {packed} packed", err)
    modules = [int(found) for found in re.findall(r"^.*model\.\S+ +(\d+) *$", err, re.MULTILINE)]
    assert sum(modules) == value["modules"]
    assert re.search(r"carried +not known without the model check", err)
    assert re.search(r"left out +1 file: training_args.bin", err)
    assert re.search(r"time +\d+\.\d s: check \d+\.\d s, copy \d+\.\d s, sync \d+\.\d s", err)
    assert re.search(r"memory +\d+\.\d [MG]B at the peak", err)


def test_the_summary_is_silent_about_what_there_is_not(qwen3_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = _run(capsys, "apply", "qwen3", qwen3_dir, "-o", tmp_path / "out")
    assert code == 0, err
    assert [word for word in ("carried", "left out", "none") if word in err] == []


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp"])
def test_the_summary_fits(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int, recipe: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(source.parent)
    _, out, err = _run(capsys, "apply", recipe, "my-model", "-o", "o" * 16, "--no-model-check")
    assert out == f"{'o' * 16}\n"
    lines = err.partition("Converted")[2].partition("Load it")[0].splitlines()
    assert max(map(len, lines)) <= columns
    assert ("model.layers.*.post_attention_layernorm" in "\n".join(lines)) == (columns > 40)
    assert (" \\" in "\n".join(lines)) == (columns == 40)


@pytest.mark.parametrize("name", ["my model", "it's $HOME", "m" * 90, os.fsdecode(b"mod\xe9l")])
def test_what_to_do_next_can_be_pasted(
    source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(source.parent)
    source = source.rename(source.with_name(name))
    _, _, err = _run(capsys, "apply", "qwen3", name, "-o", f"{name} out", "--no-model-check")
    _, _, rest = err.partition("Check it\n")
    command, _, python = rest.partition("Load it, in Python\n")
    shell = f"kconvert() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=True)
    assert os.fsdecode(done.stdout).split("\0") == ["verify", f"{name} out", "--source", name, ""]
    call = ast.parse(python.strip()).body[0]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    assert [ast.literal_eval(argument) for argument in call.value.args] == [f"{name} out"]


NOISY = """
print("imported")

class Norm:
    def forward(self, hidden_states):
        return hidden_states

class NormLayout:
    conversion_mapping = ()
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_package_that_prints(source: Path, capsys: Capture, quiet: bool) -> None:
    package = source.parent / "package"
    package.mkdir()
    (package / "layers.py").write_text(
        f"# {quiet}\n{NOISY}".replace("class NormLayout:", "from torch import nn\n\nclass NormLayout(nn.Module):")
    )
    entry = '  - kernel: ./package:Norm\n    trust_remote_code: true\n    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'  # fmt: skip
    recipe = write_recipe(source.parent / "my.yaml", entry)
    more = ["-q"] if quiet else []
    code, out, err = _run(capsys, "apply", recipe, source, "--trust-remote-code", "--no-model-check", *more)
    assert code == 0, err
    assert out == f"{source.parent / OUTPUT}\n"
    trusted, *rest = err.splitlines()
    assert trusted.startswith("kconvert: importing kernel package ./package:Norm (sha256:"), "said in any case"
    if quiet:
        assert rest == []
    else:
        assert rest[0] == "imported"
        assert f"load_converted({out.strip()!r}, trust_remote_code=True)" in err
        assert re.search(r"--source \S+ (\\\n +)?--trust-remote-code$", err, re.MULTILINE)


def test_quiet_keeps_warnings_and_errors(source: Path, capsys: Capture) -> None:
    code, out, err = _run(capsys, "apply", "qwen3", source, "-q")
    assert (code, out) == (0, f"{source.parent / OUTPUT}\n")
    (line,) = err.splitlines()
    assert line.startswith("kconvert: warning: 1 tensors have no place")
    code, out, err = _run(capsys, "apply", "qwen3", source, "-q")
    assert (code, out) == (7, "")
    (line,) = err.splitlines()
    assert line.startswith("kconvert: error: ")
    shutil.rmtree(source.parent / OUTPUT)
    code, out, err = _run(capsys, "apply", "qwen3", source, "-q", "--dry-run", "--no-model-check")
    assert (code, err) == (0, "")
    assert "model.layers.*.mlp.gate_up_proj.weight" in out
    assert not (source.parent / OUTPUT / MANIFEST_NAME).exists()
