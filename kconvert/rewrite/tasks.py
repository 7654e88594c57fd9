"""Cuts output files into copy tasks, and hands the tasks to the worker threads.

A gathered tensor is made block by block.  Extents that touch in the source and in the target are one run; a run is cut into pieces of at most 32 MiB.  One that
is converted is a run of its own, cut between values.
Pieces are made when they are asked for, so memory does not grow with the size of the checkpoint.

A file system takes one lock per written file, so each worker stays on a file of its own as long as
there are files enough, and they share the last ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from kconvert.rewrite.copying import BlockTask, MakeTask, OpenFile, Piece
from kconvert.rewrite.gather import Gather, blocks_of
from kconvert.rewrite.job import Computed, Extent

__all__ = ["PIECE_BYTES", "TaskQueue", "cut", "merged"]

PIECE_BYTES = 32 << 20

Task: TypeAlias = Piece | BlockTask | MakeTask


def merged(extents: Iterable[Extent | Gather | Computed]) -> Iterator[Extent | Gather | Computed]:
    """The same bytes in as few extents as possible, none of them empty."""
    path, offset, size = Path(), 0, 0
    for extent in extents:
        if extent.target_bytes == 0:
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
    extents: Iterable[Extent | Gather | Computed],
    sources: Mapping[Path, OpenFile],
    target: OpenFile,
    target_offset: int,
) -> Iterator[Task]:
    """The tasks that put `extents` one after another into `target` from `target_offset`."""
    for extent in merged(extents):
        if isinstance(extent, Gather):
            for block in blocks_of(extent):
                yield BlockTask(block, sources, target, target_offset + block.start * extent.item_bytes)
            target_offset += extent.target_bytes
            continue
        if isinstance(extent, Computed):
            yield MakeTask(extent, target, target_offset)
            target_offset += extent.target_bytes
            continue
        source, cast = sources[extent.path], extent.cast
        step = PIECE_BYTES if cast is None else cast.whole(PIECE_BYTES)
        for start in range(0, extent.size_bytes, step):
            size = min(step, extent.size_bytes - start)
            before = start if cast is None else cast.size_after(start)
            yield Piece(source, extent.offset + start, target, target_offset + before, size, cast)
        target_offset += extent.target_bytes


class TaskQueue:
    """Gives each piece of each file out once, to any number of threads."""

    def __init__(self, files: Iterable[Iterator[Task]]) -> None:
        self._lock = Lock()
        self._left = dict(enumerate(files))
        self._current: dict[int, int] = {}

    def take(self, worker: int) -> Task | None:
        """The next piece for `worker`, or None when all are given out."""
        with self._lock:
            while self._left:
                file = self._choose(worker)
                piece = next(self._left[file], None)
                if piece is not None:
                    return piece
                del self._left[file]
            return None

    def _choose(self, worker: int) -> int:
        """The file this worker is on, or else the first of those with the fewest workers."""
        current = self._current.get(worker)
        if current is None or current not in self._left:
            self._current.pop(worker, None)
            busy = list(self._current.values())
            current = self._current[worker] = min(self._left, key=busy.count)
        return current
