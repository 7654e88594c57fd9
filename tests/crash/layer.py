"""The injected file layer: every I/O call of the engine in this process, named, noted, and made to go wrong.

A call is addressed by its number, or by its label: the function, the file, and how often that function had been called
on that file.  Labels stay the same when threads take turns in another order, numbers do not.

    pwrite ./out.partial/journal.jsonl 3

Files are told by their place below the given roots; what lies elsewhere (modules, the recipe) is left alone.  Bytes that
are read by `open(...).read()`, and what safetensors maps, are one call each: they change nothing.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args

__all__ = ["ACTIONS", "CHANGING", "MOVING", "PARTLY", "Action", "Call", "Fault", "Layer"]

Action: TypeAlias = Literal[
    "kill-before", "kill-middle", "kill-after", "interrupt-before", "interrupt-after", "fail", "short", "zero", "pause"
]
ACTIONS: tuple[Action, ...] = get_args(Action)

_BY_PATH = ("open", "mkdir", "rmdir", "unlink", "stat", "lstat", "listdir", "scandir", "statvfs", "access", "readlink")
_BY_PATHS = ("rename", "replace", "link")
_BY_FD = ("ftruncate", "posix_fallocate", "pwrite", "write", "preadv", "pread", "fsync", "fdatasync", "fstat", "lseek")
_BY_CTYPES = {"exchange": "kconvert.rewrite.output", "start_writing": "kconvert.rewrite.execute"}
"""renameat2 and sync_file_range, and the modules that call them."""

_TARGET = {"copy_file_range": 1}
"""Which argument is the file that is written."""

MOVING = ("pwrite", "copy_file_range")
"""Calls that bring bytes into a file."""
PARTLY = (*MOVING, "preadv", "ftruncate", "posix_fallocate")
"""Calls that can be done in part."""
CHANGING = (
    *MOVING,
    "ftruncate",
    "posix_fallocate",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "replace",
    "link",
    "exchange",
)
"""Calls that change the disk; `open` with O_CREAT does too."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        at: the number of a call, from 1, or its label.
        action: `fail` raises `errno`; `short` does a part, `zero` nothing, and both say so; `pause` waits before it.
        errno: for `fail`.
        stays: every later call of the same function goes wrong too, as on a full disk.
    """

    at: int | str
    action: Action
    errno: int = 0
    stays: bool = False


@dataclass(frozen=True)
class Call:
    """A call that was done.

    Attributes:
        name: the function.
        place: the file it was about, below the roots.
        label: its address.
        other: the second file of a rename, link or exchange.
        creates: it may have made a file.
        begun: how many calls were done when it began.
        result: what it gave, where that is a number.
    """

    name: str
    place: str
    label: str
    other: str = ""
    creates: bool = False
    begun: int = 0
    result: int = 0

    @property
    def moves_weights(self) -> bool:
        """Whether it brought bytes into a weight file."""
        return self.name in MOVING and self.place.endswith(".safetensors")


@dataclass
class Layer:
    """Wraps the calls of this process while `installed`.

    Args:
        roots: directory to the name it is known by; the innermost one counts.
        fault: what goes wrong.
        on_death: is given the label just before the process kills itself.
        on_pause: returns when the call may go on.
        on_moved: is called before and after each call that moves bytes of a weight file: with 0, and with their number;
            these calls are not noted then.
    """

    roots: Mapping[str, str]
    fault: Fault | None = None
    on_death: Callable[[str], None] = lambda label: None
    on_pause: Callable[[], None] = lambda: None
    on_moved: Callable[[int], None] | None = None
    calls: list[Call] = field(default_factory=list)
    fired: str | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._seen: Counter[tuple[str, str]] = Counter()
        self._real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_PATHS, *_BY_FD, *_TARGET, "close")}
        self._kill, self._self = os.kill, os.getpid()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The calls go through the layer inside."""
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (os, name, self._wrapped(name, real)) for name, real in self._real.items()
        ]
        places += [(fcntl, name, self._wrapped(name, getattr(fcntl, name))) for name in ("flock", "ioctl")]
        places += [(module, "open", self._wrapped("open_file", builtins.open)) for module in (builtins, io)]
        for name, module in _BY_CTYPES.items():
            user = import_module(module)
            places.append((user, name, self._wrapped(name, vars(user)[name])))
        before = [(module, name, getattr(module, name)) for module, name, _ in places]
        try:
            for module, name, wrapped in places:
                setattr(module, name, wrapped)
            yield
        finally:
            for module, name, real in before:
                setattr(module, name, real)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        which = _TARGET.get(name, 0)
        takes_two = name in _BY_PATHS or name == "exchange"

        def call(*args: Any, **kw: Any) -> Any:
            if name == "open_file" and isinstance(args[0], int):
                return real(*args, **kw)  # only a wrapper of what is open
            place = self._place(args[which] if args else ".", kw.get("dir_fd"))
            if place is None:
                return real(*args, **kw)
            other = self._place(args[1], None) or "elsewhere" if takes_two else ""
            creates = name == "open" and bool(args[1] & os.O_CREAT)
            with self._lock:
                number, begun = next(self._numbers), len(self.calls)
                self._seen[name, place] += 1
                label = f"{name} {place} {self._seen[name, place]}"
                hit = self._hits(number, label, name)
            counted = self.on_moved if Call(name, place, "").moves_weights else None
            if counted is not None:
                counted(0)
            if hit is not None:
                result = self._go_wrong(hit, label, name, real, args, kw)
            else:
                result = real(*args, **kw)
            number_of = result if isinstance(result, int) and not isinstance(result, bool) else int(result is True)
            if counted is not None:
                counted(number_of)
            else:
                with self._lock:
                    self.calls.append(Call(name, place, label, other, creates, begun, number_of))
            if hit is not None and hit.action in ("kill-after", "interrupt-after"):
                self._end(hit, label)
            return result

        return call

    def _hits(self, number: int, label: str, name: str) -> Fault | None:
        fault = self.fault
        if fault is None:
            return None
        if self.fired is not None:
            return fault if fault.stays and name == self.fired.split(" ", 1)[0] else None
        if fault.at not in (number, label):
            return None
        self.fired = label
        return fault

    def _place(self, file: Any, dir_fd: int | None) -> str | None:
        if isinstance(file, int):
            path = self._of(file)
        else:
            base = str(Path.cwd()) if dir_fd is None else self._of(dir_fd)
            path = os.path.normpath(os.path.join(base, os.fsdecode(file)))  # noqa: PTH118 - bytes are paths too
        found = max((root for root in self.roots if f"{path}/".startswith(f"{root}/")), key=len, default=None)
        return None if found is None else f"{self.roots[found]}{path[len(found) :]}"

    def _of(self, fd: int) -> str:
        try:
            return str(self._real["readlink"](f"/proc/self/fd/{fd}"))
        except OSError:
            return "closed"

    def _go_wrong(
        self, fault: Fault, label: str, name: str, real: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]
    ) -> Any:
        if fault.action in ("kill-before", "interrupt-before"):
            self._end(fault, label)
        elif fault.action == "kill-middle":
            real(*_shortened(name, args), **kw)
            self._end(fault, label)
        elif fault.action == "fail":
            if name == "close":  # the descriptor is gone whatever close says
                real(*args, **kw)
            raise _error(fault.errno, args)
        elif fault.action == "short":
            return real(*_shortened(name, args), **kw)
        elif fault.action == "zero":
            return 0
        elif fault.action == "pause":
            self.on_pause()
        return real(*args, **kw)

    def _end(self, fault: Fault, label: str) -> None:
        if fault.action.startswith("kill"):
            with self._lock:
                self.on_death(label)
                self._die()
        thread = threading.main_thread().ident
        if thread is not None:
            signal.pthread_kill(thread, signal.SIGINT)

    def _die(self) -> NoReturn:
        while True:
            self._kill(self._self, signal.SIGKILL)


def _shortened(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the same call for about half of the bytes, at least one."""
    if name in ("pwrite", "write"):
        data = memoryview(args[1])
        return (args[0], data[: max(1, len(data) // 2)], *args[2:])
    if name == "preadv":
        buffer = memoryview(args[1][0])
        return (args[0], [buffer[: max(1, len(buffer) // 2)]], *args[2:])
    if name == "ftruncate":
        return (args[0], args[1] // 2)
    if name == "posix_fallocate":
        return (args[0], args[1], max(1, args[2] // 2))
    return (*args[:2], max(1, args[2] // 2), *args[3:])  # copy_file_range


def _error(number: int, args: tuple[Any, ...]) -> OSError:
    """As the real call would raise it: with the file where it has a path."""
    if args and isinstance(args[0], str | bytes | Path):
        return OSError(number, os.strerror(number), os.fsdecode(args[0]))
    return OSError(number, os.strerror(number))
