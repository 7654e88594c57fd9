"""Time on a device and on the host, as medians.

On CUDA a call is timed by events, with its inputs out of the caches, and launched while the device has other work still to
do.  So what the host does beside it does not count, unless the call itself waits for the device; that is a figure of its own.
Elsewhere a call is timed whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any

import torch

__all__ = ["copy_bytes_per_second", "host_seconds", "median_seconds"]

_SECONDS = 0.15
"""About as long as one call is timed."""

_FLUSH_BYTES = 256 << 20
"""Written between two calls: several times what any device keeps in its caches."""

_MOST_FLUSHES = 64
"""A few ms: a call that takes longer on the host waits for the device itself, or starves it."""


def median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, on the device."""
    if device.type == "cuda":
        return _median_seconds_on_cuda(call, device)
    call()
    seconds: list[float] = []
    while sum(seconds) < _SECONDS or len(seconds) < 5:
        started = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _median_seconds_on_cuda(call: Callable[[], Any], device: torch.device) -> float:
    other = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    call()
    on_host = min(_seconds_until_launched(call, device) for _ in range(3))
    flush = median(_seconds_between_events(other.zero_, device) for _ in range(3))
    flushes = min(ceil(2 * on_host / flush) + 1, _MOST_FLUSHES)
    seconds: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < _SECONDS or len(seconds) < 5:
        for _ in range(flushes):
            other.zero_()
        seconds.append(_seconds_between_events(call, device))
    return median(seconds)


def _seconds_until_launched(call: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _seconds_between_events(call: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        behind.record()
        behind.synchronize()
        milliseconds: float = before.elapsed_time(behind)
    return milliseconds / 1000


def host_seconds(call: Callable[[], Any], device: torch.device, *, number: int = 200) -> float:
    """What a call takes on the host until the device has its work; the device must not be the slower one."""
    call()
    found = []
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - started) / number)
    _wait(device)
    return median(found)


def copy_bytes_per_second(device: torch.device, size_bytes: int) -> float:
    """Bytes read plus bytes written by copies of so many bytes on the device."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / median_seconds(lambda: target.copy_(source), device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
