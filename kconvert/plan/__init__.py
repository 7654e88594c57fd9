"""The planner: which tensors become which, decided from headers alone."""

from kconvert.plan.build import build_plan
from kconvert.plan.explain import explain_files, explain_patches, explain_plan
from kconvert.plan.match import check_conflicts, match_entries, module_paths_of
from kconvert.plan.model import (
    COPY,
    Claim,
    Entry,
    Made,
    ModuleTensor,
    OutputShard,
    Pair,
    Part,
    PatternTrace,
    Plan,
    Step,
)
from kconvert.plan.survey import (
    Join,
    Packable,
    PackState,
    StoredTensor,
    TensorGroup,
    find_packable,
    group_tensors,
    size_by_dtype,
)

__all__ = [
    "COPY",
    "Claim",
    "Entry",
    "Join",
    "Made",
    "ModuleTensor",
    "OutputShard",
    "PackState",
    "Packable",
    "Pair",
    "Part",
    "PatternTrace",
    "Plan",
    "Step",
    "StoredTensor",
    "TensorGroup",
    "build_plan",
    "check_conflicts",
    "explain_files",
    "explain_patches",
    "explain_plan",
    "find_packable",
    "group_tensors",
    "match_entries",
    "module_paths_of",
    "size_by_dtype",
]
