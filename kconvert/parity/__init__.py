"""Proof that a converted directory holds the bytes of its source, and computes what it computes.

`verify` runs one function per level and gives a report; nothing here changes a model or a checkpoint.  Importing
this loads no torch: a level imports what it needs when it runs.
"""

from kconvert.parity.bytes_result import BytesLevel, Difference, How, TensorGroup
from kconvert.parity.report import ParityReport, write_report
from kconvert.parity.results import LogitsLevel, LogitsResult, ModuleResult, ModulesLevel, Result, Verdict, worst
from kconvert.parity.verify import LEVELS, needs_model, verify

__all__ = [
    "LEVELS",
    "BytesLevel",
    "Difference",
    "How",
    "LogitsLevel",
    "LogitsResult",
    "ModuleResult",
    "ModulesLevel",
    "ParityReport",
    "Result",
    "TensorGroup",
    "Verdict",
    "needs_model",
    "verify",
    "worst",
    "write_report",
]
