"""Level `bytes`: every byte of a converted directory beside the source's, or beside the digests of the conversion.

The manifest says which bytes of the source a tensor consists of, and these are read once more, as `apply` read them; so
what is shown is that the files are what the manifest says, and for built-in layouts that it says what they say.  Files
that are not weights have digests in any case.  Without the source and without digests only names, dtypes and shapes are
looked at, and the level says that nothing is proved.

Nothing here needs torch.  Memory is a few blocks for each thread, whatever the size of a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

from kconvert.checkpoint import DTYPE_BITS, Checkpoint, FileStamp, check_stamp
from kconvert.garbage import collector_stopped
from kconvert.manifest import Manifest, OriginRecord, TensorRecord
from kconvert.names import CONFIG_NAME
from kconvert.parity.bytes_result import BytesLevel, Difference, How, TensorGroup
from kconvert.parity.job import VerifyJob
from kconvert.parity.layouts import layout_failures
from kconvert.parity.locate import exchanged_parts, index_of, source_element
from kconvert.parity.results import Failure
from kconvert.parity.stored import Stored, StoredTensor, file_failure, package_failure, read_stored
from kconvert.parity.threads import Advance, run_in_threads
from kconvert.plan import COPY
from kconvert.rewrite import Extent, Gather, OpenFile, OutputFile, Place, Reader, extents_of
from kconvert.rewrite.preflight import check_open_files
from kconvert.rewrite.workers import default_workers
from kconvert.transforms import Arrangement, Op, compose

__all__ = ["compare_bytes"]

_AGAIN = "copy the directory again, or convert the checkpoint again"
_UNCHANGED = (COPY, Op.RENAME)
_SOURCE_CHANGED = "the converted directory is as it was written: get the source again"


def compare_bytes(job: VerifyJob) -> BytesLevel:
    """Run the level.

    Raises:
        CheckpointError: a weight file cannot be read to its end, or changed meanwhile.
        PreflightError: there are more weight files than may be open.
    """
    manifest = job.manifest
    with collector_stopped():
        stored = read_stored(job.directory, manifest)
        failures = [*stored.failures, *layout_failures(manifest)]
        unfit: frozenset[str] = frozenset()
        if job.checkpoint is not None:
            failures += _left_out(manifest, job.checkpoint)
            wrong = {it.target: what for it in manifest.tensors for what in _wrong_origins(it, job.checkpoint)}
            failures += (Failure(target, what) for target, what in wrong.items())
            unfit = frozenset(wrong)
        checks = [check for tensor in stored.tensors if (check := _tensor_check(tensor, job, unfit)) is not None]
    outcomes, problems = _run(job, stored, checks)
    failures += (outcome for outcome in outcomes if isinstance(outcome, Failure))
    differences = [outcome for outcome in outcomes if isinstance(outcome, Difference)]
    differences.sort(key=lambda each: -each.num_bytes / each.size_bytes)
    found = (*map(_with_fix, failures), *map(_failure_of, differences), *map(_with_fix, problems))
    compared = {check.target for check in checks}
    return BytesLevel(
        how=_how(job),
        groups=_groups(manifest, compared, {failure.where for failure in found}),
        num_files=len(_file_checks(job)),
        num_wrong_files=len(problems),
        num_compared_bytes=sum(check.tensor.entry.size_bytes for check in checks),
        not_compared=tuple(record.target for record in manifest.tensors if record.target not in compared),
        differences=tuple(differences),
        found=found,
        is_whole=not stored.failures,
    )


def _with_fix(failure: Failure) -> Failure:
    return replace(failure, fix=_AGAIN)


def _failure_of(found: Difference) -> Failure:
    return Failure(found.target, found.text, fix=_SOURCE_CHANGED if found.is_as_written else None)


def _how(job: VerifyJob) -> How:
    if job.checkpoint is None:
        return How.STRUCTURE if job.manifest.digests is None else How.DIGESTS
    return How.SOURCE if job.manifest.digests is None else How.BOTH


# --- what there is to compare -----------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorCheck:
    """A tensor whose bytes are compared: with what `made` says, if that is given, and with `digest`, if that is."""

    tensor: StoredTensor
    made: Arrangement | None
    digest: str | None

    @property
    def target(self) -> str:
        return self.tensor.record.target


def _tensor_check(tensor: StoredTensor, job: VerifyJob, unfit: frozenset[str]) -> _TensorCheck | None:
    """How a tensor is compared; None where nothing is known of its bytes."""
    record = tensor.record
    is_known = job.checkpoint is not None and record.exact and record.target not in unfit
    made = _stored(record) if is_known else None
    digest = job.manifest.digests[record.target] if job.manifest.digests is not None else None
    return None if made is None and digest is None else _TensorCheck(tensor, made, digest)


def _stored(record: TensorRecord) -> Arrangement:
    """Of which elements of the source's tensors a tensor consists."""
    return compose(record.arrangement(), {part.source: part.stored() for part in record.parts})


