"""What is checked of the machine before the first byte: descriptors, space, inodes and the length of names.

The rest shows when all files are made, in their full size and before one is filled: names that the file system does not
take or does not tell apart, sizes that it does not hold, space that is reserved.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from kconvert.errors import PreflightError, UsageError
from kconvert.rewrite.job import OutputFile
from kconvert.rewrite.output import real_path
from kconvert.rewrite.reading import OpenFile

__all__ = ["check_disk", "check_open_files", "check_sources_stay"]

_SPARE_FILES = 64


def check_open_files(files: Sequence[OutputFile], num_targets: int) -> None:
    """Raises PreflightError where the sources of `files` and so many targets cannot be open at once."""
    num_sources = len({path for file in files for extent in file.extents for path in extent.paths})
    needed = num_sources + num_targets + _SPARE_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise PreflightError(
            f"{needed} files have to be open at once, the limit is {limit}", fix=f"raise it with `ulimit -n {needed}`"
        )


def check_sources_stay(sources: Mapping[Path, OpenFile], target: Path) -> None:
    """Raises UsageError where a link leads from a source directory into an output that is about to be replaced."""
    for path in sources:
        if real_path(path).is_relative_to(target):
            raise UsageError(f"output holds the source file {path}", where=str(target), fix="choose another output")


def check_disk(folder: Path, names: Iterable[str], needed_bytes: int) -> None:
    """Raises PreflightError where the file system of `folder` cannot hold files of these names and that size in all."""
    status = os.statvfs(folder)
    names = [*names]
    free_bytes = status.f_bavail * status.f_frsize
    if needed_bytes > free_bytes:
        raise PreflightError(
            f"not enough space: {_size_text(needed_bytes)} needed, {_size_text(free_bytes)} free",
            where=str(folder.parent),
            fix="free some, or choose an output on another disk",
        )
    folders = {str(above) for name in names for above in PurePosixPath(name).parents}
    needed = len(names) + len(folders)
    if status.f_files and needed > status.f_favail:  # a file system without a table of inodes says 0 of 0
        raise PreflightError(
            f"not enough inodes: {needed} files and folders needed, {status.f_favail} free",
            where=str(folder.parent),
            fix="remove files, or choose an output on another disk",
        )
    for name in names:
        longest = max(name.split("/"), key=lambda part: len(os.fsencode(part)))
        if len(os.fsencode(longest)) > status.f_namemax:
            raise PreflightError(
                f"the file name {longest!r} has {len(os.fsencode(longest))} bytes, {status.f_namemax} are allowed here",
                where=str(folder.parent),
                fix="rename the file in the source, or choose an output on another disk",
            )


def _size_text(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 10**9 else f"{size_bytes / 1e6:.1f} MB"
