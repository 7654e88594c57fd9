"""The ways to disturb a conversion, each at every place: kills, errors, Ctrl-C, a power cut.

A sweep yields one function per disturbance, so that the whole of it can be run, or a sample.  Each raises `Broken` where
something does not hold, and gives what it met for the figures.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from tests.crash.bench import Bench, Place, Variant, check_nothing_over, finished_in, require, snapshot, told
from tests.crash.layer import MOVING, PARTLY, Action, Call, Fault
from tests.crash.server import Outcome

__all__ = [
    "ERRORS",
    "Met",
    "Trial",
    "error_trial",
    "errors",
    "go_on",
    "interrupts",
    "kill_trial",
    "kills",
    "order_faults",
    "power_cuts",
    "repeated_kills",
    "require_clean",
]


@dataclass(frozen=True)
class Met:
    """What a trial came to, for the figures.

    Attributes:
        what: the variant and the faults.
        fired: how many of the faults were met.
        outcome: `killed`, `well`, or the class of the error and its exit code.
        resumed: bytes that the last run took over.
    """

    what: str
    fired: int
    outcome: str
    resumed: int


Trial: TypeAlias = Callable[[], Met]


# ---- kills


def kills(bench: Bench, variant: Variant, *, source_too: bool = True, afresh: bool = False) -> Iterator[Trial]:
    """A SIGKILL before, in the middle of and after every call; then the same command again.

    Args:
        bench: where.
        variant: of what.
        source_too: also at calls that only look at the source.
        afresh: the last run is one with `resume=False`.
    """
    for label in bench.labels(variant, source_too=source_too):
        for action in _kill_actions(label):
            yield kill_trial(bench, variant, [Fault(label, action)], afresh=afresh)


def _kill_actions(label: str) -> tuple[Action, ...]:
    if label.split(" ", 1)[0] in PARTLY:
        return "kill-before", "kill-middle", "kill-after"
    return "kill-before", "kill-after"


def repeated_kills(bench: Bench, variant: Variant, number: int, *, seed: int) -> Iterator[Trial]:
    """Runs that are killed, gone on with and killed again, two to four times, at random calls."""
    rng = Random(f"{variant.name} {seed}")
    num_calls = len(bench.labels(variant))
    for _ in range(number):
        places = [rng.randint(num_calls // 3, num_calls * 4 // 5) for _ in range(rng.randint(2, 4))]
        faults = [Fault(place, rng.choice(("kill-before", "kill-after"))) for place in places]
        yield kill_trial(bench, variant, faults, afresh=False)


def kill_trial(bench: Bench, variant: Variant, faults: Sequence[Fault], *, afresh: bool = False) -> Trial:
    def trial() -> Met:
        what = f"{variant.name}, killed at {', '.join(f'{fault.action} {fault.at}' for fault in faults)}"
        place = bench.place(variant)
        fired = 0
        for fault in faults:
            outcome = bench.run(place, fault)
            if outcome.ended != "killed":  # the run before had done so much that there is no such call
                require_clean(outcome, what)
                break
            fired += 1
            bench.check_stopped(place, what)
        resumed = go_on(bench, place, what, afresh=afresh)
        bench.remove(place)
        return Met(what, fired, "killed" if fired else "not met", resumed)

    return trial


def go_on(bench: Bench, place: Place, what: str, *, afresh: bool = False) -> int:
    """The same command again, and what has to hold then; gives the bytes that it took over."""
    done = _is_done(bench, place)
    finished = {} if afresh or done else finished_in(place.partial)
    options = {**place.variant.options, "resume": not afresh}
    outcome = bench.run(place, options=options)
    bench.check_gone_on(place, what, outcome, finished, done=done)
    return outcome.result.get("bytes_resumed", 0)


def _is_done(bench: Bench, place: Place) -> bool:
    return os.path.lexists(place.output) and snapshot(place.output) == bench.undisturbed(place.variant)[1]


# ---- a power cut


def power_cuts(bench: Bench, variant: Variant) -> Iterator[Trial]:
    """A kill after every call that changes the disk, and of what was not synced by then nothing is left.

    Once the data is lost (the files stay, full of zeros, under the times that they had), once the names.
    """
    for label in bench.labels(variant, source_too=False):
        for lose in (_lose_data, _lose_names):
            yield _power_trial(bench, variant, label, lose)


def _power_trial(bench: Bench, variant: Variant, label: str, lose: Callable[[Place, Sequence[Call]], None]) -> Trial:
    def trial() -> Met:
        what = f"{variant.name}, power cut after {label} ({lose.__name__})"
        place = bench.place(variant)
        outcome = bench.run(place, Fault(label, "kill-after"))
        require(outcome.ended == "killed", what, told(outcome))
        lose(place, outcome.calls)
        bench.check_stopped(place, what)
        done = _is_done(bench, place)
        last = bench.run(place)
        bench.check_gone_on(place, what, last, {}, done=True)
        require(last.ended == "well" or done, what, told(last))
        bench.remove(place)
        return Met(what, 1, "killed", last.result.get("bytes_resumed", 0))

    return trial


def _lose_data(place: Place, calls: Sequence[Call]) -> None:
    """Unsynced data becomes zeros, and the end of the journal that is not synced is cut in its middle."""
    for name in _unsynced(calls):
        path = place.root / name
        if not path.is_file():
            continue
        status = path.stat()
        if path.name == "journal.jsonl":
            os.truncate(path, (_synced_size(calls, name) + status.st_size) // 2)
        else:
            path.write_bytes(bytes(status.st_size))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _lose_names(place: Place, calls: Sequence[Call]) -> None:
    """Files whose folder was not synced since they were made are gone."""
    for number, call in enumerate(calls):
        folder = str(Path(call.place).parent)
        if call.creates and "/output/" in call.place and not _is_synced(calls, f"./{folder}", number):
            (place.root / call.place).unlink(missing_ok=True)


def _unsynced(calls: Sequence[Call]) -> list[str]:
    """Files that were written to since their last fsync began."""
    written = {call.place: number for number, call in enumerate(calls) if call.name in MOVING}
    return [name for name, number in written.items() if not _is_synced(calls, name, number)]


def _is_synced(calls: Sequence[Call], name: str, number: int) -> bool:
    """Whether an fsync of the file began after call `number` had ended."""
    wanted = name.removeprefix("./")
    return any(
        call.name == "fsync" and call.place.removeprefix("./") == wanted and call.begun > number for call in calls
    )


def _synced_size(calls: Sequence[Call], name: str) -> int:
    return sum(
        call.result
        for number, call in enumerate(calls)
        if call.name == "pwrite" and call.place == name and _is_synced(calls, name, number)
    )


def order_faults(calls: Sequence[Call]) -> list[str]:
    """What an undisturbed run does in an order that a power cut could tell; nothing if it is right.

    When the tree gets its name every file and folder in it, and the journal, is on the disk; nothing of an old output is
    removed before the new name is on the disk; every folder that was made is.
    """
    swap = next(n for n, call in enumerate(calls) if call.name in ("rename", "exchange") and "/output" in call.place)
    before, faults = calls[:swap], []
    for number, call in enumerate(before):
        inside = call.place.startswith("./") and ".partial/" in call.place
        if call.name in MOVING and inside and not _is_synced(before, call.place, number):
            faults.append(f"not synced before the rename: {call.label}")
        changes = call.creates or call.name in ("mkdir", "link", "unlink")
        name = call.other if call.name == "link" else call.place
        if changes and "/output/" in name and not _is_synced(before, str(Path(name).parent), number):
            faults.append(f"folder not synced before the rename: {call.label}")
    named = calls[swap].other
    for number, call in enumerate(calls):
        if number > swap and call.name in ("unlink", "rmdir") and ".partial" in call.place:
            if not _is_synced(calls[:number], str(Path(named).parent), swap):
                faults.append(f"the new name is not synced when something is removed: {call.label}")
            break
    for number, call in enumerate(calls):
        made = call.name == "mkdir" and ".partial" not in call.place
        if made and not _is_synced(calls, str(Path(call.place).parent), number):
            faults.append(f"folder never synced: {call.label}")
    return faults


# ---- errors

_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_MAKING = (*_WRITING, errno.EROFS, errno.EACCES)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)

ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*_MAKING, errno.EMFILE),
    "open_file": (errno.EIO, errno.EMFILE, errno.EACCES),
    "mkdir": _MAKING,
    "rmdir": (errno.EIO, errno.EBUSY, errno.ENOTEMPTY),
    "unlink": (errno.EIO, errno.EACCES, errno.EROFS),
    "rename": (*_MAKING, errno.EBUSY),
    "exchange": (*_MAKING, errno.EBUSY),
    "link": (*_UNSUPPORTED, errno.EPERM, errno.EMLINK, *_WRITING),
    "ftruncate": (*_WRITING, errno.EFBIG),
    "posix_fallocate": (*_WRITING, errno.EFBIG, errno.EBADF, *_UNSUPPORTED),
    "pwrite": (*_WRITING, errno.EFBIG, errno.EROFS, errno.ESTALE),
    "preadv": (errno.EIO, errno.ESTALE),
    "copy_file_range": (*_WRITING, *_UNSUPPORTED, errno.EPERM, errno.EBADF, errno.ETXTBSY),
    "fsync": (*_WRITING, errno.EINVAL, errno.EROFS),
    "close": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "flock": (errno.ENOLCK, errno.EWOULDBLOCK, errno.EIO, errno.EOPNOTSUPP),
    "statvfs": (errno.EIO, errno.ENOSYS),
    "listdir": (errno.EIO, errno.EACCES, errno.ENOENT),
    "scandir": (errno.EIO, errno.EACCES, errno.ENOENT),
    "stat": (errno.EIO, errno.EACCES, errno.ESTALE),
    "lstat": (errno.EIO, errno.EACCES, errno.ENOENT),
    "fstat": (errno.EIO, errno.ESTALE),
}
"""What the calls may fail with."""

_PARTS: dict[str, tuple[Action, ...]] = {
    "pwrite": ("short", "zero"),
    "preadv": ("short", "zero"),
    "copy_file_range": ("short", "zero"),
    "access": ("zero",),
}
_STAYING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINVAL)


def errors(bench: Bench, variant: Variant, *, source_too: bool = True) -> Iterator[Trial]:
    """Every call fails once with each errno that it may have, or does less than it was asked for, or stays failing."""
    for label in bench.labels(variant, source_too=source_too):
        name = label.split(" ", 1)[0]
        for number in ERRORS.get(name, ()):
            yield error_trial(bench, variant, Fault(label, "fail", number))
            if name in MOVING and number in _STAYING:
                yield error_trial(bench, variant, Fault(label, "fail", number, stays=True))
        for action in _PARTS.get(name, ()):
            yield error_trial(bench, variant, Fault(label, action))
            yield error_trial(bench, variant, Fault(label, action, stays=True))


def interrupts(bench: Bench, variant: Variant, *, source_too: bool = True) -> Iterator[Trial]:
    """A Ctrl-C before and after every call, whatever thread does it."""
    for label in bench.labels(variant, source_too=source_too):
        yield error_trial(bench, variant, Fault(label, "interrupt-before"))
        yield error_trial(bench, variant, Fault(label, "interrupt-after"))


def error_trial(bench: Bench, variant: Variant, fault: Fault) -> Trial:
    def trial() -> Met:
        name = errno.errorcode.get(fault.errno, "")
        what = f"{variant.name}, {fault.action} {name} at {fault.at}{', for good' if fault.stays else ''}"
        place = bench.place(variant)
        outcome = bench.run(place, fault)
        require(outcome.fired is not None, what, "no such call")
        require(outcome.ended in ("well", "error"), what, f"the process {outcome.ended} {outcome.trace}")
        require_clean(outcome, what)
        if outcome.ended == "well":
            require(_is_done(bench, place), what, "ended well, and the output is not whole")
        bench.check_stopped(place, what)
        _require_kept(outcome, place, what)
        resumed = go_on(bench, place, what)
        bench.remove(place)
        ended = outcome.ended if outcome.ended == "well" else f"{outcome.error} {outcome.code}"
        return Met(what, 1, ended, resumed)

    return trial


def require_clean(outcome: Outcome, what: str) -> None:
    """Ended well, or with one line and a documented exit code; nothing left over."""
    if outcome.ended == "error":
        clean = outcome.code in (4, 6, 7, 130) and "\n" not in outcome.text and "Traceback" not in outcome.printed
        require(clean, what, f"{told(outcome)}\n{outcome.trace}")
    require(not outcome.threads, what, f"threads left: {outcome.threads}")
    if outcome.code != 130:  # Ctrl-C may come between `open` and the place that keeps its result
        check_nothing_over(outcome, what)


def _require_kept(outcome: Outcome, place: Place, what: str) -> None:
    """What was finished before an error of the machine or Ctrl-C is kept, unless it has got its name."""
    if outcome.ended == "well" or outcome.code == 4 or os.path.lexists(place.output):
        return
    noted = [call for call in outcome.calls if call.name == "fsync" and call.place.endswith("journal.jsonl")]
    if len(noted) > 2:  # the first is of the identity; the fault may have met the last
        require(bool(finished_in(place.partial)), what, f"nothing kept after {len(noted)} lines: {told(outcome)}")
