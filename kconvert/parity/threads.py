"""Work on many items in a few threads, with the progress and the first error in the thread that waits.

However it ends, also by Ctrl-C, no thread is left running: the files that they read are about to be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeAlias, TypeVar

__all__ = ["Advance", "Work", "run_in_threads"]

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

Advance: TypeAlias = Callable[[int], None]
"""Told how many bytes were just looked at."""

Work: TypeAlias = Callable[[Item, Advance], Outcome]
"""What is done with an item."""


class _StoppedError(Exception):
    """Another thread has failed, or the run was interrupted."""


def run_in_threads(
    make_work: Callable[[], Work[Item, Outcome]],
    items: Sequence[Item],
    *,
    num_threads: int,
    on_progress: Advance,
) -> list[Outcome]:
    """The outcome of every item, in their order.

    Args:
        make_work: called once in each thread, so that what it gives may keep buffers.
        items: begun in this order.
        num_threads: at most so many.
        on_progress: called in this thread.

    Raises:
        BaseException: the first one that a thread raised; the others are stopped where they next report progress.
    """
    todo: SimpleQueue[int] = SimpleQueue()
    for number in range(len(items)):
        todo.put(number)
    messages: SimpleQueue[int | BaseException | None] = SimpleQueue()
    outcomes: dict[int, Outcome] = {}
    stop = Event()

    def advance(size_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        messages.put(size_bytes)

    def run() -> None:
        end: BaseException | None = None
        try:
            work = make_work()
            while not stop.is_set():
                number = todo.get_nowait()
                outcomes[number] = work(items[number], advance)
        except (Empty, _StoppedError):
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            end = error
        messages.put(end)

    threads = [Thread(target=run, name=f"kconvert-verify-{number}") for number in range(min(num_threads, len(items)))]
    num_running = len(threads)
    try:
        for thread in threads:
            thread.start()
        while num_running:
            message = messages.get()
            if isinstance(message, BaseException):
                raise message
            if message is None:
                num_running -= 1
            else:
                on_progress(message)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return [outcomes[number] for number in range(len(items))]
