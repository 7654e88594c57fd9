"""Kernel packages from a folder: digest, private copy, trust, import.

A package holds `{Name}` (a forward) and `{Name}Layout` (parameters and `conversion_mapping`) in one module,
`layers.py`, or in its `__init__.py`; without `{Name}Layout` the forward is for the stock parameters.  A built package
holds that once per variant, in `build/<variant>/`.  Code is imported only from a private copy that was hashed after
it was copied, and only after this machine was told to trust it; what is about to run is printed first.
"""

from __future__ import annotations

import atexit
import json
import re
import shlex
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

from kconvert.errors import KernelRefusedError, RecipeError, TrustError, one_line
from kconvert.kernels.select import ANY_DEVICE
from kconvert.kernels.stateless import check_stateless
from kconvert.kernels.variants import Variant, choose_variant, has_kernels_library
from kconvert.package_files import BUILD_FOLDER, HOMES, digest_of_files, list_package_files, variant_of

__all__ = ["PackageClasses", "PackageCopy", "check_trust", "copy_package", "import_package"]


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
    """The classes of a package.

    Attributes:
        kernel: holds the forward.
        layout: holds the parameters; None where the stock ones stay.
        device: the device type that the build variant is for.
        unavailable: why the kernel cannot run on this machine, where it has no variant for it.
    """

    kernel: type[Any]
    layout: type[nn.Module] | None
    device: str = ANY_DEVICE
    unavailable: str | None = None


