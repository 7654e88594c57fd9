"""What is seen on stderr while `apply` or `verify` works.

On a terminal it is one line at the bottom: what is being checked, then a bar.  It is erased in the end, and what
is printed meanwhile stands above it.  Elsewhere it is a plain line every few seconds, and none for a job that
is done sooner.  Quiet shows neither.

The thread that writes only adds up bytes; a thread of the display reads the sum, so a slow disk shows too.  The
cursor is never hidden: whatever ends the process, it is there.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kconvert.cli.output import can_redraw, format_bytes, format_duration, format_share, note

__all__ = ["Meter", "Progress", "Reading", "bar_line", "plain_line"]

Clock: TypeAlias = Callable[[], float]

_LINE_SECONDS = 5.0
_REDRAWS_PER_SECOND = 5
_STATUS_AFTER_SECONDS = 0.3
"""A check that is done sooner shows nothing: it would only flicker."""
_RATE_SECONDS = 10.0
"""How far back the rate looks: a disk is fast until its caches are full."""
_MARGIN = 3
"""Columns left free on the right: the terminal writes `^C` there, which must not begin a new line."""
_MIN_BAR, _MAX_BAR = 5, 40
_LEFT_WIDTH = len("59 min 59 s left")


@dataclass(frozen=True)
class Reading:
    """How far a job is.

    Attributes:
        done_bytes: written so far.
        total_bytes: to write in all.
        bytes_per_second: of the last seconds; None where there is nothing to measure yet.
        sync_seconds: how long the disk has been waited for; None while data is still written, and where none is.
        label: what is done with the bytes.
    """

    done_bytes: int
    total_bytes: int
    bytes_per_second: float | None
    sync_seconds: float | None
    label: str = "writing"

    @property
    def seconds_left(self) -> float | None:
        """Time until everything is written at this rate; None where that cannot be told."""
        if not self.bytes_per_second or self.sync_seconds is not None:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second


class Meter:
    """Adds up what is written; of `total_bytes`, the last `final_bytes` are written after the data was synced.

    Without `final_bytes` nothing is synced, as where bytes are only read; `label` says what is done with them.
    """

    def __init__(
        self, total_bytes: int, final_bytes: int | None, *, label: str = "writing", clock: Clock = time.monotonic
    ) -> None:
        self._clock = clock
        self._label = label
        self._total_bytes = total_bytes
        self._data_bytes = None if final_bytes is None else total_bytes - final_bytes
        self._done_bytes = 0
        self._data_done: float | None = None
        self._samples = deque([(clock(), 0)])

    def add(self, size_bytes: int) -> None:
        """Count bytes that were just written; called very often."""
        self._done_bytes += size_bytes
        if self._data_done is None and self._data_bytes is not None and self._done_bytes >= self._data_bytes:
            self._data_done = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether all bytes are done, and nothing is synced after them."""
        return self._data_bytes is None and self._done_bytes >= self._total_bytes

    def read(self) -> Reading:
        """How far it is now; each call is a sample for the rate."""
        now, done_bytes, data_done = self._clock(), self._done_bytes, self._data_done
        samples = self._samples
        samples.append((now, done_bytes))
        while len(samples) > 2 and samples[1][0] <= now - _RATE_SECONDS:
            samples.popleft()
        since, before_bytes = samples[0]
        rate = (done_bytes - before_bytes) / (now - since) if now > since and done_bytes else None
        sync_seconds = None if data_done is None else now - data_done
        return Reading(done_bytes, self._total_bytes, rate, sync_seconds, self._label)


def plain_line(reading: Reading) -> str:
    """`1.2 of 3.0 GB, 410.3 MB/s, 4 s left`, for a log."""
    if reading.sync_seconds is not None:
        written = format_bytes(reading.total_bytes)
        return f"{written} written, waiting for the disk (sync) for {format_duration(reading.sync_seconds)}"
    parts = [format_share(reading.done_bytes, reading.total_bytes), _rate(reading), _left(reading)]
    return ", ".join(filter(None, parts)).lstrip()


