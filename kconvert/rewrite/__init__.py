"""Writes the bytes of a converted checkpoint: extents of source files, whole or not at all.

`job` and `gather` say what to write, and `extents` makes that of arrangements; `execute` runs it, after `preflight`;
`output` owns the directory and the swap, `journal` says how far it got; `copying`, `tasks` and `workers` move the bytes,
`cast` turns float values into another dtype where an extent asks for it; `sources`, `reading` and `durable` open, read and
make the files.  Nothing here knows what a tensor is for.
"""

from __future__ import annotations

from kconvert.rewrite.cast import Cast
from kconvert.rewrite.execute import REUSES, Reuse, RewriteResult, Writing, rewrite
from kconvert.rewrite.extents import Place, extents_of
from kconvert.rewrite.gather import Gather, GatherPiece
from kconvert.rewrite.job import Computed, Copy, Digested, Extent, Job, OutputFile, Part
from kconvert.rewrite.output import OtherRunError, check_output
from kconvert.rewrite.reading import OpenFile, Reader

__all__ = [
    "REUSES",
    "Cast",
    "Computed",
    "Copy",
    "Digested",
    "Extent",
    "Gather",
    "GatherPiece",
    "Job",
    "OpenFile",
    "OtherRunError",
    "OutputFile",
    "Part",
    "Place",
    "Reader",
    "Reuse",
    "RewriteResult",
    "Writing",
    "check_output",
    "extents_of",
    "rewrite",
]
