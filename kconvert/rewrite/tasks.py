"""Cuts output files into tasks, and hands the tasks to the worker threads.

A gathered tensor is made block by block, and one that is digested as a whole.  Extents that touch in the source and in
the target are one run; a run is cut into pieces of at most 32 MiB.  One that is converted is a run of its own, cut
between values.  Tasks are made when they are asked for, so memory does not grow with the size of the checkpoint.

A file system takes one lock per written file, so each worker stays on a file of its own as long as
there are files enough, and they share the last ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock

from kconvert.rewrite.copying import BlockTask, Piece, Task, WholeTask
from kconvert.rewrite.gather import Gather, blocks_of
from kconvert.rewrite.job import Computed, Digested, Extent, Part
from kconvert.rewrite.reading import OpenFile

__all__ = ["PIECE_BYTES", "TaskQueue", "cut", "digests_of", "merged"]

PIECE_BYTES = 32 << 20


def merged(extents: Iterable[Part]) -> Iterator[Part]:
    """The same bytes in as few extents as possible, none of them empty but for tensors that are digested."""
    path, offset, size = Path(), 0, 0
    for extent in extents:
        if extent.target_bytes == 0 and not isinstance(extent, Digested):
            continue
        if not isinstance(extent, Extent) or extent.cast is not None:
            if size:
                yield Extent(path, offset, size)
            yield extent
            size = 0
            continue
        if size and extent.offset == offset + size and extent.path == path:
            size += extent.size_bytes
            continue
        if size:
            yield Extent(path, offset, size)
        path, offset, size = extent.path, extent.offset, extent.size_bytes
    if size:
        yield Extent(path, offset, size)


def cut(
    extents: Iterable[Part], sources: Mapping[Path, OpenFile], target: OpenFile, target_offset: int
) -> Iterator[Task]:
    """The tasks that put `extents` one after another into `target` from `target_offset`."""
    for extent in merged(extents):
        if isinstance(extent, Gather):
            for block in blocks_of(extent):
                yield BlockTask(block, target, target_offset + block.start * extent.item_bytes)
        elif isinstance(extent, Computed | Digested):
            yield WholeTask(extent, target, target_offset)
        elif extent.cast is not None:
            step = extent.cast.whole(PIECE_BYTES)
            for start in range(0, extent.size_bytes, step):
                run = Extent(extent.path, extent.offset + start, min(step, extent.size_bytes - start), extent.cast)
                yield WholeTask(run, target, target_offset + extent.cast.size_after(start))
        else:
            for start in range(0, extent.size_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, extent.size_bytes - start)
                yield Piece(sources[extent.path], extent.offset + start, target, target_offset + start, size)
        target_offset += extent.target_bytes


def digests_of(extents: Iterable[Part]) -> Iterator[Task]:
    """The tasks that only read the tensors of which a digest is wanted."""
    return (WholeTask(extent, None, 0) for extent in extents if isinstance(extent, Digested))


class TaskQueue:
    """Gives each task of each file out once, to any number of threads, and says when a file has all of its done."""

    def __init__(self, files: Mapping[str, Iterator[Task]], on_finished: Callable[[str], None]) -> None:
        """`on_finished` is called with the name of each file, in the thread that did its last task."""
        self._lock = Lock()
        self._left = dict(files)
        self._current: dict[int, str] = {}
        self._open: Counter[str] = Counter()
        self._on_finished = on_finished

    def take(self, worker: int) -> tuple[str, Task] | None:
        """The next task for `worker`, with its file, or None when all are given out."""
        while True:
            with self._lock:
                if not self._left:
                    return None
                file = self._choose(worker)
                task = next(self._left[file], None)
                if task is not None:
                    self._open[file] += 1
                    return file, task
                del self._left[file]
                is_finished = not self._open[file]
            if is_finished:
                self._on_finished(file)

    def done(self, file: str) -> None:
        """A task of `file` that was taken is done."""
        with self._lock:
            self._open[file] -= 1
            is_finished = not self._open[file] and file not in self._left
        if is_finished:
            self._on_finished(file)

    def _choose(self, worker: int) -> str:
        """The file this worker is on, or else the first of those with the fewest workers."""
        current = self._current.get(worker)
        if current is None or current not in self._left:
            self._current.pop(worker, None)
            busy = list(self._current.values())
            current = self._current[worker] = min(self._left, key=busy.count)
        return current