def _left_out(manifest: Manifest, checkpoint: Checkpoint) -> Iterator[Failure]:
    used = {origin.file_name for record in manifest.tensors for origin in record.origins}
    for name in checkpoint.tensors:
        if name not in used:
            yield Failure(name, "is in the source, and the manifest has no place for it")


def _wrong_origins(record: TensorRecord, checkpoint: Checkpoint) -> Iterator[str]:
    for origin in record.origins:
        tensor = checkpoint.tensors.get(origin.file_name)
        if tensor is None:
            yield f"is made of {origin.file_name!r}, which the source does not have"
        elif (tensor.file, tensor.dtype, tensor.shape) != (origin.file, origin.dtype, origin.shape):
            yield f"is made of {_told(origin)}; the source has {tensor.dtype} {list(tensor.shape)} in {tensor.file}"


def _told(origin: OriginRecord) -> str:
    return f"{origin.file_name!r}, {origin.dtype} {list(origin.shape)} in {origin.file}"


_FileCheck: TypeAlias = Callable[[], Failure | None]


def _file_checks(job: VerifyJob) -> list[_FileCheck]:
    """Every file that is not weights, and every kernel package."""
    manifest = job.manifest
    checks: list[_FileCheck] = [partial(_sidecar_failure, job, *item) for item in manifest.sidecar_digests.items()]
    if manifest.source_headers is not None:
        checks.append(partial(file_failure, job.directory, manifest.source_headers, manifest.source_headers_digest))
    packages = {record.layout.package for record in manifest.patches if record.layout.package is not None}
    checks += (partial(package_failure, job.directory, package) for package in packages)
    return checks


def _sidecar_failure(job: VerifyJob, name: str, digest: str) -> Failure | None:
    if name == CONFIG_NAME and digest == job.manifest.config_digest:
        return None  # it was looked at, here and in the source
    found = file_failure(job.directory, name, digest)
    return file_failure(job.source, name, digest, of_source=True) if found is None and job.source is not None else found


