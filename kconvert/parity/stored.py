"""What a converted directory stores, and whether its files are those that the manifest names.

Everything is told from headers, the index and digests; of tensors only names, dtypes and shapes are looked at.  Whatever is
wrong is a line in the result and stops nothing, so that one run finds all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kconvert import __version__
from kconvert.checkpoint import (
    MAX_CONFIG_BYTES,
    FileStamp,
    Header,
    TensorEntry,
    build_header,
    build_index,
    open_sidecar,
    parse_json_object,
    read_bounded,
    read_header,
    read_index,
    sidecar_roots,
)
from kconvert.checkpoint.header import file_problem
from kconvert.errors import CheckpointError, KconvertError, RecipeError
from kconvert.files import blob_folders
from kconvert.manifest import Manifest, PackageRecord, TensorRecord, sha256_digest
from kconvert.names import CONFIG_NAME, INDEX_NAME, KERNELS_DIR, MANIFEST_NAME, SINGLE_NAME, VARIANT, unsafe_name_reason
from kconvert.package_files import digest_of_files, list_package_files
from kconvert.parity.results import Failure
from kconvert.parity.source import check_config

__all__ = ["Stored", "StoredTensor", "file_failure", "package_failure", "read_stored"]


class StoredTensor(NamedTuple):
    """A tensor that is stored as its record says: the name of its file, and where in it."""

    record: TensorRecord
    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class Stored:
    """The tensors that are as the manifest says, in the order of the files, and what is not.

    `stamps` are those of the weight files that could be read.
    """

    tensors: tuple[StoredTensor, ...]
    stamps: Mapping[str, FileStamp]
    failures: tuple[Failure, ...]


def read_stored(directory: Path, manifest: Manifest) -> Stored:
    """Read the headers of a converted directory and compare them with its manifest.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    failures = [*_manifest_failures(directory, manifest), *_form_failures(directory, manifest)]
    found: dict[str, tuple[str, TensorEntry]] = {}
    stamps = {}
    for name in manifest.weight_files:
        path = directory / name
        try:
            header, stamps[name] = _read(path)
        except CheckpointError as error:
            failures.append(Failure(name, error.what))
            continue
        entries = header.tensors
        if _is_of_this_version(manifest) and not _is_as_written(header, manifest):
            failures.append(Failure(name, "its header is not the one that was written"))
        for entry in entries:
            if entry.name in found:
                failures.append(Failure(entry.name, f"is in two files, {found[entry.name][0]} and {name}"))
            found.setdefault(entry.name, (name, entry))
    failures += _tensor_failures(manifest, found, all_read=len(stamps) == len(manifest.weight_files))
    if manifest.weight_files != (SINGLE_NAME,) and len(stamps) == len(manifest.weight_files):
        failures += _index_failures(directory, manifest, found)
    failures += _config_failures(directory, manifest)
    records = manifest.tensors_by_target()
    tensors = tuple(
        StoredTensor(records[name], file, entry)
        for name, (file, entry) in found.items()
        if name in records and (entry.dtype, entry.shape) == (records[name].dtype, records[name].shape)
    )
    return Stored(tensors, stamps, tuple(failures))


def _read(path: Path) -> tuple[Header, FileStamp]:
    """The header of a weight file, and the stamp that the file had before."""
    problem = file_problem(path)
    if problem is not None:
        raise CheckpointError(problem, where=str(path))
    stamp = FileStamp.of(path)
    return read_header(path), stamp


def _is_of_this_version(manifest: Manifest) -> bool:
    """Whether header and index are written in the very form that they would have today."""
    return manifest.written_by == "apply" and manifest.kconvert_version == __version__


def _is_as_written(header: Header, manifest: Manifest) -> bool:
    """Whether a header is the one that is made for these tensors, or that of a source file that did not change."""
    tensors = [(entry.name, entry.dtype, entry.shape, entry.size_bytes) for entry in header.tensors]
    if header.prefix == build_header(tensors, {"format": "pt"}):
        return True
    return sha256_digest(header.raw) in {file.header_digest for file in manifest.source_files}


def _manifest_failures(directory: Path, manifest: Manifest) -> Iterator[Failure]:
    """The manifest's own digest is over what it says; whether anything else was put into the file is told here."""
    if (directory / MANIFEST_NAME).read_bytes() != manifest.to_bytes():
        yield Failure(MANIFEST_NAME, "is not in the form in which it was written: it was edited")


