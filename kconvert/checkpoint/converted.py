"""A converted directory, decided from headers alone: its manifest, and weight files that hold what it says.

Every file that the manifest names is read, and no other.  Refused: a file that is missing or damaged, and a tensor that is
absent, stray, in two files, or of another dtype or shape.  Tensor data is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kconvert.checkpoint.reader import SourceFile, SourceTensor, collect_tensors, open_file
from kconvert.errors import CheckpointError, ManifestError
from kconvert.garbage import collector_stopped
from kconvert.manifest import Manifest, load_manifest
from kconvert.names import natural_key

__all__ = ["Converted", "open_converted"]

_FIX = "convert the checkpoint again"


@dataclass(frozen=True)
class Converted:
    """What `apply` or a packed save wrote.  `files` and `tensors` are in natural order."""

    directory: Path
    manifest: Manifest
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]

    @property
    def is_saved(self) -> bool:
        """Whether a model was saved here: the values are its own then, and no source's."""
        return self.manifest.written_by != "apply"


@collector_stopped()
def open_converted(directory: Path) -> Converted:
    """Read the manifest and the headers of a converted directory; reads no tensor data.

    Raises:
        ManifestError: the manifest is damaged, or the weight files are not those that it describes.
        CheckpointError: a weight file is damaged or missing.
    """
    manifest = load_manifest(directory)
    try:
        files = tuple(open_file(directory, name) for name in sorted(manifest.weight_files, key=natural_key))
        tensors = collect_tensors({file.name: file.header for file in files}, where=str(directory))
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where, fix=_FIX) from error
    found = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
    expected = {record.target: f"{record.dtype} {list(record.shape)}" for record in manifest.tensors}
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        texts = [known.get(wrong[0], "absent") for known in (found, expected)]
        raise ManifestError(
            f"tensor {wrong[0]!r} is {texts[0]} in the files and {texts[1]} in the manifest ({len(wrong)} differ)",
            where=str(directory),
            fix=_FIX,
        )
    return Converted(directory, manifest, files, tensors)
