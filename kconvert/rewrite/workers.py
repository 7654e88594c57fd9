"""Runs the copy threads of one rewrite.

Progress and the first error of any thread come back to the calling thread, which alone calls the
callback.  However this ends, also by Ctrl-C or by an error of the callback, no thread is left running:
their descriptors are about to be closed, and a closed number may be given to another file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

from kconvert.rewrite.copying import Choices, Copier
from kconvert.rewrite.tasks import TaskQueue

__all__ = ["default_workers", "run_workers"]

_Message: TypeAlias = int | BaseException | None
"""Bytes finished, the error that ended a thread, or None: a thread has ended well."""


def default_workers() -> int:
    """2 to 4 threads: memory bandwidth, not the number of cores, is the limit."""
    return max(2, min(4, os.cpu_count() or 2))


def run_workers(tasks: TaskQueue, workers: int, on_bytes: Callable[[int], None]) -> None:
    """Copies every task; returns when all threads have ended, or raises the first error of any of them."""
    stop: Event = Event()
    messages: SimpleQueue[_Message] = SimpleQueue()
    choices: Choices = {}
    threads = [
        Thread(target=_work, args=(tasks, number, choices, stop, messages), name=f"kconvert-copy-{number}")
        for number in range(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        _receive(messages, workers, on_bytes)
    finally:
        stop.set()
        _join(threads)


def _work(tasks: TaskQueue, number: int, choices: Choices, stop: Event, messages: SimpleQueue[_Message]) -> None:
    end: BaseException | None = None
    try:
        with Copier(choices, stop, messages.put) as copier:
            while not stop.is_set() and (piece := tasks.take(number)) is not None:
                copier.copy(piece)
    except BaseException as error:  # noqa: BLE001  # raised again by the caller, who would wait for ever otherwise
        end = error
    messages.put(end)


def _receive(messages: SimpleQueue[_Message], live: int, on_bytes: Callable[[int], None]) -> None:
    while live:
        message = messages.get()
        if isinstance(message, BaseException):
            raise message
        if message is None:
            live -= 1
        else:
            on_bytes(message)


def _join(threads: Iterable[Thread]) -> None:
    """Waits for the started threads; a Ctrl-C meanwhile is raised after the last one has ended."""
    interrupt: KeyboardInterrupt | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
