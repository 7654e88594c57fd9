"""The KernelConfig of a converted directory, as Python and as JSON.

The kernels that are built into kconvert are in a package that `export_package` wrote, which is on the Hub or in a
folder; those of Hub packages are named as they were resolved at the conversion, by commit.  A folder is given by the
environment variable LOCAL_KERNELS of the `kernels` library: KernelConfig's own `use_local_kernel` crashes on a kernel
with a layout in transformers 5.22.  The default mapping is not inherited, so that no other kernel comes in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from kconvert import __version__
from kconvert.errors import KernelRefusedError, UsageError
from kconvert.export.entries import Entry
from kconvert.export.layers import kernel_name
from kconvert.export.package import Export, is_on_hub, package_files, plan_export
from kconvert.names import VARIANT

__all__ = ["KernelConfigText", "PackagePlace", "kernel_config"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class PackagePlace:
    """Where the exported package is.

    Attributes:
        package: `owner/repo` on the Hub, or a folder.
        version: on the Hub: the version.
        revision: on the Hub: a branch, tag or commit in place of a version.
    """

    package: str
    version: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.revision is not None:
            raise UsageError("a version and a revision", fix="give one of them")
        if self.folder is not None and (self.version is not None or self.revision is not None):
            raise UsageError(f"{self.package} is a folder, which has no versions", fix="leave out version and revision")
        if self.folder is None and _REPOSITORY.fullmatch(self.package) is None:
            raise UsageError(f"{self.package!r} is no folder and no owner/repo", fix="export the package first")

    @property
    def folder(self) -> Path | None:
        """The folder, or None for a repository."""
        path = Path(self.package)
        return path if path.is_dir() else None


@dataclass(frozen=True)
class KernelConfigText:
    """A KernelConfig to be written down.

    Attributes:
        directory: the converted directory.
        model_class: the class that loads it.
        items: the key of each entry, its kernel as `owner/repo:Class`, and the metadata that goes with it.
        local_kernels: repository name to folder.
    """

    directory: Path
    model_class: str
    items: tuple[tuple[Entry, str, dict[str, Any]], ...]
    local_kernels: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As data: `kernel_mapping` is a list, for keys of a KernelConfig can be no keys of JSON."""
        return {
            "transformers": transformers.__version__,
            "converted": str(self.directory),
            "model_class": self.model_class,
            "variant": VARIANT,
            "local_kernels": self.local_kernels,
            "inherit_mapping": False,
            "kernel_mapping": [
                {**_json_key(entry), "kernel": kernel, **metadata} for entry, kernel, metadata in self.items
            ],
        }

    def to_python(self) -> str:
        """As a program that makes `kernel_config`; how to load with it stands in a comment."""
        where, more = (
            _quoted(str(self.directory)),
            f'variant="{VARIANT}", use_kernels=True, kernel_config=kernel_config',
        )
        lines = [
            f"# Written by kconvert {__version__} for transformers {transformers.__version__}, which takes no CPU here:",
            f'#   {self.model_class}.from_pretrained({where}, device_map="cuda", {more})',
            "# A KernelConfig is for one load: transformers changes it.",
            *(["import os", ""] if self.local_kernels else []),
            "from transformers import KernelConfig",
            "",
        ]
        if self.local_kernels:
            places = ":".join(f"{name}={folder}" for name, folder in self.local_kernels.items())
            lines += [
                'others = os.environ.get("LOCAL_KERNELS")',
                f'os.environ["LOCAL_KERNELS"] = ":".join(filter(None, [{_quoted(places)}, others]))',
            ]
        lines += ["kernel_config = KernelConfig(", "    kernel_mapping={"]
        for entry, kernel, metadata in self.items:
            values = ", ".join(f"{_quoted(key)}: {_quoted(value)}" for key, value in metadata.items())
            lines.append(f"        {_python_key(entry)}: ({_quoted(kernel)}, {{{values}}}),")
        return "\n".join([*lines, "    },", "    inherit_mapping=False,", ")"])


