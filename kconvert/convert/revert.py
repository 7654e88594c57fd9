"""`revert`: the source's weight files, index and sidecars again, out of the converted directory alone.

Everything is checked before the first byte: the manifest, the headers on both sides, that every step can be undone, and the
sidecars by their digests.  The weights themselves are copied and not looked at, so they are the source's byte for byte if
they are still what was written.

Refused: a conversion with a step that has no exact inverse, a directory whose parts do not belong together, a sidecar that
was changed or that `apply` would not have copied, and an output that holds anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kconvert.checkpoint import Converted, FileStamp, open_converted, sidecar_roots
from kconvert.convert.job import identity_of
from kconvert.convert.memory import peak_rss_bytes
from kconvert.convert.record import digest_of_sidecar
from kconvert.convert.restored_files import RestoredFiles, check_invertible, restore_files
from kconvert.convert.source_headers import load_source_headers
from kconvert.errors import CheckpointError, ManifestError, OutputError, VerificationError
from kconvert.garbage import collector_stopped
from kconvert.names import is_own_name, is_stock_weight_name, printable
from kconvert.rewrite import Copy, Job, check_output, rewrite

__all__ = ["NotRestored", "PreparedRevert", "RevertResult", "check_revert_output", "prepare_revert", "revert"]


@dataclass(frozen=True)
class NotRestored:
    """A file, folder or tensor that does not come back, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PreparedRevert:
    """A checked revert that only has to be written.

    Attributes:
        converted: where the weights come from.
        job: what is written.
        index: the name of the index; None where the source had none.
        not_restored: what the source had, or the converted directory has, and the output will not.
        is_exact: everything that is written is as `apply` read it.
        notes: what is not as it was in the source, for people.
    """

    converted: Converted
    job: Job
    index: str | None
    not_restored: tuple[NotRestored, ...]
    is_exact: bool
    notes: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the weight files."""
        return tuple(file.name for file in self.job.files)

    @property
    def sidecars(self) -> tuple[str, ...]:
        """The names of the sidecars."""
        return tuple(copy.name for copy in self.job.copies)


@dataclass(frozen=True)
class RevertResult:
    """What a `revert` did.  Sizes in bytes, times in seconds.

    Attributes:
        output: the directory.
        bytes_written: the size of all files.
        bytes_resumed: of these, what an earlier run had finished.
        copy_seconds: from the first byte copied to the last.
        sync_seconds: from there until everything was on the disk.
        total_seconds: all of it.
        peak_rss_bytes: of the process.
        prepared: what was written.
    """

    output: Path
    bytes_written: int
    bytes_resumed: int
    copy_seconds: float
    sync_seconds: float
    total_seconds: float
    peak_rss_bytes: int
    prepared: PreparedRevert


def revert(
    directory: Path,
    output: Path,
    *,
    resume: bool = True,
    on_prepared: Callable[[PreparedRevert], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RevertResult:
    """Write the source of a converted directory again.

    Args:
        directory: the converted directory; it is not changed.
        output: where to write; missing or empty.
        resume: go on where a run of the same was stopped, and refuse to drop one of another.
        on_prepared: called once everything is checked, with what is written.
        on_progress: called with the number of bytes just written, after that.

    Raises:
        KconvertError: of the kind that says what was wrong; nothing is left under the output name.
    """
    started = time.perf_counter()
    check_revert_output(output, directory)
    prepared = prepare_revert(directory)
    if on_prepared is not None:
        on_prepared(prepared)
    result = rewrite(prepared.job, output, resume=resume, on_progress=on_progress)
    return RevertResult(
        output=result.output,
        bytes_written=result.bytes_written,
        bytes_resumed=result.bytes_resumed,
        copy_seconds=result.copy_seconds,
        sync_seconds=result.sync_seconds,
        total_seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        prepared=prepared,
    )


def check_revert_output(output: Path, directory: Path) -> None:
    """Refuse an output that is not missing or empty, or that touches the converted directory.

    Raises:
        UsageError: by real path, `output` is `directory`, or one lies inside the other.
        OutputError: `output` holds something, or is no directory.
    """
    try:
        check_output(output, source=directory, overwrite=False)
    except OutputError as error:
        if not output.is_dir() or output.is_mount():
            raise
        raise OutputError("output is not empty", where=str(output), fix="choose another output") from error


@collector_stopped()
def prepare_revert(directory: Path) -> PreparedRevert:
    """Read and check everything; writes nothing, and reads no tensor data.

    Raises:
        CheckpointError: the directory is damaged or incomplete, or its parts do not belong together.
        VerificationError: a step has no exact inverse, or a sidecar was changed.
    """
    converted = open_converted(directory)
    check_invertible(converted)
    source = load_source_headers(directory, converted.manifest)
    restored = restore_files(converted, source)
    copies, stamps = _sidecars(converted)
    stamps.update({file.path: file.stamp for file in converted.files})
    final = ((source.index_name, restored.index.encode()),) if source.index_name and restored.index is not None else ()
    return PreparedRevert(
        converted,
        Job(restored.files, copies, final, stamps, identity_of(restored.files, converted.files)),
        source.index_name,
        tuple(_not_restored(converted, restored)),
        not converted.is_saved,
        tuple(_notes(converted, restored, source.index_name)),
    )


def _sidecars(converted: Converted) -> tuple[tuple[Copy, ...], dict[Path, FileStamp]]:
    roots = sidecar_roots(converted.directory)
    copies, stamps = [], {}
    for name in converted.manifest.sidecars:
        path = converted.directory / name
        folder, _, base = name.rpartition("/")
        if is_stock_weight_name(base) or (not folder and is_own_name(base)):
            raise ManifestError(f"names {name!r} as a sidecar, which is never copied", where=str(converted.directory))
        try:
            digest, stamp = digest_of_sidecar(path, roots)
        except CheckpointError as error:
            raise CheckpointError(error.what, where=error.where, fix="get the directory again") from error
        if digest != converted.manifest.sidecar_digests[name]:
            raise VerificationError(
                "is not what it was when kconvert wrote it", where=str(path), fix="put the original file there"
            )
        copies.append(Copy(name, path, stamp.size_bytes))
        stamps[path] = stamp
    return tuple(copies), stamps


def _not_restored(converted: Converted, restored: RestoredFiles) -> Iterator[NotRestored]:
    manifest = converted.manifest
    for name in restored.left_out:
        yield NotRestored(name, "the save left it out: it is tied to another tensor")
    for name in restored.empty:
        yield NotRestored(name, "the save left out all tensors in it")
    for item in manifest.omitted:
        yield NotRestored(item.name, f"was not brought over: {item.reason}")
    known = {item.name for item in manifest.omitted} | {name.partition("/")[0] for name in manifest.sidecars}
    try:
        names = sorted(path.name for path in converted.directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror or error}", where=str(converted.directory)) from error
    for name in names:
        if name not in known and not is_own_name(name):
            yield NotRestored(printable(name), "the manifest does not know it: it came after the conversion")


def _notes(converted: Converted, restored: RestoredFiles, index_name: str | None) -> Iterator[str]:
    if converted.is_saved:
        yield "the values, and config.json, are those of the model that was saved here"
    for (saved, source), count in sorted(restored.rounded.items()):
        tensors = "1 tensor is" if count == 1 else f"{count} tensors are"
        yield f"{tensors} rounded from {saved}, in which it was saved, to {source}, as in the source"
    for name in restored.new_headers:
        yield f"{name} has a header of its own: tensors changed their shape, or were left out"
    if index_name is not None and (restored.new_headers or restored.empty):
        yield f"{index_name} is written anew"
