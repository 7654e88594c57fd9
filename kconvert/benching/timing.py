"""Time on a device and on the host, as medians.

On CUDA a call is timed by events, with its inputs out of the caches, so that what the host does beside it does not count; that
is a figure of its own.  Elsewhere a call is timed whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

__all__ = ["copy_bytes_per_second", "host_seconds", "median_seconds"]

_SECONDS = 0.15
"""About as long as one call is timed."""


def median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, on the device."""
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds: float = do_bench(call, warmup=25, rep=int(_SECONDS * 1000), return_mode="median")
        return milliseconds / 1000
    call()
    seconds: list[float] = []
    while sum(seconds) < _SECONDS or len(seconds) < 5:
        started = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


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
