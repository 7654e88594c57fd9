"""Proof that a converted directory computes what its source computes.

`verify` runs one function per level and gives a report; nothing here changes a model or a checkpoint.  Importing
this loads no torch: a level imports what it needs when it runs.
"""

from kconvert.parity.report import ParityReport, write_report
from kconvert.parity.results import LogitsLevel, LogitsResult, ModuleResult, ModulesLevel, Result, Verdict, worst
from kconvert.parity.verify import LEVELS, verify

__all__ = [
    "LEVELS",
    "LogitsLevel",
    "LogitsResult",
    "ModuleResult",
    "ModulesLevel",
    "ParityReport",
    "Result",
    "Verdict",
    "verify",
    "worst",
    "write_report",
]
