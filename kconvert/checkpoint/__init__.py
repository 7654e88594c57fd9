"""safetensors checkpoints on disk: headers, indexes, the files of a model directory and what lies beside them.

Reads headers and JSON only, never tensor data, and imports neither torch nor transformers.
"""

from __future__ import annotations

from kconvert.checkpoint.header import DTYPE_BITS, Header, TensorEntry, build_header, read_header
from kconvert.checkpoint.index import Index, build_index, read_index
from kconvert.checkpoint.reader import Checkpoint, SourceFile, SourceTensor, is_inside_hub_cache, open_checkpoint
from kconvert.checkpoint.sidecars import Omitted, Sidecar, Sidecars, list_sidecars
from kconvert.checkpoint.stamp import FileStamp, check_stamp

__all__ = [
    "DTYPE_BITS",
    "Checkpoint",
    "FileStamp",
    "Header",
    "Index",
    "Omitted",
    "Sidecar",
    "Sidecars",
    "SourceFile",
    "SourceTensor",
    "TensorEntry",
    "build_header",
    "build_index",
    "check_stamp",
    "is_inside_hub_cache",
    "list_sidecars",
    "open_checkpoint",
    "read_header",
    "read_index",
]
