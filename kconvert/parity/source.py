"""Whether a directory is the source that a manifest names: its files, and its config.

Names, sizes and header digests are in the manifest, so a source of another model or shape is told before anything
is loaded.  Values are not looked at: that the same headers hold other weights shows when the two are compared.
"""

from __future__ import annotations

from pathlib import Path

from kconvert.checkpoint import MAX_CONFIG_BYTES, Checkpoint, open_checkpoint, read_bounded
from kconvert.errors import CheckpointError, UsageError, VerificationError
from kconvert.manifest import Manifest, sha256_digest
from kconvert.names import CONFIG_NAME

__all__ = ["check_config", "check_source"]

_FIX = "give the checkpoint that was converted"


def check_config(directory: Path, manifest: Manifest) -> None:
    """Refuse a converted directory whose config.json was changed: the model that loads there is another one.

    Raises:
        VerificationError: its digest is not the manifest's.
    """
    data = read_bounded(directory / CONFIG_NAME, MAX_CONFIG_BYTES)
    if sha256_digest(data) != manifest.config_digest:
        raise VerificationError(
            "config.json was changed after the conversion, so the model is no longer the one that was converted",
            where=str(directory),
            fix="take config.json from the source again, or change it there and convert again",
        )


def check_source(source: Path, manifest: Manifest) -> Checkpoint:
    """Compare the headers of a checkpoint with those that the manifest has, and give it.

    Raises:
        CheckpointError: the source is damaged, or is not the one.
        UsageError: the converted directory was saved from a model, so its values are no source's.
    """
    if manifest.written_by != "apply":
        raise UsageError(
            f"the converted directory was written by {manifest.written_by}, its values need not be those of a source",
            fix="leave --source out",
        )
    checkpoint = open_checkpoint(source)
    expected = {file.name: file for file in manifest.source_files}
    found = {file.name: file for file in checkpoint.files}
    where = str(source)
    if found.keys() != expected.keys():
        raise CheckpointError(
            f"not the source: its weights are in {_listed(found)}, converted were {_listed(expected)}",
            where=where,
            fix=_FIX,
        )
    for name, file in found.items():
        record = expected[name]
        if file.size_bytes != record.size_bytes:
            raise CheckpointError(
                f"not the source: {name} has {file.size_bytes} bytes, converted were {record.size_bytes}",
                where=where,
                fix=_FIX,
            )
        if sha256_digest(file.header.raw) != record.header_digest:
            raise CheckpointError(
                f"not the source: {name} has other tensors than the file that was converted", where=where, fix=_FIX
            )
    if sha256_digest(checkpoint.config_bytes) != manifest.config_digest:
        raise CheckpointError(
            "not the source: its config.json is not the one that was converted", where=where, fix=_FIX
        )
    return checkpoint


def _listed(names: object) -> str:
    listed = sorted(map(str, names))  # type: ignore[call-overload]
    return ", ".join(listed[:2]) + (f" and {len(listed) - 2} more" if len(listed) > 2 else "")