def bar_line(reading: Reading, width: int, *, ascii_only: bool = False) -> Text:
    """The bar with its figures, at most `width` columns; where that is too narrow, figures are left out."""
    is_syncing = reading.sync_seconds is not None
    label = "syncing" if is_syncing else reading.label
    share = 1.0 if is_syncing or not reading.total_bytes else reading.done_bytes / reading.total_bytes
    done_bytes = reading.total_bytes if is_syncing else reading.done_bytes
    percent, size = f"{int(100 * share):>3}%", format_share(done_bytes, reading.total_bytes)
    if reading.sync_seconds is not None:
        waiting = f"waiting for the disk, {format_duration(reading.sync_seconds)}"
        choices = [(percent, size, waiting), (percent, size), (percent,)]
    else:
        rate, left = f"{_rate(reading):>10}", f"{_left(reading):<{_LEFT_WIDTH}}"
        choices = [(percent, size, rate, left), (percent, size, left), (percent, size), (percent,)]
    for figures in choices:
        tail = "".join(f"  {figure}" for figure in figures)
        bar_width = min(width - len(label) - 2 - len(tail), _MAX_BAR)
        if bar_width >= _MIN_BAR:
            break
    full = int(share * max(bar_width, 0))
    done, to_do = "#." if ascii_only else "━─"
    line = Text.assemble(
        (label, "bold"),
        "  ",
        (done * full, "cyan"),
        to_do * (bar_width - full),
        tail.rstrip(),
        no_wrap=True,
        overflow="crop",
    )
    line.truncate(width)
    return line


def _rate(reading: Reading) -> str:
    return "" if reading.bytes_per_second is None else f"{format_bytes(round(reading.bytes_per_second))}/s"


def _left(reading: Reading) -> str:
    return "" if reading.seconds_left is None else f"{format_duration(reading.seconds_left)} left"


class Progress:
    """Shows what goes on from `with` to its end; nothing where `quiet` is set.

    Args:
        status: what goes on until `writing` or `comparing` is called.
        quiet: show nothing.
        clock: seconds, for the rate and the times that are shown.
        line_seconds: how often there is a plain line.
    """

    def __init__(
        self, status: str, *, quiet: bool = False, clock: Clock = time.monotonic, line_seconds: float = _LINE_SECONDS
    ) -> None:
        self._status, self._quiet = status, quiet
        self._clock, self._line_seconds = clock, line_seconds
        self._started = clock()
        self._meter: Meter | None = None
        self._console = _Console()
        self._display: Live | _Lines | None = None

    def __enter__(self) -> Progress:
        if not self._quiet and can_redraw(sys.stderr):
            self._display = Live(
                console=self._console,
                get_renderable=self._line,
                refresh_per_second=_REDRAWS_PER_SECOND,
                transient=True,
                redirect_stdout=False,
            )
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def writing(self, total_bytes: int, *, final_bytes: int = 0) -> None:
        """From now on bytes are written; the last `final_bytes` of them after everything else was synced."""
        self._measure(Meter(total_bytes, final_bytes, clock=self._clock))

    def comparing(self, total_bytes: int) -> None:
        """From now on bytes are compared; when that is over, the status is shown again."""
        if total_bytes:
            self._measure(Meter(total_bytes, None, label="comparing", clock=self._clock))

    def _measure(self, meter: Meter) -> None:
        self._meter = meter
        if self._display is None and not self._quiet:
            self._display = _Lines(self._plain_line, self._line_seconds)
            self._display.start()

    def advance(self, size_bytes: int) -> None:
        """Bytes were written, or compared; nothing is printed here."""
        meter = self._meter
        if meter is not None:
            meter.add(size_bytes)
            if meter.is_over:
                self._meter = None

    def _plain_line(self) -> str | None:
        meter = self._meter
        return None if meter is None else plain_line(meter.read())

    def _line(self) -> Text:
        width, meter = self._console.width - _MARGIN, self._meter
        if meter is not None:
            return bar_line(meter.read(), width, ascii_only=self._console.options.ascii_only)
        seconds = self._clock() - self._started
        shown = f"{self._status}, {format_duration(seconds)}" if seconds >= _STATUS_AFTER_SECONDS else ""
        line = Text(shown, no_wrap=True, overflow="crop")
        line.truncate(width)
        return line


class _Console(Console):
    """stderr as a terminal: what is printed above the line is not wrapped, and the cursor stays as it is."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr, force_terminal=True, force_interactive=True, soft_wrap=True)

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Lines:
    """A thread that notes a line again and again, where there is one."""

    def __init__(self, line: Callable[[], str | None], seconds: float) -> None:
        self._line, self._seconds = line, seconds
        self._ended = Event()
        self._thread = Thread(target=self._run, name="kconvert-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            line = self._line()
            try:
                if line is not None:
                    note(f"kconvert: {line}")
            except OSError:  # nobody reads stderr any more; that is no reason to stop the conversion
                return
