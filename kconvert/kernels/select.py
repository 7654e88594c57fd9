"""The choice of a kernel: one pure function, and the trace of every candidate.

Everything the choice depends on is an argument, so every device can be tested on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ANY_DEVICE", "Candidate", "Mode", "Selection", "Verdict", "select"]

ANY_DEVICE = "any"
"""Device of a kernel that says nothing of devices: the forward of a two-class package."""


class Mode(StrEnum):
    """Whether gradients have to flow through the kernel."""

    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True)
class Candidate:
    """What the choice has to know of a kernel.  `origin` says where it was named: recipe, call or default."""

    kernel_id: str
    device: str
    origin: str
    has_backward: bool = True
    dtypes: frozenset[str] | None = None


@dataclass(frozen=True)
class Verdict:
    """A candidate, accepted or rejected, and why."""

    kernel_id: str
    origin: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """The chosen kernel (None is the reference) and every candidate's verdict, in the order of preference."""

    kernel_id: str | None
    trace: tuple[Verdict, ...]

    def reasons(self) -> str:
        """The rejections as one line for an error or a table."""
        return "; ".join(f"{verdict.kernel_id}: {verdict.reason}" for verdict in self.trace if not verdict.accepted)


def select(
    candidates: Sequence[Candidate],
    *,
    device: str,
    dtype: str,
    mode: Mode,
    unavailable: Mapping[str, str],
    unsupported: Mapping[str, str],
) -> Selection:
    """Choose the first candidate that can run.

    Args:
        candidates: in order of preference.
        device: device type of the input, e.g. `cuda`.
        dtype: dtype of the module's parameters, e.g. `bfloat16`.
        mode: whether a backward is needed.
        unavailable: kernel ID to the reason why it cannot run on this machine.
        unsupported: kernel ID to the reason why it does not compute this module's forward.
    """
    chosen: str | None = None
    trace = []
    for candidate in candidates:
        reason = _rejection(candidate, device, dtype, mode, unavailable, unsupported)
        if reason is None and chosen is not None:
            trace.append(Verdict(candidate.kernel_id, candidate.origin, False, f"{chosen} comes first"))
            continue
        if reason is None:
            chosen = candidate.kernel_id
        trace.append(Verdict(candidate.kernel_id, candidate.origin, reason is None, reason or "chosen"))
    return Selection(chosen, tuple(trace))


def _rejection(
    candidate: Candidate,
    device: str,
    dtype: str,
    mode: Mode,
    unavailable: Mapping[str, str],
    unsupported: Mapping[str, str],
) -> str | None:
    """What keeps the kernel from this machine altogether comes first: moving the input does not help there."""
    if candidate.kernel_id in unavailable:
        return unavailable[candidate.kernel_id]
    if candidate.device not in (device, ANY_DEVICE):
        return f"runs on {candidate.device}, the input is on {device}"
    if candidate.kernel_id in unsupported:
        return unsupported[candidate.kernel_id]
    if candidate.dtypes is not None and dtype not in candidate.dtypes:
        return f"does not take {dtype}"
    if mode is Mode.TRAINING and not candidate.has_backward:
        return "has no backward"
    return None
