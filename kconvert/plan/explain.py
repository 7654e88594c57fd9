"""A plan as plain data for people and for `--json`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kconvert.plan.model import Plan

__all__ = ["explain_files", "explain_patches", "explain_plan"]


def explain_plan(plan: Plan) -> dict[str, Any]:
    """Entries with the trace of every pattern, tensors with their parts, output files and sums."""
    return {
        "model_type": plan.model_type,
        "architecture": plan.architecture,
        "patches": explain_patches(plan),
        "tensors": [
            {
                "target": step.target,
                "op": step.op,
                "dtype": step.dtype,
                "shape": list(step.shape),
                "patch": step.entry,
                "parts": [{"source": part.source, "shape": list(part.shape)} for part in step.parts],
                "origins": [
                    {"name": origin.name, "file": origin.file, "dtype": origin.dtype, "shape": list(origin.shape)}
                    for origin in step.origins
                ],
            }
            for step in plan.steps
        ],
        "files": explain_files(plan),
        "bytes_copied": plan.bytes_copied,
        "bytes_transformed": plan.bytes_transformed,
    }


def explain_patches(plan: Plan) -> list[dict[str, Any]]:
    """Every entry with what each of its patterns matched."""
    modules = Counter(claim.entry for claim in plan.claims)
    return [
        {
            "where": entry.where,
            "kind": entry.kind,
            "layout": entry.layout.name,
            "kernels": list(entry.kernels),
            "modules": modules[entry.number],
            "patterns": [
                {"class": trace.class_name, "path": trace.pattern, "matched": list(trace.matched)}
                for trace in plan.traces
                if trace.entry == entry.number
            ],
        }
        for entry in plan.entries
    ]


def explain_files(plan: Plan) -> list[dict[str, Any]]:
    """Every output file; `same_as` is the source file that it equals byte for byte, or None."""
    return [
        {
            "name": shard.name,
            "tensors": len(shard.steps),
            "bytes": sum(step.size_bytes for step in shard.steps),
            "same_as": shard.same_as,
        }
        for shard in plan.shards
    ]
