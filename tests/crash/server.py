"""A process without torch that has kconvert imported and forks a child for each run: some milliseconds a run.

    python -m tests.crash.server SOURCE     # reads a run as a JSON line, answers with a line

SOURCE is converted once in the process itself, so that its children find everything imported.

`Server` is the other end.  A child tells of its end through a pipe, also just before it kills itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias
from unittest import mock

from tests.crash.layer import Call, Fault, Layer

__all__ = ["Outcome", "Run", "Server", "Tweak"]

Tweak: TypeAlias = Literal["no-exchange", "kernel", "kernel-aligned", "flush-often"]
"""What the machine cannot do, or does otherwise: renameat2 is missing; the kernel copies, everywhere or at borders of blocks;
the disk is told to begin with a file after some bytes already."""

_ROOT = Path(__file__).parents[2]
_MOST_WAITS = 120
"""A run that says nothing for so many seconds hangs."""

_COUNTERS = struct.Struct("<qqqdd")
"""Moving calls begun and done, their bytes, when the first began and when the last ended."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `apply_recipe` in a process of its own, or one command line.

    Attributes:
        root: the directory below which calls are named and counted; that of the output if left out.
        options: those of `Options`.
        workers: copy threads; None for the default.
        tweaks: what is otherwise than on this machine.
        version: another `kconvert.__version__`.
        kill_after: seconds from the first byte that is copied until the child is killed from outside.
        counts_only: calls that move bytes are counted and not listed.
        command: arguments for the command line, in place of `apply_recipe`.
        trace: a file for what strace sees of the child.
    """

    source: str
    output: str
    recipe: str = "qwen3"
    root: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    fault: Fault | None = None
    tweaks: tuple[Tweak, ...] = ()
    version: str | None = None
    kill_after: float | None = None
    counts_only: bool = False
    command: tuple[str, ...] = ()
    trace: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        ended: `killed` also for a child that died of anything else than its own end, and `hung` for one that did not
            end; `trace` says where its threads stood.
        error: the class of what was raised, with `text`, `notes`, and `code` where it is one of ours.
        result: some figures of the `ApplyResult`.
        code: the exit code of the command line, or that of the error; 0 where there is none.
        printed: what the command line wrote to stderr.
        calls: what was done, in the order of ending.
        fired: the label of the call that the fault met.
        threads, descriptors: what was left over.
        seconds: of the whole run.
        in_flight: calls that moved bytes when it was killed from outside.
        moved_bytes: by then, where they are counted.
        moving_seconds: from the first byte to the last, where they are counted.
    """

    ended: Literal["well", "error", "killed", "hung"]
    error: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    trace: str = ""
    code: int = 0
    result: Mapping[str, int] = field(default_factory=dict)
    printed: str = ""
    calls: tuple[Call, ...] = ()
    fired: str | None = None
    threads: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    seconds: float = 0.0
    in_flight: int = 0
    moved_bytes: int = 0
    moving_seconds: float = 0.0


