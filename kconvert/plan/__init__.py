"""The planner: which tensors become which, decided from headers alone."""

from kconvert.plan.build import build_plan
from kconvert.plan.explain import explain_plan
from kconvert.plan.match import check_conflicts, match_entries, module_paths_of
from kconvert.plan.model import Claim, Entry, OutputShard, Pair, Part, PatternTrace, Plan, Step

__all__ = [
    "Claim",
    "Entry",
    "OutputShard",
    "Pair",
    "Part",
    "PatternTrace",
    "Plan",
    "Step",
    "build_plan",
    "check_conflicts",
    "explain_plan",
    "match_entries",
    "module_paths_of",
]