def _quoted(value: Any) -> str:
    """A value as Python, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _json_key(entry: Entry) -> dict[str, Any]:
    if not isinstance(entry.key, str):
        return {"fuse": [list(pair) for pair in entry.key]}
    return {"replace" if entry.layer is None else "layer": entry.key}


def _python_key(entry: Entry) -> str:
    if isinstance(entry.key, str):
        return _quoted(entry.key)
    pairs = [f"({_quoted(name)}, {_quoted(path)})" for name, path in entry.key]
    return f"({', '.join(pairs)}{',' if len(pairs) == 1 else ''})"


def kernel_config(
    directory: Path, package: PackagePlace | None = None, *, trust_remote_code: bool = False
) -> KernelConfigText:
    """The KernelConfig that loads a converted directory.

    Args:
        directory: what `kconvert apply` wrote.
        package: where the package is that `export_package` made of it; needed for kernels that are in no Hub package.
        trust_remote_code: write that packages of owners are trusted whom the Hub does not list as trusted.

    Raises:
        KernelRefusedError: a patch cannot be expressed, no package is given for a kernel that needs it, or the folder
            holds a package that was not made of this directory.
        UsageError: a package is given and no kernel needs it.
    """
    export = plan_export(directory)
    exported = [entry for entry in export.entries if not is_on_hub(entry)]
    place, local = _place(export, exported, package)
    items = []
    for entry in export.entries:
        record = entry.package
        if record is not None and record.commit is not None:
            repository = record.package_id.partition(":")[0]
            where: dict[str, Any] = {"revision": record.commit}
        else:
            repository, where = place
        metadata = {**where, "trust_remote_code": trust_remote_code}
        items.append((entry, f"{repository}:{kernel_name(entry)}", metadata))
    cls = type(export.stock.model).__name__
    return KernelConfigText(directory.resolve(), cls, tuple(items), local)


def _place(
    export: Export, exported: list[Entry], package: PackagePlace | None
) -> tuple[tuple[str, dict[str, Any]], dict[str, str]]:
    """Repository and metadata of the exported package, and LOCAL_KERNELS for a folder."""
    directory = export.stock.directory
    if package is None:
        if exported:
            listed = ", ".join(sorted({entry.layout for entry in exported}))
            raise KernelRefusedError(
                f"no Hub package holds the kernels of {listed}",
                where=str(directory),
                fix=f"run `kconvert export-package {directory} DIR`, then give --package DIR, or owner/repo after an upload",
            )
        return ("", {}), {}
    if not exported:
        what = "every kernel of it is in a Hub package" if export.entries else "no module of it is patched"
        raise UsageError(what, where=str(directory), fix="leave out --package")
    folder = package.folder
    if folder is None:
        if package.revision is not None:
            return (package.package, {"revision": package.revision}), {}
        return (package.package, {"version": package.version or 1}), {}
    _check_folder(export, folder)
    path = str(folder.resolve())
    if ":" in path:
        raise UsageError(f"LOCAL_KERNELS takes no path with a colon: {path}", fix="put the package elsewhere")
    name = f"local/{export.stock.model_type}-kconvert"
    # a revision is not looked up, a version would be; the folder stands in for any
    return (name, {"revision": "main"}), {name: path}


def _check_folder(export: Export, folder: Path) -> None:
    """The package has to be what would be exported now, in every variant."""
    wanted = package_files(export)
    variants = [path.parent for path in sorted((folder / "build").glob("*/metadata.json"))]
    if not variants or any(_files_of(variant) != wanted for variant in variants):
        raise KernelRefusedError(
            "holds no package that was made of this converted directory with this kconvert and transformers",
            where=str(folder),
            fix=f"run `kconvert export-package {export.stock.directory} DIR`",
        )


def _files_of(variant: Path) -> dict[str, bytes]:
    """What is in a build variant beside its metadata, and what Python leaves there."""
    found = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name != "metadata.json" and path.parent.name != "__pycache__"
    }
