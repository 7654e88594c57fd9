"""A plan as plain data for people and for `--json`."""

from __future__ import annotations

from typing import Any

from kconvert.plan.model import Plan

__all__ = ["explain_plan"]


def explain_plan(plan: Plan) -> dict[str, Any]:
    """Entries with the trace of every pattern, tensors with their parts, output files and sums."""
    return {
        "model_type": plan.model_type,
        "architecture": plan.architecture,
        "patches": [
            {
                "where": entry.where,
                "kind": entry.kind,
                "layout": entry.layout.name,
                "kernels": list(entry.kernels),
                "modules": sum(claim.entry == entry.number for claim in plan.claims),
                "patterns": [
                    {"class": trace.class_name, "path": trace.pattern, "matched": list(trace.matched)}
                    for trace in plan.traces
                    if trace.entry == entry.number
                ],
            }
            for entry in plan.entries
        ],
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
        "files": [
            {"name": shard.name, "tensors": len(shard.steps), "bytes": sum(step.size_bytes for step in shard.steps)}
            for shard in plan.shards
        ],
        "bytes_copied": plan.bytes_copied,
        "bytes_transformed": plan.bytes_transformed,
    }
