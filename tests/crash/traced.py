"""What strace sees of a run beside what the layer noted: no call that changes a file may go past the layer."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.crash.bench import Bench, Variant, require, told
from tests.crash.layer import CHANGING, Call

__all__ = ["CannotTraceError", "check_nothing_escapes"]

_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_NAMES = {
    "pwrite64": "pwrite",
    "pwritev": "pwrite",
    "write": "pwrite",
    "writev": "pwrite",
    "fallocate": "posix_fallocate",
    "mkdirat": "mkdir",
    "renameat": "rename",
    "renameat2": "rename",
    "exchange": "rename",
    "replace": "rename",
    "linkat": "link",
}
_NEVER = re.compile(
    r"(f?chmod|f?chown|utime|symlink|mknod|truncate|f?setxattr|f?removexattr|creat|splice|sendfile|tee)\w*"
)


class CannotTraceError(Exception):
    """strace is missing, or may not look at other processes here."""


def check_nothing_escapes(bench: Bench, variant: Variant) -> dict[str, int]:
    """Runs it under strace, and gives how often each kind of call was made, which is as often as was noted."""
    if shutil.which("strace") is None:
        raise CannotTraceError("no strace")
    place = bench.place(variant)
    trace = bench.folder / "trace"
    outcome = bench.run(place, trace=str(trace))
    if outcome.ended == "killed":
        raise CannotTraceError("strace cannot look at other processes")
    require(outcome.ended == "well", variant.name, told(outcome))
    seen = _seen(trace.read_text(errors="replace").splitlines(), str(place.root))
    noted = _noted(outcome.calls)
    require(seen == noted, variant.name, f"strace saw {dict(seen - noted)} more, the layer {dict(noted - seen)}")
    bench.remove(place)
    return dict(sorted(seen.items()))


def _noted(calls: Sequence[Call]) -> Counter[str]:
    found: Counter[str] = Counter()
    for call in calls:
        if (call.other or call.place).startswith("source") or (call.name == "exchange" and not call.result):
            continue
        if call.creates:
            found["create"] += 1
        elif call.name in CHANGING:
            found[_NAMES.get(call.name, call.name)] += 1
    return found


def _seen(lines: Sequence[str], root: str) -> Counter[str]:
    """The calls below `root` that succeeded, by kind."""
    found: Counter[str] = Counter()
    for name, arguments in _whole(lines):
        if " = -1 " in arguments or not (f"{root}/" in arguments or f"{root}>" in arguments):
            continue
        kind = _NAMES.get(name, name)
        if kind in ("open", "openat"):
            found["create"] += "O_CREAT" in arguments
            found["open to truncate"] += "O_TRUNC" in arguments
        elif kind == "unlinkat":
            found["rmdir" if "AT_REMOVEDIR" in arguments else "unlink"] += 1
        elif kind in CHANGING or _NEVER.fullmatch(kind):
            found[kind] += 1
    return +found


def _whole(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and the rest of each call; one that another thread interrupted is put together."""
    begun: dict[str, str] = {}
    for line in lines:
        process, _, text = line.partition(" ")
        if text.rstrip().endswith("<unfinished ...>"):
            begun[process] = text.rstrip().removesuffix("<unfinished ...>")
            continue
        resumed = _RESUMED.match(text.strip())
        if resumed is not None:
            text = begun.pop(process, "") + resumed[1]
        name, _, arguments = text.strip().partition("(")
        yield name, arguments
