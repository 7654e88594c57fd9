"""safetensors checkpoints on disk: headers, indexes, the files of a model directory and what lies beside them.

Reads headers and JSON only, and tensor data only to compare two tensors; imports neither torch nor transformers.
"""

from __future__ import annotations

from kconvert.checkpoint.compare import have_equal_bytes
from kconvert.checkpoint.converted import Converted, open_converted
from kconvert.checkpoint.header import (
    DTYPE_BITS,
    FLOAT_DTYPES,
    Header,
    TensorEntry,
    build_header,
    parse_header,
    parse_json_object,
    read_header,
)
from kconvert.checkpoint.index import Index, build_index, parse_index, read_bounded, read_index
from kconvert.checkpoint.reader import (
    MAX_CONFIG_BYTES,
    Checkpoint,
    SourceFile,
    SourceTensor,
    check_index,
    collect_tensors,
    is_inside_hub_cache,
    open_checkpoint,
    quantization_of,
)
from kconvert.checkpoint.sidecars import Omitted, Sidecar, Sidecars, list_sidecars, open_sidecar, sidecar_roots
from kconvert.checkpoint.stamp import FileStamp, check_stamp

__all__ = [
    "DTYPE_BITS",
    "FLOAT_DTYPES",
    "MAX_CONFIG_BYTES",
    "Checkpoint",
    "Converted",
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
    "check_index",
    "check_stamp",
    "collect_tensors",
    "have_equal_bytes",
    "is_inside_hub_cache",
    "list_sidecars",
    "open_checkpoint",
    "open_converted",
    "open_sidecar",
    "parse_header",
    "parse_index",
    "parse_json_object",
    "quantization_of",
    "read_bounded",
    "read_header",
    "read_index",
    "sidecar_roots",
]
