"""The files of a kernel package, and the digest over them; imports neither the package nor torch.

Links, special files, byte code and names that lead elsewhere are refused: what was hashed has to be what runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from kconvert.errors import KernelRefusedError, RecipeError
from kconvert.names import printable, unsafe_name_reason

__all__ = ["BUILD_FOLDER", "HOMES", "digest_of_files", "list_package_files", "variant_of"]

BUILD_FOLDER = "build"
"""Holds the variants of a package that is built."""

HOMES = ("__init__.py", "layers.py")
"""Files that may hold the classes."""

_MAX_FILES = 10_000
_BYTE_CODE = (".pyc", ".pyo")


def list_package_files(
    directory: Path, package_id: str, *, linked: Path | None = None, variants: Collection[str] | None = None
) -> list[str]:
    """The files of a package, sorted; of one that is built only those in `build/`, of every variant.

    Args:
        directory: the package's folder.
        package_id: as in the recipe.
        linked: the one folder that links may lead into: the blobs of a Hub cache.
        variants: only these of `build/`, and nothing else; None is all.

    Raises:
        RecipeError: no such folder, or an empty one.
        KernelRefusedError: it holds links, byte code or special files.
    """
    if not directory.is_dir():
        raise RecipeError(
            f"kernel package {package_id!r}: {directory} is no folder", fix="give the path of the package's folder"
        )
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if variants is not None and variant_of(f"{name}/") not in variants:
            continue
        if unsafe_name_reason(name):
            raise KernelRefusedError(
                f"kernel package {package_id!r} holds a file named {printable(name)!r}", fix="rename it"
            )
        if path.is_symlink() and not (linked is not None and path.resolve().parent == linked):
            raise KernelRefusedError(
                f"kernel package {package_id!r} holds a link, {name}", fix="replace it by the file"
            )
        if path.is_dir():
            continue
        if not path.is_file():
            raise KernelRefusedError(
                f"kernel package {package_id!r} holds {name}, which is no regular file", fix="remove it"
            )
        if path.suffix in _BYTE_CODE:
            raise KernelRefusedError(
                f"kernel package {package_id!r} holds byte code, {name}",
                fix="remove every __pycache__ folder and .pyc file",
            )
        names.append(name)
        if len(names) > _MAX_FILES:
            raise KernelRefusedError(
                f"kernel package {package_id!r} has over {_MAX_FILES} files", fix="name the package's own folder"
            )
    if not names:
        raise RecipeError(
            f"kernel package {package_id!r}: {directory} is empty", fix="give the path of the package's folder"
        )
    is_built = not any(name in names for name in HOMES) and any(map(variant_of, names))
    return [name for name in names if variant_of(name)] if is_built else names


def variant_of(name: str) -> str | None:
    """The build variant that a file of a package belongs to."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == BUILD_FOLDER else None


def digest_of_files(directory: Path, names: Sequence[str]) -> str:
    """sha256 over every file's name, size and content, in name order."""
    total = hashlib.sha256()
    for name in names:
        data = (directory / name).read_bytes()
        total.update(f"{len(name.encode())}:{name}:{len(data)}:".encode())
        total.update(data)
    return f"sha256:{total.hexdigest()}"
