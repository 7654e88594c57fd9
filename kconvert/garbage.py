"""Python's cyclic garbage collector, stopped where it can find nothing.

A plan of 100,000 tensors is millions of small objects that are all kept.  The collector looks at every one of them
again and again while they are made, and that takes longer than making them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_stopped"]


@contextlib.contextmanager
def collector_stopped() -> Iterator[None]:
    """Nothing is collected inside, in no thread; may be nested.  Only for what keeps nearly all that it makes."""
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()
