"""Which files beside the weights go into the output, and which do not.

Every file is copied but weights: those that were read, and any name a stock loader would take for weights or
an index, because an output must never start with weights that are not its own.  kconvert's own names at the
top, version control, download caches and byte code stay behind.  A link is followed where it stays inside the
directory or ends in the blobs of the Hub cache that holds it; any other link is omitted, with a warning.
Nothing is opened while listing, and model code is listed but never imported.  `open_sidecar` opens a listed file, and
refuses it where a link has been put in its way meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

from kconvert.checkpoint.reader import Checkpoint
from kconvert.errors import CheckpointError
from kconvert.files import blob_folders
from kconvert.names import CONFIG_NAME, is_own_name, is_stock_weight_name, printable, unsafe_name_reason

__all__ = ["Omitted", "Sidecar", "Sidecars", "list_sidecars", "open_sidecar", "sidecar_roots"]

_SKIPPED_FOLDERS = {
    ".git": "version control",
    ".cache": "a download cache",
    ".huggingface": "a download cache",
    "__pycache__": "byte code",
}
_STOCK_REASON = "a stock loader could take it for weights or an index of this folder"


@dataclass(frozen=True)
class Sidecar:
    """A file to copy; `name` is relative to the model directory, with `/`."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Omitted:
    """A file or folder that stays behind."""

    name: str
    reason: str


@dataclass(frozen=True)
class Sidecars:
    """Both lists are sorted by name; `roots` are the real paths of the folders that copied files lie below."""

    copied: tuple[Sidecar, ...]
    omitted: tuple[Omitted, ...]
    warnings: tuple[str, ...]
    roots: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Found:
    """One file, or one thing that is left out; `warn` where a user may have expected it in the output."""

    name: str
    path: Path
    reason: str | None = None
    warn: bool = False


@dataclass(frozen=True)
class _Folder:
    prefix: str
    path: Path
    real_chain: frozenset[str]
    linked: bool


def list_sidecars(checkpoint: Checkpoint) -> Sidecars:
    """Sort every file of the model directory into copied and omitted; the weights that were read are in neither.

    Raises:
        CheckpointError: a folder cannot be listed, or config.json is a link that must not be followed.
    """
    used = {file.name for file in checkpoint.files} | {checkpoint.index_name}
    weights = {os.path.realpath(file.path) for file in checkpoint.files}
    found = sorted(
        (_without_weights(item, weights) for item in _walk(checkpoint.model_dir) if item.name not in used),
        key=lambda item: item.name,
    )
    omitted = tuple(Omitted(item.name, item.reason) for item in found if item.reason)
    if any(item.name == CONFIG_NAME for item in omitted):
        reason = next(item.reason for item in omitted if item.name == CONFIG_NAME)
        raise CheckpointError(reason, where=str(checkpoint.model_dir / CONFIG_NAME), fix="put a real file there")
    copied = tuple(Sidecar(item.name, item.path, _size(item.path)) for item in found if not item.reason)
    warnings = [f"{item.name!r} is not copied: {item.reason}" for item in found if item.reason and item.warn]
    return Sidecars(copied, omitted, (*warnings, *_copy_warnings(copied)), sidecar_roots(checkpoint.model_dir))


