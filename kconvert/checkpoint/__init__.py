"""safetensors checkpoints on disk: headers, indexes, the files of a model directory and what lies beside them.

Reads headers and JSON only, and tensor data only to compare two tensors; imports neither torch nor transformers.
"""

from __future__ import annotations

from kconvert.checkpoint.compare import have_equal_bytes
from kconvert.checkpoint.header import (
    DTYPE_BITS,
    FLOAT_DTYPES,
    Header,
    TensorEntry,
    build_header,
    parse_json_object,
    read_header,
)
from kconvert.checkpoint.index import Index, build_index, read_bounded, read_index
from kconvert.checkpoint.reader import (
    MAX_CONFIG_BYTES,
    Checkpoint,
    SourceFile,
    SourceTensor,
    is_inside_hub_cache,
    open_checkpoint,
    quantization_of,
)
from kconvert.checkpoint.sidecars import Omitted, Sidecar, Sidecars, list_sidecars
from kconvert.checkpoint.stamp import FileStamp, check_stamp

__all__ = [
    "DTYPE_BITS",
    "FLOAT_DTYPES",
    "MAX_CONFIG_BYTES",
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
    "have_equal_bytes",
    "is_inside_hub_cache",
    "list_sidecars",
    "open_checkpoint",
    "parse_json_object",
    "quantization_of",
    "read_bounded",
    "read_header",
    "read_index",
]