def _form_failures(directory: Path, manifest: Manifest) -> Iterator[Failure]:
    """Files that a loader would take for part of the model, and that are not of this conversion."""
    allowed = {*manifest.weight_files, *(() if manifest.weight_files == (SINGLE_NAME,) else (INDEX_NAME,))}
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror or error}", where=str(directory)) from error
    for path in paths:
        is_weights = path.name.startswith(f"model.{VARIANT}") and path.name.endswith(".safetensors")
        if (is_weights or path.name == INDEX_NAME) and path.name not in allowed:
            yield Failure(path.name, "is not of this conversion: the manifest does not name it")
        if path.name == "adapter_config.json":  # from_pretrained would follow it to another base model
            yield Failure(path.name, "is here, and kconvert did not write it")


def _tensor_failures(
    manifest: Manifest, found: Mapping[str, tuple[str, TensorEntry]], *, all_read: bool
) -> Iterator[Failure]:
    """Tensors that are missing, more than there should be, or other ones; none is missing where a file cannot be read."""
    for record in manifest.tensors:
        if record.target not in found:
            if all_read:
                yield Failure(record.target, "is in the manifest, and in no weight file")
            continue
        file, entry = found[record.target]
        stored, wanted = (f"{each.dtype} {list(each.shape)}" for each in (entry, record))
        if stored != wanted:
            yield Failure(record.target, f"is {stored} in {file}, and {wanted} in the manifest")
    known = manifest.tensors_by_target()
    for name, (file, _) in found.items():
        if name not in known:
            yield Failure(name, f"is in {file}, and not in the manifest")


def _index_failures(
    directory: Path, manifest: Manifest, found: Mapping[str, tuple[str, TensorEntry]]
) -> Iterator[Failure]:
    try:
        index = read_index(directory / INDEX_NAME)
    except CheckpointError as error:
        yield Failure(INDEX_NAME, error.what)
        return
    files, says = {name: file for name, (file, _) in found.items()}, index.weight_map
    wrong = sorted(name for name in files.keys() | says.keys() if files.get(name) != says.get(name))
    total, size = index.metadata.get("total_size"), sum(entry.size_bytes for _, entry in found.values())
    if wrong:
        more = f" ({len(wrong)} tensors are wrong)" if len(wrong) > 1 else ""
        places = f"has {wrong[0]!r} in {says.get(wrong[0], 'no file')}, and it is in {files.get(wrong[0], 'none')}"
        yield Failure(INDEX_NAME, places + more)
    elif total != size:
        yield Failure(INDEX_NAME, f"its total_size is {total!r}, the tensors have {size} bytes")
    elif _is_of_this_version(manifest) and index.raw != build_index(files, size):
        yield Failure(INDEX_NAME, "is not the one that was written")


def _config_failures(directory: Path, manifest: Manifest) -> Iterator[Failure]:
    path = directory / CONFIG_NAME
    try:
        check_config(directory, manifest)
        config = parse_json_object(read_bounded(path, MAX_CONFIG_BYTES), what="it", where=str(path))
    except KconvertError as error:
        yield Failure(CONFIG_NAME, error.what)
        return
    architectures = config.get("architectures") or [""]
    for what, found, wanted in (
        ("model_type", config.get("model_type", ""), manifest.model_type),
        ("architecture", architectures[0] if isinstance(architectures, list) else "", manifest.architecture),
    ):
        if found != wanted:
            yield Failure(CONFIG_NAME, f"its {what} is {found!r}, and {wanted!r} in the manifest")


def file_failure(directory: Path, name: str, digest: str | None, *, of_source: bool = False) -> Failure | None:
    """What is wrong with a file that has to have this digest, or None; `of_source` for the file it was copied from."""
    path = directory / name
    problem = file_problem(path)
    if problem is None:
        try:
            with open_sidecar(path, sidecar_roots(directory)) as file:
                found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            if found != digest:
                problem = "has another digest than the manifest says: it was changed after the conversion"
        except CheckpointError as error:
            problem = error.what
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
    return None if problem is None else Failure(name, f"in the source it {problem}" if of_source else problem)


def package_failure(directory: Path, package: PackageRecord) -> Failure | None:
    """What is wrong with the copy of a kernel package, or None; nothing of it is imported."""
    folder = package.digest.removeprefix("sha256:")
    where = f"{KERNELS_DIR}/{folder}"
    if unsafe_name_reason(folder) or "/" in folder:
        return Failure(KERNELS_DIR, f"digest {package.digest!r} of {package.package_id!r} is malformed")
    path = directory / KERNELS_DIR / folder
    try:
        found = digest_of_files(
            path, list_package_files(path, package.package_id, linked=next(iter(blob_folders(directory)), None))
        )
    except RecipeError:  # no such folder, or an empty one
        return Failure(where, f"kernel package {package.package_id!r} is missing")
    except KconvertError as error:
        return Failure(where, error.what)
    except OSError as error:
        return Failure(where, f"cannot be read ({error.strerror or error})")
    if found != package.digest:
        return Failure(where, f"kernel package {package.package_id!r} was changed after the conversion")
    return None