def open_sidecar(path: Path, roots: tuple[str, ...]) -> BufferedReader:
    """Open a regular file that lies below one of `roots` once all links are followed.

    What was opened is looked at, and not the path once more: between the two a link could be put there.

    Args:
        path: as `list_sidecars` gave it.
        roots: those of the `Sidecars`, or `sidecar_roots`.

    Raises:
        CheckpointError: it cannot be opened, is no regular file any more, or lies elsewhere by now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting: it may be a named pipe by now
    except OSError as error:
        raise CheckpointError(f"cannot be opened: {error.strerror or error}", where=str(path)) from error
    try:
        _check_opened(fd, path, roots)
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _check_opened(fd: int, path: Path, roots: tuple[str, ...]) -> None:
    is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    try:
        real = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # no /proc here
        real = os.path.realpath(path)
    if not is_regular or not any(_is_below(real, root) for root in roots):
        what = "lies outside the model directory" if is_regular else "is not a regular file"
        raise CheckpointError(
            f"{what}, though it was listed as a file inside",
            where=str(path),
            fix="leave the source alone, and start again",
        )


def sidecar_roots(model_dir: Path) -> tuple[str, ...]:
    """The real paths of the model directory, and of the blobs of the Hub caches that hold it."""
    return (os.path.realpath(model_dir), *map(str, blob_folders(model_dir)))


def _without_weights(item: _Found, weights: set[str]) -> _Found:
    if item.reason is None and os.path.realpath(item.path) in weights:
        return replace(item, reason="a second name of weights that were read", warn=True)
    return item


def _copy_warnings(copied: tuple[Sidecar, ...]) -> Iterator[str]:
    for sidecar in copied:
        if sidecar.name.lower().endswith(".safetensors"):
            yield f"{sidecar.name!r} is copied as it is: no index names it, and it is not a name of model weights"
    code = [sidecar.name for sidecar in copied if sidecar.name.lower().endswith(".py")]
    if code:
        listed = ", ".join(code[:3]) + (f" and {len(code) - 3} more" if len(code) > 3 else "")
        yield f"model code is copied ({listed}), but was not and will not be run by kconvert"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _walk(model_dir: Path) -> Iterator[_Found]:
    """Everything below `model_dir`, each folder once, and once more for each link to it that is followed."""
    root, *blobs = sidecar_roots(model_dir)
    todo = [_Folder("", model_dir, frozenset({root}), linked=False)]
    while todo:
        folder = todo.pop()
        names = _entries(folder.path)
        if folder.prefix and not names:
            yield _Found(folder.prefix.rstrip("/"), folder.path, "an empty folder")
        for base in names:
            name, path = folder.prefix + base, folder.path / base
            try:
                refusal = _refusal(path, folder, root, blobs)
                is_folder = refusal is None and path.is_dir()
            except OSError as error:  # its path is longer than the system takes, for one
                raise CheckpointError(f"cannot be looked at: {error.strerror or error}", where=str(path)) from error
            if refusal is not None:
                shown = printable(name)
                yield _Found(shown, path, refusal[0], refusal[1])
            elif is_folder:
                chain = folder.real_chain | {os.path.realpath(path)}
                todo.append(_Folder(f"{name}/", path, chain, folder.linked or path.is_symlink()))
            else:
                yield _Found(name, path)


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror or error}", where=str(path)) from error


def _refusal(path: Path, folder: _Folder, root: str, blobs: Sequence[str]) -> tuple[str, bool] | None:
    """Why an entry stays behind, and whether to warn; None for a file to copy or a folder to enter."""
    base, is_dir = path.name, path.is_dir()
    if base in _SKIPPED_FOLDERS:
        return _SKIPPED_FOLDERS[base], False
    if not folder.prefix and is_own_name(base):
        return "a name that kconvert writes itself; it is never brought along from a source", True
    unsafe = unsafe_name_reason(base)
    if unsafe:
        return f"its name is refused: {unsafe}", True
    if not is_dir and is_stock_weight_name(base):
        return _STOCK_REASON, base.lower().endswith(".safetensors")
    if path.is_symlink():
        reason = _link_refusal(path, folder, root, blobs, is_dir=is_dir)
        if reason:
            return reason, True
    if not is_dir and not path.is_file():
        return "not a regular file", True
    return None


def _link_refusal(path: Path, folder: _Folder, root: str, blobs: Sequence[str], *, is_dir: bool) -> str | None:
    """Why a link is not followed.  Real paths, because a link through a link must not leave the tree either."""
    real = os.path.realpath(path)
    if not Path(real).exists():
        return "a broken link"
    if not is_dir and any(_is_below(real, base) for base in blobs):
        return None
    if real != root and not _is_below(real, root):
        return "a link that leaves the model directory"
    if any(part in _SKIPPED_FOLDERS for part in Path(real).relative_to(root).parts):
        return "a link into a folder that is not copied"
    # One level of folder links: a tree of folders that link to each other would have endless paths.
    if is_dir and (folder.linked or real in folder.real_chain):
        return "a folder link inside a linked folder, or a loop"
    return None


def _is_below(path: str, base: str) -> bool:
    return path.startswith(base.rstrip(os.sep) + os.sep)
