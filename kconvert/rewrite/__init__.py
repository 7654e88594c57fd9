"""Writes the bytes of a converted checkpoint: extents of source files, whole or not at all.

`job` and `gather` say what to write, `execute` runs it, `output` owns the directory and the swap, `copying`, `tasks` and
`workers` move the bytes, `cast` turns float values into another dtype where an extent asks for it, `sources`
and `durable` open and make the files.  Nothing here knows a tensor.
"""

from __future__ import annotations

from kconvert.rewrite.cast import Cast
from kconvert.rewrite.execute import RewriteResult, rewrite
from kconvert.rewrite.gather import Gather, GatherPiece
from kconvert.rewrite.job import LOCK_NAME, Computed, Copy, Extent, Job, OutputFile
from kconvert.rewrite.output import check_output

__all__ = [
    "LOCK_NAME",
    "Cast",
    "Computed",
    "Copy",
    "Extent",
    "Gather",
    "GatherPiece",
    "Job",
    "OutputFile",
    "RewriteResult",
    "check_output",
    "rewrite",
]