def copy_package(
    directory: Path, package_id: str, *, linked: Path | None = None, variants: frozenset[str] | None = None
) -> PackageCopy:
    """Copy a package where nobody else can write, and hash the copy.

    Of a built package only `build/` is copied, with every variant.

    Args:
        directory: the package's folder.
        package_id: as in the recipe.
        linked: the one folder that links may lead into: the blobs of a Hub cache.
        variants: only these of `build/`, and nothing else; None is all.

    Raises:
        RecipeError: no such folder, or an empty one.
        KernelRefusedError: it holds links, byte code or special files.
    """
    names = list_package_files(directory, package_id, linked=linked, variants=variants)
    private = Path(tempfile.mkdtemp(prefix="kconvert-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    copy = private / "package"
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, copy / name)
    return PackageCopy(package_id, copy, tuple(names), digest_of_files(copy, names))


def check_trust(
    package: PackageCopy,
    *,
    source: Path,
    trust_remote_code: bool,
    advice: str,
    trust_kernels: Mapping[str, str] | None = None,
    commit: str | None = None,
) -> None:
    """Refuse code that this machine was not told to trust; else say what is about to be imported.

    Args:
        package: the private copy.
        source: where the copy was made from, for people to read.
        trust_remote_code: trust every package of this conversion or load.
        advice: how trust is given here, for the error; `{trust}` stands for the `trust_kernels` value that would do,
            `{option}` for that of the command line.
        trust_kernels: package ID to digest (with or without `sha256:`); trusts just these.
        commit: resolved commit of a Hub package.

    Raises:
        TrustError: not trusted, or trusted with another digest.
    """
    wanted = (trust_kernels or {}).get(package.package_id)
    option = shlex.quote(f"{package.package_id}={package.digest}")
    if wanted is not None and wanted.removeprefix("sha256:") != package.folder:
        raise TrustError(
            f"kernel package {package.package_id!r} has digest {package.digest}, trusted is {wanted}",
            fix="look at what changed before you trust the new digest",
        )
    if wanted is None and not trust_remote_code:
        raise TrustError(
            f"kernel package {package.package_id!r} would run code from {source}",
            fix=f"read it, then {advice.format(trust={package.package_id: package.digest}, option=option)}",
        )
    origin = ", ".join(filter(None, (commit and f"commit {commit}", package.digest)))
    line = f"kconvert: importing kernel package {package.package_id} ({origin})"
    sys.stderr.write(f"{line if line.isprintable() else ascii(line)}\n")  # a manifest may say anything


def _variant(package: PackageCopy) -> Variant | None:
    """The build variant for this machine; None for a package that is not built.

    Raises:
        KernelRefusedError: it is built, and not for this machine.
    """
    names = {name for file in package.files if (name := variant_of(file)) is not None}
    if not names or any(home in package.files for home in HOMES):
        return None
    chosen = choose_variant(names)
    if chosen is None:
        raise KernelRefusedError(
            f"kernel package {package.package_id!r} has no build variant for this machine, only {', '.join(sorted(names))}",
            fix="use a version that is built for it"
            if has_kernels_library()
            else "install what reads compiled variants: pip install 'kconvert[hub]'",
        )
    return chosen


def _home(package: PackageCopy, variant: Variant | None) -> Path:
    """The folder with `__init__.py` or `layers.py`; older builds have it inside the variant, under the kernel's name."""
    if variant is None:
        return package.path
    folder = package.path / BUILD_FOLDER / variant.name
    inner = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").is_file()]
    return inner[0] if len(inner) == 1 and not any((folder / name).is_file() for name in HOMES) else folder


def _check_dependencies(package: PackageCopy, variant: Variant | None) -> None:
    """Refuse a package that needs other packages of the Hub: these are not brought along."""
    folder = package.path if variant is None else package.path / BUILD_FOLDER / variant.name
    try:
        metadata = json.loads((folder / "metadata.json").read_bytes())
        needs = [item["repo-id"] for item in metadata.get("kernel-depends", ())]
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise KernelRefusedError(
            f"kernel package {package.package_id!r}: metadata.json cannot be read ({one_line(error)})",
            fix="build the package again",
        ) from None
    if needs:
        raise KernelRefusedError(
            f"kernel package {package.package_id!r} needs other kernel packages ({', '.join(map(str, needs))}), "
            "which a converted checkpoint does not hold",
            fix="use a package that stands by itself",
        )


def _import(package: PackageCopy, home: Path, variant: Variant | None) -> ModuleType:
    name = f"kconvert_package_{package.folder[:24]}"
    if variant is not None:
        name += f"_{re.sub('[^A-Za-z0-9]', '_', variant.name)}"
    if name in sys.modules:
        return sys.modules[name]
    init, layers = home / "__init__.py", home / "layers.py"
    if not (init.is_file() or layers.is_file()):
        inner = sorted(Path(file).parent.as_posix() for file in package.files if Path(file).name == "layers.py")
        raise RecipeError(
            f"kernel package {package.package_id!r} has neither __init__.py nor layers.py",
            fix=f"name the folder that has them, {inner[0]}" if inner else "put both classes into layers.py",
        )
    # a package in any case, so that layers.py can import its neighbours
    spec = ModuleSpec(name, None, is_package=True)
    if init.is_file():
        spec = cast("ModuleSpec", spec_from_file_location(name, init, submodule_search_locations=[str(home)]))
    else:
        spec.submodule_search_locations = [str(home)]
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


def _check_no_other_layout(home: ModuleType, class_name: str, where: str) -> None:
    """Refuse a layout under another name: without it the kernel would be taken for one that has none.

    Raises:
        RecipeError: naming the class.
    """
    for name, value in vars(home).items():
        is_other = isinstance(value, type) and value.__module__ == home.__name__ and "conversion_mapping" in vars(value)
        if is_other and not (name.endswith("Layout") and hasattr(home, name.removesuffix("Layout"))):
            raise RecipeError(
                f"{where} has no class {class_name}Layout, but {name}, which has a conversion_mapping",
                fix=f"call it {class_name}Layout",
            )


def import_package(package: PackageCopy, class_name: str, *, needs_layout: bool = False) -> PackageClasses:
    """Import a trusted copy and find its classes.

    Args:
        package: the private copy.
        class_name: the class with the forward.
        needs_layout: whether `{class_name}Layout` has to be there, as for a fusion.

    Raises:
        KernelRefusedError: the import fails, or no build variant is for this machine.
        RecipeError: a class is missing or of the wrong kind; both have to be in one module.
    """
    variant = _variant(package)
    _check_dependencies(package, variant)
    module = _import(package, _home(package, variant), variant)
    home = sys.modules.get(f"{module.__name__}.layers", module)
    kernel, layout = getattr(home, class_name, None), getattr(home, f"{class_name}Layout", None)
    where = f"kernel package {package.package_id!r}"
    if not isinstance(kernel, type):
        raise RecipeError(f"{where} has no class {class_name}", fix=f"define class {class_name} in layers.py")
    own = class_name.removesuffix("Layout")
    if layout is None and own != class_name and isinstance(getattr(home, own, None), type):
        raise RecipeError(f"{where}: {class_name} is the layout of {own}", fix=f"name the kernel, {own}")
    if layout is None:
        _check_no_other_layout(home, class_name, where)
    if layout is None and not needs_layout:
        check_stateless(kernel, where)
    elif not (isinstance(layout, type) and issubclass(layout, nn.Module)):
        raise RecipeError(
            f"{where} has no torch.nn.Module class {class_name}Layout beside {class_name}",
            fix=f"define class {class_name}Layout(nn.Module) in the same module",
        )
    if "forward" not in kernel.__dict__:
        raise RecipeError(f"{where}: class {class_name} has no forward", fix="the kernel class holds the forward")
    return PackageClasses(
        kernel,
        layout,
        device=variant.device if variant is not None else ANY_DEVICE,
        unavailable=variant.unavailable if variant is not None else None,
    )
