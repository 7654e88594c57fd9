"""Which files beside the weights go into the output, and which do not.

Every file is copied but weights: those that were read, and any name a stock loader would take for weights or
an index, because an output must never start with weights that are not its own.  kconvert's own names at the
top, version control, download caches and byte code stay behind.  A link is followed where it stays inside the
directory or ends in the blobs of the Hub cache that holds it; any other link is omitted, with a warning.
Nothing is opened, and model code is listed but never imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kconvert.checkpoint.reader import Checkpoint, hub_repo_dirs
from kconvert.errors import CheckpointError
from kconvert.names import CONFIG_NAME, is_own_name, is_stock_weight_name, printable, unsafe_name_reason

__all__ = ["Omitted", "Sidecar", "Sidecars", "list_sidecars"]

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
    """Both lists are sorted by name."""

    copied: tuple[Sidecar, ...]
    omitted: tuple[Omitted, ...]
    warnings: tuple[str, ...]


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
    return Sidecars(copied, omitted, (*warnings, *_copy_warnings(copied)))


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
    blobs = tuple(os.path.realpath(repo / "blobs") for repo in hub_repo_dirs(model_dir))
    root = os.path.realpath(model_dir)
    todo = [_Folder("", model_dir, frozenset({root}), linked=False)]
    while todo:
        folder = todo.pop()
        for base in _entries(folder.path):
            name, path = folder.prefix + base, folder.path / base
            refusal = _refusal(path, folder, root, blobs)
            if refusal is not None:
                shown = printable(name)
                yield _Found(shown, path, refusal[0], refusal[1])
            elif path.is_dir():
                chain = folder.real_chain | {os.path.realpath(path)}
                todo.append(_Folder(f"{name}/", path, chain, folder.linked or path.is_symlink()))
            else:
                yield _Found(name, path)


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror or error}", where=str(path)) from error


def _refusal(path: Path, folder: _Folder, root: str, blobs: tuple[str, ...]) -> tuple[str, bool] | None:
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


def _link_refusal(path: Path, folder: _Folder, root: str, blobs: tuple[str, ...], *, is_dir: bool) -> str | None:
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
