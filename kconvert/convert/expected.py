"""What a conversion will take: room on the disk, files, and memory.

Sizes are those of `build_job` and `final_items`, without making either.  Only of the manifest of a very large checkpoint
a part is made, and the whole told from that.  Memory is an upper estimate of what the rewrite needs beside the
interpreter and its imports: nothing in it grows with the size of a tensor, unless it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from kconvert.checkpoint import build_index
from kconvert.convert.job import copies_of, header_of
from kconvert.convert.prepare import Prepared
from kconvert.names import SINGLE_NAME
from kconvert.plan import Plan, Step
from kconvert.rewrite.gather import BLOCK_BYTES
from kconvert.rewrite.reading import BUFFER_BYTES
from kconvert.rewrite.workers import default_workers

__all__ = ["Expected", "expect"]

_SAMPLE = 2000
"""The most records of tensors of which the size in the manifest is looked at."""

_FIXED_BYTES = 16 << 20
_TENSOR_BYTES = 3500
_HEADER_COPIES = 10
"""Measured on 300 to 330,000 tensors: what a plan, its job and its manifest take, per tensor and byte of header."""


@dataclass(frozen=True)
class Expected:
    """Bytes of all files, their number, and the most memory beside the interpreter's own, in bytes."""

    size_bytes: int
    num_files: int
    memory_bytes: int


def expect(prepared: Prepared, *, digests: bool = False) -> Expected:
    """What writing `prepared` will take; `digests` of its tensors in the manifest, or none.

    Raises:
        CheckpointError: a header would be larger than the format allows.
    """
    plan, opened = prepared.plan, prepared.opened
    headers = sum(len(header_of(shard, opened.checkpoint)) for shard in plan.shards)
    data = sum(step.size_bytes for step in plan.steps)
    copies = copies_of(opened)
    described = [len(opened.checkpoint.config_bytes), len(prepared.headers), _manifest_bytes(prepared, digests=digests)]
    if [shard.name for shard in plan.shards] != [SINGLE_NAME]:
        weight_map = {step.target: shard.name for shard in plan.shards for step in shard.steps}
        described.append(len(build_index(weight_map, data).encode()))
    return Expected(
        headers + data + sum(copy.size_bytes for copy in copies) + sum(described),
        len(plan.shards) + len(copies) + len(described),
        _memory_bytes(plan, len(opened.checkpoint.tensors), headers),
    )


def _manifest_bytes(prepared: Prepared, *, digests: bool) -> int:
    def size_of(steps: Iterable[int]) -> int:
        manifest = prepared.manifest_of(steps)
        if digests:
            manifest = replace(manifest, digests={tensor.target: "0" * 64 for tensor in manifest.tensors})
        return len(manifest.to_bytes())

    numbers = range(len(prepared.plan.steps))
    some = Random(0).sample(numbers, _SAMPLE) if len(numbers) > _SAMPLE else numbers
    rest = size_of(())
    return rest + (size_of(some) - rest) * len(numbers) // max(len(some), 1)


def _memory_bytes(plan: Plan, num_tensors: int, header_bytes: int) -> int:
    moved = any(piece.run_size < piece.size for step in plan.steps for piece in step.stored.pieces)
    per_worker = 4 * BLOCK_BYTES if moved else 4 * BUFFER_BYTES  # what is read, converted in two steps, and made
    described = num_tensors * _TENSOR_BYTES + _HEADER_COPIES * header_bytes
    return _FIXED_BYTES + described + default_workers() * max(per_worker, _computed_bytes(plan.steps))


def _computed_bytes(steps: Iterable[Step]) -> int:
    """The most that a tensor takes which is computed: it, and all that it is made of, at the same time."""
    computed = (step for step in steps if step.computed is not None)
    return max((step.size_bytes + sum(each.size_bytes for each in step.origins) for step in computed), default=0)
