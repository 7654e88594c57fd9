"""The threads of one rewrite: some that copy, and one that gets what they have written onto the disk meanwhile.

The disk begins with a file long before it is finished: else it would have all to do in the end.

Progress and the first error of any thread come back to the calling thread, which alone calls the
callback.  However this ends, also by Ctrl-C or by an error of the callback, no thread is left running:
their descriptors are about to be closed, and a closed number may be given to another file.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue, SimpleQueue
from threading import Event, Lock, Thread
from time import perf_counter
from typing import TypeAlias

from kconvert.rewrite.copying import Choices, Copier, Task
from kconvert.rewrite.reading import OpenFile
from kconvert.rewrite.tasks import TaskQueue

__all__ = ["BACKLOG", "Crew", "default_workers"]

FLUSH_BYTES = 128 << 20
"""How much is written to a file until the disk is told to begin with it, again and again."""

BACKLOG = 16
"""How many finished files may wait for their sync: each of them is open."""

_Message: TypeAlias = int | BaseException | None
"""Bytes finished, the error that ended a thread, or None: a thread has ended well."""


def default_workers() -> int:
    """2 to 4 threads: memory bandwidth, not the number of cores, is the limit."""
    return max(2, min(4, os.cpu_count() or 2))


@dataclass(frozen=True, slots=True)
class _Note:
    """For the thread that settles: a file, and whether it is finished."""

    file: str
    is_finished: bool


class _Worker(Thread):
    """A thread that tells of its end: a `join` that Ctrl-C interrupts takes a thread that runs for one that has ended."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name)
        self.ended = Event()

    def run(self) -> None:
        """Does the work."""
        try:
            super().run()
        finally:
            self.ended.set()


class Crew:
    """Does every task of every file.

    In a thread of its own `settle` is called with the name of each finished file, and `flush` with that of a file that is
    being written, now and then.
    """

    def __init__(
        self,
        files: Mapping[str, Iterator[Task]],
        sources: Mapping[Path, OpenFile],
        num_workers: int,
        settle: Callable[[str], None],
        flush: Callable[[str], None],
    ) -> None:
        self.digests: dict[str, str] = {}
        self.copied_at = self.settled_at = perf_counter()
        self._sources = sources
        self._settle, self._flush = settle, flush
        self._stop = Event()
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self._written: Counter[str] = Counter()
        self._notes: Queue[_Note | None] = Queue(maxsize=BACKLOG)
        self._tasks = TaskQueue(files, self._hand_over)
        self._choices: Choices = {}
        self._error: BaseException | None = None
        self._live = num_workers
        self._lock = Lock()
        self._threads = [
            *(_Worker(f"kconvert-copy-{number}", partial(self._copy, number)) for number in range(num_workers)),
            _Worker("kconvert-copy-sync", self._settle_all),
        ]

        self._num_running = len(self._threads)

    def start(self) -> None:
        """Starts the threads.

        Ctrl-C waits until they run: a thread whose start it interrupts cannot be waited for.  They leave it to this one.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for thread in self._threads:
                thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, on_bytes: Callable[[int], None]) -> None:
        """Returns when everything is done, or raises the first error of any thread; then also at once when called again."""
        while self._num_running:
            message = self._error or self._messages.get()
            if isinstance(message, BaseException):
                self._error = message
                raise message
            if message is None:
                self._num_running -= 1
            else:
                on_bytes(message)

    def stop(self) -> None:
        """Lets the threads end where they are, and waits for them; a Ctrl-C meanwhile is raised when all have ended."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._stop.set()
                with contextlib.suppress(Full):  # else there is something to take, and nobody waits
                    self._notes.put_nowait(None)
                for thread in self._threads:
                    if thread.ident is not None:  # it was started
                        thread.ended.wait()
                        thread.join()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _copy(self, number: int) -> None:
        end: BaseException | None = None
        file = ""

        def on_bytes(size_bytes: int) -> None:
            self._messages.put(size_bytes)
            self._count(file, size_bytes)

        try:
            copier = Copier(self._sources, self._choices, self._stop, on_bytes, self.digests)
            while not self._stop.is_set() and (taken := self._tasks.take(number)) is not None:
                file, task = taken
                copier.copy(task)
                if not self._stop.is_set():  # else the task may have been left
                    self._tasks.done(file)
            self._leave()
        except BaseException as error:  # noqa: BLE001  # raised again by the caller, who would wait for ever otherwise
            end = error
            self._stop.set()
        self._messages.put(end)

    def _count(self, file: str, size_bytes: int) -> None:
        with self._lock:
            before = self._written[file]
            after = self._written[file] = before + size_bytes
        if before // FLUSH_BYTES != after // FLUSH_BYTES:
            with contextlib.suppress(Full):  # then there is enough to do for the disk
                self._notes.put_nowait(_Note(file, is_finished=False))

    def _leave(self) -> None:
        """The last thread that copies lets the one that settles end."""
        with self._lock:
            self._live -= 1
            is_last = self._live == 0
        if is_last:
            self.copied_at = self.settled_at = perf_counter()
            self._hand_over(None)

    def _hand_over(self, file: str | None) -> None:
        """Gives a finished file, or the end of them, to the thread that settles."""
        note = None if file is None else _Note(file, is_finished=True)
        while not self._stop.is_set():
            try:
                self._notes.put(note, timeout=0.1)
            except Full:
                continue
            return

    def _settle_all(self) -> None:
        end: BaseException | None = None
        try:
            while (note := self._notes.get()) is not None and not self._stop.is_set():
                (self._settle if note.is_finished else self._flush)(note.file)
            self.settled_at = perf_counter()
        except BaseException as error:  # noqa: BLE001  # as above
            end = error
            self._stop.set()
        self._messages.put(end)