class Server:
    """Starts the process, and ends it when the context is left; `source` is a checkpoint for the recipe `qwen3`."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __enter__(self) -> Server:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.server", str(self._source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, run: Run) -> Outcome:
        """Do one run and wait for its end."""
        self.start(run)
        return self.finish()

    def start(self, run: Run) -> None:
        """Let a run begin; `finish` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(run)) + "\n")
        self._process.stdin.flush()

    def wait_for_pause(self, run: Run) -> None:
        """Until the run that was started has come to its pause; `go_on` lets it go on."""
        pausing, _ = _pause_files(Path(run.output))
        assert self._process.stdout is not None
        while not pausing.exists():
            if select.select([self._process.stdout], [], [], 0.002)[0]:
                raise RuntimeError(f"the run has ended before its pause: {self.finish()}")

    def go_on(self, run: Run) -> None:
        """Ends the pause."""
        for path in _pause_files(Path(run.output)):
            path.touch()

    def finish(self) -> Outcome:
        """How the run ended that was started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fork server has died")
        value = json.loads(line)
        calls = tuple(Call(*each) for each in value.pop("calls", ()))
        return Outcome(**{**value, "calls": calls})


# ---- the process


def _serve(source: Path) -> None:
    """Answers runs until stdin ends."""
    import kconvert.cli  # noqa: F401 - children find it imported
    from kconvert.convert import apply_recipe

    with tempfile.TemporaryDirectory() as folder:
        apply_recipe("qwen3", source, Path(folder) / "out", model_check=False)
    assert "torch" not in sys.modules
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        value = json.loads(line)
        fault = value.pop("fault")
        run = Run(**{**value, "fault": Fault(**fault) if fault else None})
        answers.write(json.dumps(_fork(run)) + "\n")
        answers.flush()


def _fork(run: Run) -> dict[str, Any]:
    shared = mmap.mmap(-1, _COUNTERS.size)
    reading, writing = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(run, shared, writing)
    os.close(writing)
    tracer = _trace(run.trace, pid, shared) if run.trace else None
    if run.kill_after is not None:
        _kill_later(pid, run.kill_after, shared, reading)
    said = _read(reading, pid)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    if tracer is not None:
        tracer.wait()
    answer: dict[str, Any] = json.loads(said) if said.endswith(b"\n") else {"ended": "killed"}
    if not said.endswith(b"\n") and b"Thread 0x" in said:
        answer = {"ended": "hung", "trace": said.decode(errors="replace")}
    if os.WIFSIGNALED(status) and answer["ended"] not in ("killed", "hung"):
        answer = {"ended": "killed"}
    begun, done, moved, first, last = _COUNTERS.unpack_from(shared)
    answer.update(seconds=seconds, in_flight=begun - done, moved_bytes=moved, moving_seconds=last - first)
    return answer


def _read(reading: int, pid: int) -> bytes:
    """All that a child says; one that does not end says where it stands, and is killed."""
    said, num_waits = b"", 0
    while True:
        if not select.select([reading], [], [], 1.0)[0]:  # not by a clock: a machine may stand still, and this with it
            num_waits += 1
            if num_waits >= _MOST_WAITS:
                os.kill(pid, signal.SIGUSR1 if num_waits == _MOST_WAITS else signal.SIGKILL)
            continue
        data = os.read(reading, 1 << 20)
        if not data:
            return said
        said += data


def _kill_later(pid: int, seconds: float, shared: mmap.mmap, reading: int) -> None:
    """Kills the child so long after its first move, unless it has ended before."""
    while _COUNTERS.unpack_from(shared)[0] == 0:
        if select.select([reading], [], [], 0.0005)[0]:
            return
    if not select.select([reading], [], [], seconds)[0]:
        os.kill(pid, signal.SIGKILL)


def _trace(path: str, pid: int, shared: mmap.mmap) -> subprocess.Popen[bytes]:
    """Attaches strace, then lets the child go on."""
    kinds = "trace=%file,%desc"
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-qq", "-s", "0", "-e", kinds, "-o", path, "-p", str(pid)], stderr=subprocess.DEVNULL
    )
    while f"TracerPid:\t{tracer.pid}\n" not in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None:  # it may not look at other processes here
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    _COUNTERS.pack_into(shared, 0, 0, 0, 1, 0.0, 0.0)
    return tracer


# ---- the child


def _child(run: Run, shared: mmap.mmap, writing: int) -> None:
    """Does the run, says how it ended, and is gone."""
    said: dict[str, Any] = {}
    write, leave = os.write, os._exit

    def say(**values: Any) -> None:
        data = json.dumps({**said, **values}).encode() + b"\n"
        while data:
            data = data[write(writing, data) :]

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGUSR1, writing)
        while run.trace and not _COUNTERS.unpack_from(shared)[2]:
            time.sleep(0.001)
        _tweak(run)
        roots = {run.root or str(Path(run.output).parent): ".", run.source: "source"}
        layer = Layer(
            roots,
            run.fault,
            on_death=lambda label: say(ended="killed", fired=label, calls=_listed(layer.calls)),
            on_pause=lambda: _pause(Path(run.output)),
            on_moved=_counting(shared) if run.counts_only else None,
        )
        before = _descriptors()
        with layer.installed():
            said.update(_command(run) if run.command else _apply(run))
        said.update(
            fired=layer.fired,
            calls=_listed(layer.calls),
            threads=[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
            descriptors=sorted(name for fd, name in _descriptors().items() if fd not in before),
        )
        say()
    except BaseException:  # noqa: BLE001 - the parent tells
        say(ended="error", error="child", trace=traceback.format_exc())
    finally:
        leave(0)


def _tweak(run: Run) -> None:
    """For the rest of this process."""
    ways = import_module("kconvert.rewrite.ways")
    changes: dict[str, object] = {}
    if "no-exchange" in run.tweaks:
        changes["kconvert.rewrite.output.exchange"] = lambda one, other: False
    if "kernel" in run.tweaks:
        changes["kconvert.rewrite.copying.kernel_copies"] = lambda source, target: ways.KernelCopies.ALWAYS
    if "kernel-aligned" in run.tweaks:
        changes["kconvert.rewrite.copying.kernel_copies"] = lambda source, target: ways.KernelCopies.ALIGNED
        changes["kconvert.rewrite.copying.BLOCK_BYTES"] = 16
    if "flush-often" in run.tweaks:
        changes["kconvert.rewrite.workers.FLUSH_BYTES"] = 300
    if run.workers is not None:
        changes["kconvert.rewrite.execute.default_workers"] = lambda: run.workers
    if run.version is not None:
        changes["kconvert.convert.job.__version__"] = run.version
    for name, value in changes.items():
        mock.patch(name, value).start()


def _pause_files(output: Path) -> tuple[Path, Path]:
    """Beside the folder of the output: the first is there when a run pauses, the second when it may go on."""
    folder = output.parent
    return folder.with_name(f"{folder.name}.pausing"), folder.with_name(f"{folder.name}.go")


def _pause(output: Path) -> None:
    pausing, going = _pause_files(output)
    pausing.touch()
    while not going.exists():
        time.sleep(0.002)


def _apply(run: Run) -> dict[str, Any]:
    from kconvert.convert import Options, apply_recipe

    try:
        result = apply_recipe(
            run.recipe, Path(run.source), Path(run.output), options=Options(**run.options), model_check=False
        )
    except BaseException as error:  # noqa: BLE001 - the parent looks at it
        return {
            "ended": "error",
            "error": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", ()),
            "trace": traceback.format_exc(),
            "code": _code(error),
        }
    return {
        "ended": "well",
        "result": {name: getattr(result, name) for name in ("bytes_resumed", "bytes_linked")},
    }


def _code(error: BaseException) -> int:
    """The exit code that the command line would give."""
    from kconvert.errors import KconvertError

    if isinstance(error, KconvertError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _command(run: Run) -> dict[str, Any]:
    from kconvert.cli import main

    with _captured() as printed:
        code = main(list(run.command))
    return {"ended": "error" if code else "well", "code": code, "printed": "".join(printed)}


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What the block writes to stderr; stdout goes nowhere."""
    printed: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file, open(os.devnull, "w") as nowhere:  # noqa: PTH123
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = nowhere, file
        try:
            yield printed
        finally:
            sys.stdout, sys.stderr = before
            file.seek(0)
            printed.append(file.read())


def _counting(shared: mmap.mmap) -> Callable[[int], None]:
    lock = threading.Lock()

    def count(size_bytes: int) -> None:
        with lock:
            begun, done, moved, first, _ = _COUNTERS.unpack_from(shared)
            now = time.monotonic()
            if not size_bytes:
                _COUNTERS.pack_into(shared, 0, begun + 1, done, moved, first or now, now)
            else:
                _COUNTERS.pack_into(shared, 0, begun, done + 1, moved + size_bytes, first, now)

    return count


def _listed(calls: list[Call]) -> list[tuple[Any, ...]]:
    return [tuple(vars(call).values()) for call in calls]


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
