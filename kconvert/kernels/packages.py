"""Two-class kernel packages from a folder: digest, private copy, trust, import.

A package holds `{Name}` (a forward) and `{Name}Layout` (parameters and `conversion_mapping`) in one module,
`layers.py`, or in its `__init__.py`.  Code is imported only from a private copy that was hashed after it was
copied, and only after this machine was told to trust it; what is about to run is printed first.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from kconvert.errors import KernelRefusedError, RecipeError, TrustError
from kconvert.names import printable, unsafe_name_reason

__all__ = ["PackageClasses", "PackageCopy", "check_trust", "copy_package", "import_package"]

_MAX_FILES = 10_000
_BYTE_CODE = (".pyc", ".pyo")


@dataclass(frozen=True)
class PackageCopy:
    """A private copy of a package: where it is, its files (sorted, posix), and the digest over all of them."""

    package_id: str
    path: Path
    files: tuple[str, ...]
    digest: str

    @property
    def folder(self) -> str:
        """The folder name that holds the package in a converted directory: the digest without its prefix."""
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class PackageClasses:
    """The two classes of a package."""

    kernel: type[Any]
    layout: type[nn.Module]


def _listed_files(directory: Path, package_id: str) -> list[str]:
    if not directory.is_dir():
        raise RecipeError(
            f"kernel package {package_id!r}: {directory} is no folder", fix="give the path of the package's folder"
        )
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if unsafe_name_reason(name):
            raise KernelRefusedError(
                f"kernel package {package_id!r} holds a file named {printable(name)!r}", fix="rename it"
            )
        if path.is_symlink():
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
    return names


def _digest(directory: Path, names: list[str]) -> str:
    """sha256 over every file's name, size and content, in name order."""
    total = hashlib.sha256()
    for name in names:
        data = (directory / name).read_bytes()
        total.update(f"{len(name.encode())}:{name}:{len(data)}:".encode())
        total.update(data)
    return f"sha256:{total.hexdigest()}"


def copy_package(directory: Path, package_id: str) -> PackageCopy:
    """Copy a package where nobody else can write, and hash the copy.

    Raises:
        RecipeError: no such folder, or an empty one.
        KernelRefusedError: it holds links, byte code or special files.
    """
    names = _listed_files(directory, package_id)
    private = Path(tempfile.mkdtemp(prefix="kconvert-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    copy = private / "package"
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, copy / name)
    return PackageCopy(package_id, copy, tuple(names), _digest(copy, names))


def check_trust(
    package: PackageCopy,
    *,
    trust_remote_code: bool,
    advice: str,
    trust_kernels: Mapping[str, str] | None = None,
    commit: str | None = None,
) -> None:
    """Refuse code that this machine was not told to trust; else say what is about to be imported.

    Args:
        package: the private copy.
        trust_remote_code: trust every package of this conversion or load.
        advice: how trust is given here, for the error; `{trust}` stands for the `trust_kernels` value that would do.
        trust_kernels: package ID to digest (with or without `sha256:`); trusts just these.
        commit: resolved commit of a Hub package.

    Raises:
        TrustError: not trusted, or trusted with another digest.
    """
    wanted = (trust_kernels or {}).get(package.package_id)
    if wanted is not None and wanted.removeprefix("sha256:") != package.folder:
        raise TrustError(
            f"kernel package {package.package_id!r} has digest {package.digest}, trusted is {wanted}",
            fix="look at what changed before you trust the new digest",
        )
    if wanted is None and not trust_remote_code:
        raise TrustError(
            f"kernel package {package.package_id!r} would run code from this folder",
            fix=f"read it, then {advice.format(trust={package.package_id: package.digest})}",
        )
    origin = ", ".join(filter(None, (commit and f"commit {commit}", package.digest)))
    sys.stderr.write(f"kconvert: importing kernel package {package.package_id} ({origin})\n")


def _import(package: PackageCopy) -> ModuleType:
    name = f"kconvert_package_{package.folder[:24]}"
    if name in sys.modules:
        return sys.modules[name]
    init, layers = package.path / "__init__.py", package.path / "layers.py"
    if not (init.is_file() or layers.is_file()):
        inner = sorted(Path(file).parent.as_posix() for file in package.files if Path(file).name == "layers.py")
        raise RecipeError(
            f"kernel package {package.package_id!r} has neither __init__.py nor layers.py",
            fix=f"name the folder that has them, {inner[0]}" if inner else "put both classes into layers.py",
        )
    # a package in any case, so that layers.py can import its neighbours
    spec = ModuleSpec(name, None, is_package=True)
    if init.is_file():
        spec = cast("ModuleSpec", spec_from_file_location(name, init, submodule_search_locations=[str(package.path)]))
    else:
        spec.submodule_search_locations = [str(package.path)]
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
        if layers.is_file():
            import_module(f"{name}.layers")
    except BaseException as error:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise KernelRefusedError(
            f"kernel package {package.package_id!r} does not import: {type(error).__name__}: {error}",
            fix="install what it needs, or fix the package",
        ) from error
    return module


def import_package(package: PackageCopy, class_name: str) -> PackageClasses:
    """Import a trusted copy and find its two classes.

    Raises:
        KernelRefusedError: the import fails.
        RecipeError: a class is missing or of the wrong kind; both have to be in one module.
    """
    module = _import(package)
    home = sys.modules.get(f"{module.__name__}.layers", module)
    kernel, layout = getattr(home, class_name, None), getattr(home, f"{class_name}Layout", None)
    where = f"kernel package {package.package_id!r}"
    if not isinstance(kernel, type):
        raise RecipeError(f"{where} has no class {class_name}", fix=f"define class {class_name} in layers.py")
    if not (isinstance(layout, type) and issubclass(layout, nn.Module)):
        raise RecipeError(
            f"{where} has no torch.nn.Module class {class_name}Layout beside {class_name}",
            fix=f"define class {class_name}Layout(nn.Module) in the same module",
        )
    if "forward" not in kernel.__dict__:
        raise RecipeError(f"{where}: class {class_name} has no forward", fix="the kernel class holds the forward")
    return PackageClasses(kernel, layout)
