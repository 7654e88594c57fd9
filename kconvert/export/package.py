"""`export_package`: the layouts and kernels of a converted directory as a package that `kernels` and KernelConfig load.

    DIR/build/torch-cpu/{__init__.py, layers.py, metadata.json}        and the same for torch-cuda and torch-npu

The forwards are plain torch, so the variants differ in metadata alone.  A kernel package from a folder, which the
conversion copied into the converted directory, goes in beside `layers.py`, after its digest was checked; its code is
not run.  Nothing is written where a patch cannot be expressed, or where DIR holds anything.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kconvert.errors import KernelRefusedError, OutputError, TrustError, UsageError
from kconvert.export.entries import Entry, Refusal
from kconvert.export.forwards import NotExportedError, stays_stock
from kconvert.export.layers import kernel_name, layers_source
from kconvert.export.routes import plan_routes
from kconvert.export.stock import Stock, load_stock, patchable_reason, read_names
from kconvert.kernels.packages import copy_package
from kconvert.manifest import PackageRecord
from kconvert.names import KERNELS_DIR, VARIANT

__all__ = ["Export", "ExportedPackage", "export_package", "is_on_hub", "package_files", "plan_export"]

_BACKENDS = {"torch-cpu": "cpu", "torch-cuda": "cuda", "torch-npu": "cann"}
_KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")


@dataclass(frozen=True)
class Export:
    """What of a converted directory goes where.

    Attributes:
        stock: the directory and its model.
        entries: the entries of the KernelConfig.
        layers: the text of `layers.py`; None where no kernel has to be exported.
        bundled: the packages that are copied in, by folder name.
    """

    stock: Stock
    entries: tuple[Entry, ...]
    layers: str | None
    bundled: dict[str, Path]


@dataclass(frozen=True)
class ExportedPackage:
    """A package that was written: its folder, its name and version, and its kernels' class names."""

    directory: Path
    name: str
    version: int
    kernels: tuple[str, ...]


def is_on_hub(entry: Entry) -> bool:
    """Whether the kernel of an entry is in a Hub package."""
    return entry.package is not None and entry.package.commit is not None


def plan_export(directory: Path) -> Export:
    """Look at a converted directory, and check that KernelConfig can express all of it.

    Raises:
        KernelRefusedError: it cannot; `details["refused"]` has every reason.
    """
    stock = load_stock(directory)
    names = {patch.layout.name for patch in stock.manifest.patches if patch.modules and patch.layout.package is None}
    stays = sorted(filter(stays_stock, names))
    if stays:
        warnings.warn(f"modules of layout {', '.join(stays)} are not exported: they run as in stock", stacklevel=3)
    routes = plan_routes(stock.manifest.patches, read_names(stock.model), passed_over=stays)
    refusals = list(routes.refusals)
    for entry in routes.entries:
        reason = None if entry.patched is None else patchable_reason(stock.model, entry.patched)
        if reason is not None:
            refusals.append(Refusal(entry.patches, entry.layout, reason))
    own = [entry for entry in routes.entries if entry.package is None]
    for entry in own:
        try:
            layers_source(stock, [entry])
        except NotExportedError as error:
            refusals.append(Refusal(entry.patches, entry.layout, str(error)))
    if refusals:
        raise _refused(refusals, directory)
    bundled = _bundled(stock, routes.entries)
    lines = [f"from .{folder}.layers import {names}" for folder, names in _bundled_classes(routes.entries)]
    text = layers_source(stock, own, more_imports=lines) if own or bundled else None
    return Export(stock, routes.entries, text, bundled)


def _refused(refusals: Sequence[Refusal], directory: Path) -> KernelRefusedError:
    first = refusals[0]
    more = f", and {len(refusals) - 1} more like it" if len(refusals) > 1 else ""
    return KernelRefusedError(
        f"KernelConfig cannot express {first}{more}",
        where=str(directory),
        fix="load it with kconvert.load_converted, or convert with a recipe that leaves this out",
        details={"refused": [str(refusal) for refusal in refusals]},
    )


