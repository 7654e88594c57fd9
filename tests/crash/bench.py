"""Small and larger checkpoints, the conversions of them that are disturbed, and what has to hold after that.

What is checked knows the engine from outside only: names beside the output, bytes and modes, and the journal as lines of
JSON.  A check that fails raises `Broken`, which says what was disturbed and what was found.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.crash.layer import MOVING, Fault
from tests.crash.server import Outcome, Run, Server, Tweak
from tests.support import LAYER_SHAPES, qwen3_config, qwen3_tensors, write_checkpoint

__all__ = [
    "VARIANTS",
    "Bench",
    "Broken",
    "Finished",
    "Place",
    "Snapshot",
    "Variant",
    "check_nothing_over",
    "finished_in",
    "require",
    "snapshot",
    "told",
    "write_larger",
    "write_small",
]

Snapshot: TypeAlias = Mapping[str, tuple[int, str]]
"""Name below a directory to mode and sha256; nothing for a folder.  The directory itself is "."."""

Finished: TypeAlias = Mapping[str, tuple[int, int, int]]
"""Name of a file to its size, inode and time."""

_ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


class Broken(AssertionError):
    """Something did not hold."""


# ---- checkpoints


def write_small(directory: Path, layers: int = 2) -> Path:
    """A Qwen3 of some 10 kB in four shards: one that does not change, and groups that lie in two shards."""
    tensors = qwen3_tensors(layers)
    rest = [name for name in tensors if name not in _ENDS]
    third = len(rest) // 3
    shards = [_ENDS, rest[: third + 1], rest[third + 1 : 2 * third], rest[2 * third :]]
    write_checkpoint(directory, tensors, qwen3_config(layers), shards)
    (directory / "generation_config.json").write_text('{"max_length": 20}')
    (directory / "tokenizer.json").write_text(json.dumps({"vocab": {str(number): number for number in range(500)}}))
    return directory


def write_larger(directory: Path, *, layers: int = 9, scale: int = 128, shards: int = 7, seed: int = 1) -> Path:
    """A Qwen3 of random bytes, some 44 MB a layer with the default scale."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1000, 8 * scale)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}": tuple(size * scale for size in shape)
            for name, shape in LAYER_SHAPES.items()
        }
    shapes |= {"model.norm.weight": (8 * scale,), "lm_head.weight": (1000, 8 * scale)}
    tensors = {name: rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32) for name, shape in shapes.items()}
    names = [name for name in tensors if name not in _ENDS]
    size = -(-len(names) // (shards - 1))
    parts = [_ENDS, *(names[start : start + size] for start in range(0, len(names), size))]
    write_checkpoint(directory, tensors, qwen3_config(layers), parts)
    (directory / "tokenizer.json").write_text("{}")
    return directory


# ---- what is disturbed


@dataclass(frozen=True)
class Variant:
    """A way to convert the small checkpoint.

    Attributes:
        name: for reports.
        options: those of `Options`.
        tweaks: what the machine cannot do.
        workers: copy threads; None for the default.
        before: what stands under the output's name: nothing, an empty folder, or an older and different conversion.
        output: below the place.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tweaks: tuple[Tweak, ...] = ()
    workers: int | None = None
    before: str = "nothing"
    output: str = "out"

    @property
    def may_be_gone(self) -> bool:
        """Whether there is a moment at which neither the old nor the new output has the name."""
        return self.before == "older" and "no-exchange" in self.tweaks


_OVER = {"overwrite": True}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("fresh"),
        Variant("one-worker", workers=1),
        Variant("overwrite", _OVER, before="older"),
        Variant("overwrite-by-two-renames", _OVER, ("no-exchange",), before="older"),
        Variant("overwrite-one-worker", _OVER, ("no-exchange",), workers=1, before="older"),
        Variant("digests", {"digests": True}),
        Variant("hardlinks", {"reuse": "hardlink"}),
        Variant("hardlinks-and-digests", {"reuse": "hardlink", "digests": True}),
        Variant("shard-size", {"max_shard_bytes": 900}),
        Variant("kernel", tweaks=("kernel",)),
        Variant("kernel-aligned", tweaks=("kernel-aligned",)),
        Variant("flushes", tweaks=("flush-often",)),
        Variant("empty-folder", before="empty"),
        Variant("new-parents", output="new/deep/out"),
    )
}


@dataclass(frozen=True)
class Place:
    """A folder of its own for one conversion that is disturbed."""

    root: Path
    variant: Variant

    @property
    def output(self) -> Path:
        """The output directory."""
        return self.root / self.variant.output

    @property
    def partial(self) -> Path:
        """The directory in which it is made."""
        return self.output.with_name(f"{self.output.name}.partial")

    def names(self) -> set[str]:
        """What lies beside the output, and the output."""
        return {path.name for path in self.output.parent.iterdir()} if self.output.parent.is_dir() else set()


class Bench:
    """A source, a fork server, and places in `folder`; what an undisturbed run does is found once for each variant."""

    def __init__(self, folder: Path, source: Path, older: Path, server: Server) -> None:
        """`older` is the source of the conversion that is overwritten."""
        self.source = source
        self.folder = folder
        self._server = server
        self._numbers = itertools.count()
        self._undisturbed: dict[str, tuple[Outcome, Snapshot]] = {}
        run = Run(source=str(older), output=str(folder / "older-output"))
        self._older_output = folder / "older-output"
        _require_well(server.run(run), "the older conversion")
        self.older = snapshot(self._older_output)
        self._source_states = self._states_of_source()

    def _states_of_source(self) -> Finished:
        return {path.name: _state(path) for path in self.source.iterdir()}

    def place(self, variant: Variant) -> Place:
        """A new place, with what stands there before."""
        root = self.folder / f"place-{next(self._numbers)}"
        root.mkdir()
        place = Place(root, variant)
        if variant.before == "empty":
            place.output.mkdir()
        if variant.before == "older":
            shutil.copytree(self._older_output, place.output)
        return place

    def command(self, place: Place, **changes: Any) -> Run:
        """The run that fills the place."""
        variant = place.variant
        run = Run(
            source=str(self.source),
            output=str(place.output),
            root=str(place.root),
            options=variant.options,
            workers=variant.workers,
            tweaks=variant.tweaks,
        )
        return replace(run, **changes)

    def run(self, place: Place, fault: Fault | None = None, **changes: Any) -> Outcome:
        """Does it; `changes` are fields of `Run`."""
        return self._server.run(self.command(place, fault=fault, **changes))

    def undisturbed(self, variant: Variant) -> tuple[Outcome, Snapshot]:
        """The run that nothing disturbs, and its output."""
        if variant.name not in self._undisturbed:
            place = self.place(variant)
            outcome = self.run(place)
            _require_well(outcome, variant.name)
            self._undisturbed[variant.name] = outcome, snapshot(place.output)
            self.remove(place)
        return self._undisturbed[variant.name]

    def labels(self, variant: Variant, *, source_too: bool = True) -> list[str]:
        """The addresses of all calls of the undisturbed run."""
        calls = self.undisturbed(variant)[0].calls
        return [call.label for call in calls if source_too or not call.place.startswith("source")]

    def remove(self, place: Place) -> None:
        """Everything that is there."""
        shutil.rmtree(place.root)

    def check_stopped(self, place: Place, what: str) -> None:
        """After a kill or an error: under the name there is nothing, or what was there, or all of the new output."""
        variant, names = place.variant, place.names()
        require(names <= {place.output.name, place.partial.name}, what, f"found {sorted(names)}")
        expected = self.undisturbed(variant)[1]
        if not os.path.lexists(place.output):
            if variant.before == "older":
                require(variant.may_be_gone, what, "neither the old nor the new output has the name")
                kept = place.partial / "replaced"
                require(kept.is_dir() and snapshot(kept) == self.older, what, "the old output is lost")
            return
        found = snapshot(place.output)
        before = {"older": self.older, "empty": {".": expected["."]}}.get(variant.before)
        require(found in (before, expected), what, f"under the name: {_difference(found, expected)}")

    def check_gone_on(self, place: Place, what: str, outcome: Outcome, finished: Finished, *, done: bool) -> None:
        """After the same command again.

        Args:
            outcome: its end.
            finished: what `finished_in` gave before it; these files must not be written again.
            done: the output was complete before it.
        """
        exists = outcome.error == "OutputError" and "output exists" in outcome.text
        require(outcome.ended == "well" or (done and exists), what, f"going on: {told(outcome)}")
        expected = self.undisturbed(place.variant)[1]
        require(os.path.lexists(place.output), what, "no output in the end")
        require(snapshot(place.output) == expected, what, _difference(snapshot(place.output), expected))
        require(place.names() == {place.output.name}, what, f"left in the end: {sorted(place.names())}")
        require(self._states_of_source() == self._source_states, what, "the source was written to")
        check_nothing_over(outcome, what)
        if not done:
            check_not_again(place.output, what, outcome, finished)


def finished_in(partial: Path) -> Finished:
    """The files that the journal calls finished and that are as it says."""
    found = {}
    journal = partial / "journal.jsonl"
    for line in journal.read_bytes().splitlines(keepends=True) if journal.is_file() else ():
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            break
        if not isinstance(value, dict):
            break
        path = partial / "output" / str(value.get("file"))
        if "file" in value and path.is_file():
            said = value["size_bytes"], value["inode"], value["modified_ns"]
            if said == _state(path):
                found[str(value["file"])] = said
    return found


def check_not_again(output: Path, what: str, outcome: Outcome, finished: Finished) -> None:
    """Finished files are the very same in the output, and all of their bytes are said to be an earlier run's."""
    again = [
        call.label
        for call in outcome.calls
        if (call.name in MOVING or call.creates) and Path(call.place).name in finished
    ]
    require(not again, what, f"done again: {again[:3]}")
    for name, state in finished.items():
        require(_state(output / name) == state, what, f"{name} is not the file that was finished")
    size, said = sum(size for size, _, _ in finished.values()), outcome.result.get("bytes_resumed")
    require(said == size, what, f"bytes_resumed is {said}, not {size}")


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_ino, status.st_mtime_ns


def check_nothing_over(outcome: Outcome, what: str) -> None:
    """No thread and no descriptor is left when the run has ended."""
    require(not outcome.threads, what, f"threads left: {outcome.threads}")
    require(not outcome.descriptors, what, f"descriptors left: {outcome.descriptors}")


def require(holds: bool, what: str, text: str) -> None:
    """Raises Broken unless it holds."""
    if not holds:
        raise Broken(f"{what}: {text}")


def told(outcome: Outcome) -> str:
    """An outcome in a line."""
    return f"{outcome.ended} {outcome.error} {outcome.code}: {outcome.text} {outcome.printed}".strip()


def snapshot(directory: Path) -> Snapshot:
    """Everything in a directory."""
    found = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        name, mode = path.relative_to(directory).as_posix(), stat.S_IMODE(path.lstat().st_mode)
        found[name] = (mode, "") if path.is_dir() else (mode, _digest(path))
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(found: Snapshot, expected: Snapshot) -> str:
    lacking, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [name for name in sorted(found.keys() & expected.keys()) if found[name] != expected[name]]
    return f"lacking {lacking}, too many {extra}, different {other}"


def _require_well(outcome: Outcome, what: str) -> None:
    require(outcome.ended == "well", what, f"{told(outcome)}\n{outcome.trace}")