def _groups(manifest: Manifest, compared: set[str], wrong: set[str]) -> tuple[TensorGroup, ...]:
    by_kind: dict[str, list[TensorRecord]] = {"copied": [], "joined": [], "computed": []}
    for record in manifest.tensors:
        by_kind[_kind(record)].append(record)
    return tuple(
        TensorGroup(
            kind,
            len(records),
            sum(prod(record.shape) * DTYPE_BITS.get(record.dtype, 0) // 8 for record in records),
            sum(record.target in compared for record in records),
            sum(record.target in wrong for record in records),
        )
        for kind, records in by_kind.items()
        if records
    )


def _kind(record: TensorRecord) -> str:
    if not record.exact:
        return "computed"
    return "copied" if record.op in _UNCHANGED and record.origins[0].dtype == record.dtype else "joined"


# --- comparing --------------------------------------------------------------------------------------

_Outcome: TypeAlias = Difference | Failure | None


def _run(job: VerifyJob, stored: Stored, checks: list[_TensorCheck]) -> tuple[list[_Outcome], list[Failure]]:
    """What is wrong with the tensors, and what is wrong with the files."""
    stamps = {job.directory / name: stamp for name, stamp in stored.stamps.items()}
    if job.checkpoint is not None:
        stamps |= {file.path: file.stamp for file in job.checkpoint.files}
    check_open_files([OutputFile("verify", b"", tuple(Extent(path, 0, 0) for path in stamps))], 0)
    job.on_start(sum(check.tensor.entry.size_bytes for check in checks))
    with contextlib.ExitStack() as stack:
        files = {path: _open(path, stamp, stack) for path, stamp in stamps.items()}
        outcomes = run_in_threads(
            lambda: _Comparer(job, files).compare,
            checks,
            num_threads=default_workers(),
            on_progress=job.on_progress,
        )
        for path, stamp in stamps.items():
            check_stamp(stamp, files[path].fd, path)
    problems = run_in_threads(
        lambda: _run_file_check, _file_checks(job), num_threads=default_workers(), on_progress=job.on_progress
    )
    return outcomes, [problem for problem in problems if problem is not None]


def _run_file_check(check: _FileCheck, advance: Advance) -> Failure | None:
    advance(0)
    return check()


def _open(path: Path, stamp: FileStamp, stack: contextlib.ExitStack) -> OpenFile:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    check_stamp(stamp, fd, path)
    return OpenFile(path, fd)


class _Comparer:
    """Compares tensors for one thread."""

    def __init__(self, job: VerifyJob, files: Mapping[Path, OpenFile]) -> None:
        self._job = job
        self._source, self._target = Reader(files), Reader(files)
        self._paths = {file.name: file.path for file in job.checkpoint.files} if job.checkpoint is not None else {}
        self._by_digest = {digest: target for target, digest in (job.manifest.digests or {}).items()}

    def compare(self, check: _TensorCheck, advance: Advance) -> _Outcome:
        """Every byte of a tensor; what is wrong with it, or None."""
        hasher = hashlib.sha256()
        update = hasher.update if check.digest is not None else _skip
        if check.made is None:
            for data in self._stored_blocks(check, 0, check.tensor.entry.size_bytes):
                update(data)
                advance(data.nbytes)
        else:
            places = self._places(check.tensor.record)
            try:
                parts = extents_of(check.made, check.tensor.record.dtype, places)
            except ValueError as error:  # a dtype that nothing is converted to
                return Failure(check.target, f"cannot be made of what the manifest says ({error})")
            if sum(part.target_bytes for part in parts) != check.tensor.entry.size_bytes:
                return Failure(check.target, "cannot be made of what the manifest says (another size)")
            num_bytes, first = self._compare_with(parts, check, update, advance)
            if num_bytes:
                is_as_written = None if check.digest is None else hasher.hexdigest() == check.digest
                return self._difference(check, check.made, places, num_bytes, first, is_as_written, advance)
        if check.digest is None or hasher.hexdigest() == check.digest:
            return None
        return self._other_digest(check, hasher.hexdigest())

    def _places(self, record: TensorRecord) -> dict[str, Place]:
        assert self._job.checkpoint is not None
        tensors = (self._job.checkpoint.tensors[origin.file_name] for origin in record.origins)
        return {each.name: Place(self._paths[each.file], each.offset, each.dtype) for each in tensors}

    def _stored_blocks(self, check: _TensorCheck, start: int, size_bytes: int) -> Iterator[memoryview]:
        path, offset = self._job.directory / check.tensor.file, check.tensor.entry.offset + start
        return self._target.blocks((Extent(path, offset, size_bytes),))

    def _compare_with(
        self,
        parts: Iterable[Extent | Gather],
        check: _TensorCheck,
        update: Callable[[memoryview], None],
        advance: Advance,
    ) -> tuple[int, int]:
        """How many bytes differ, and the number of the first one."""
        num_bytes, first, done = 0, 0, 0
        for block in self._source.blocks(parts):
            for data in self._stored_blocks(check, done, block.nbytes):
                expected, block = block[: data.nbytes], block[data.nbytes :]
                update(data)
                num_here, first_here = _differing(expected, data)
                if num_here and not num_bytes:
                    first = done + first_here
                num_bytes += num_here
                done += data.nbytes
                advance(data.nbytes)
        return num_bytes, first

    def _difference(
        self,
        check: _TensorCheck,
        made: Arrangement,
        places: Mapping[str, Place],
        num_bytes: int,
        first: int,
        is_as_written: bool | None,
        advance: Advance,
    ) -> Difference:
        record, entry = check.tensor.record, check.tensor.entry
        shapes = {origin.file_name: origin.shape for origin in record.origins}
        source, element = source_element(made, first * 8 // DTYPE_BITS[record.dtype])
        exchanged: tuple[tuple[str, str], ...] = ()
        if num_bytes > 1:
            stored = Place(self._job.directory / check.tensor.file, entry.offset, entry.dtype)
            exchanged = exchanged_parts(made, stored, places, shapes, self._source, on_block=lambda: advance(0))
        index = index_of(element, shapes[source])
        return Difference(record.target, num_bytes, entry.size_bytes, source, index, exchanged, is_as_written)

    def _other_digest(self, check: _TensorCheck, found: str) -> Failure:
        if check.made is not None:
            what = "is as in the source, and the manifest has another digest for it"
        else:
            what = "its bytes are not those that were written: their sha256 is not the one in the manifest"
        other = self._by_digest.get(found)
        return Failure(check.target, what + (f", but that of {other}" if other not in (None, check.target) else ""))


def _skip(data: memoryview) -> None:
    """For bytes of which no digest is known."""


def _differing(one: memoryview, two: memoryview) -> tuple[int, int]:
    """How many bytes differ, and the number of the first one."""
    import numpy as np

    wrong = np.frombuffer(one, np.uint8) != np.frombuffer(two, np.uint8)
    return (int(np.count_nonzero(wrong)), int(wrong.argmax())) if wrong.any() else (0, 0)