def _bundled_classes(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Folder and class names of every kernel that is copied in."""
    return sorted(
        {
            (_bundle_name(entry.package), ", ".join(dict.fromkeys([entry.package.class_name, entry.layout])))
            for entry in entries
            if entry.package is not None and not is_on_hub(entry)
        }
    )


def _bundle_name(record: PackageRecord) -> str:
    return f"package_{record.digest.partition(':')[2][:12]}"


def _bundled(stock: Stock, entries: Sequence[Entry]) -> dict[str, Path]:
    found = {}
    for entry in entries:
        record = entry.package
        if record is None or is_on_hub(entry):
            continue
        digest = record.digest.partition(":")[2]
        copied = copy_package(stock.directory / KERNELS_DIR / digest, record.package_id)
        if copied.digest != record.digest:
            raise TrustError(
                f"kernel package {record.package_id!r} has changed since the conversion: {copied.digest} instead of "
                f"{record.digest}",
                where=str(stock.directory),
                fix="convert again from a package that you trust",
            )
        if "layers.py" not in copied.files:
            raise KernelRefusedError(
                f"kernel package {record.package_id!r} has no layers.py of its own, so it cannot be copied in",
                where=str(stock.directory),
                fix="publish it on the Hub, and name owner/repo in the recipe",
            )
        found[_bundle_name(record)] = copied.path
    return found


def export_package(directory: Path, output: Path, *, name: str | None = None, version: int = 1) -> ExportedPackage:
    """Write the package.

    Args:
        directory: what `kconvert apply` wrote.
        output: the folder to make; may be there if it is empty.
        name: the package's name, lower-case letters, digits and dashes; made of the model type if left out.
        version: the version that its metadata has.

    Raises:
        UsageError: a name that `kernels` does not take, or a version below 1.
        OutputError: something is in `output`.
        KernelRefusedError: a patch cannot be expressed, or no kernel of the directory has to be exported.
    """
    if version < 1:
        raise UsageError(f"version {version}", fix="versions begin at 1")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise OutputError("is there already", where=str(output), fix="name another folder, or remove it")
    export = plan_export(directory)
    if export.layers is None:
        raise KernelRefusedError(
            "no kernel of it is built into kconvert",
            where=str(directory),
            fix="`kconvert export-kernel-config` needs no package here"
            if export.entries
            else f'no module is patched: plain from_pretrained(..., variant="{VARIANT}") loads it',
        )
    made = name or f"{export.stock.model_type.replace('_', '-').lower()}-kconvert"
    if _KERNEL_NAME.fullmatch(made) is None:
        raise UsageError(
            f"package name {made!r}", fix="a name is lower-case letters, digits and dashes, like my-kernels"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    files = package_files(export)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for variant, backend in _BACKENDS.items():
            _write_variant(partial / "build" / variant, files, made, version, backend)
        partial.chmod(0o755)
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    kernels = tuple(sorted({kernel_name(entry) for entry in export.entries if not is_on_hub(entry)}))
    return ExportedPackage(output, made, version, kernels)


def package_files(export: Export) -> dict[str, bytes]:
    """The files of a build variant, without its metadata: name to content."""
    files = {
        "__init__.py": b'from . import layers\n\n__all__ = ["layers"]\n',
        "layers.py": (export.layers or "").encode(),
    }
    for inner, source in export.bundled.items():
        files[f"{inner}/__init__.py"] = b""
        for path in sorted(source.rglob("*")):
            if path.is_file():
                files[f"{inner}/{path.relative_to(source).as_posix()}"] = path.read_bytes()
    return files


def _write_variant(folder: Path, files: dict[str, bytes], name: str, version: int, backend: str) -> None:
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    # two packages in one process must not share an ID: it becomes a module name
    identity = hashlib.sha256(f"{name} {version} {backend} ".encode() + b"".join(files.values())).hexdigest()[:12]
    metadata = {
        "id": f"_{name.replace('-', '_')}_{backend}_{identity}",
        "name": name,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
