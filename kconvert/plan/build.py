"""The planner: from headers and resolved entries to steps and output shards.  Pure; opens no file.

The result depends on the set of tensors, not on how they are spread over shards or in which order files
are read.  Everything that can be wrong with names, shapes and dtypes is refused here, before a byte is
written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kconvert.checkpoint import DTYPE_BITS, FLOAT_DTYPES, Checkpoint, SourceTensor
from kconvert.errors import CheckpointError, RecipeError
from kconvert.names import SINGLE_NAME, natural_key, parents, shard_name
from kconvert.plan.match import check_conflicts, match_entries, module_paths_of
from kconvert.plan.model import Claim, Entry, OutputShard, Part, Plan, Step
from kconvert.transforms import BoundRule, Op, ShapeError, is_taken, target_shape

__all__ = ["build_plan"]


def build_plan(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    *,
    module_names: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
    check_claims: Callable[[Sequence[Claim]], None] | None = None,
) -> Plan:
    """Plan the conversion of `checkpoint`.

    Args:
        checkpoint: the opened source.
        entries: resolved patch entries.
        module_names: file name to module name of every source tensor; the same names if left out.
        classes: module path to class name of the model, where it was built; without it the module paths are
            those that the tensor names imply, and classes are not checked.
        check_claims: called with the claims before any is bound to tensors, to look at the modules themselves.

    Raises:
        RecipeError: patterns, classes or claims do not fit.
        CheckpointError: a group is incomplete, of mixed dtypes, or of shapes that do not join.
    """
    sources = _by_module_name(checkpoint, module_names)
    paths = module_paths_of(sources) if classes is None else tuple(classes)
    claims, traces = match_entries(entries, paths, classes)
    check_conflicts(entries, claims)
    if check_claims is not None:
        check_claims(claims)
    _check_quantization(checkpoint, entries)

    inside = _names_by_module(sources)
    steps, taken = [], set()
    for claim in claims:
        takes = entries[claim.entry].takes
        held = {name for path in claim.paths for name in inside.get(path, ()) if is_taken(name, path, takes)}
        names = sorted(held, key=natural_key)
        taken.update(names)
        for rule in _bind(entries[claim.entry], claim, names, checkpoint):
            steps.append(_step(entries[claim.entry], rule, sources, checkpoint))
    steps.extend(_copy_step(name, tensor) for name, tensor in sources.items() if name not in taken)
    _check_targets(steps)
    steps.sort(key=lambda step: natural_key(step.target))
    return Plan(
        model_type=checkpoint.model_type or "",
        architecture=checkpoint.architectures[0] if checkpoint.architectures else "",
        entries=tuple(entries),
        claims=claims,
        traces=traces,
        steps=tuple(steps),
        shards=_shards(steps, [file.name for file in checkpoint.files]),
    )


def _by_module_name(checkpoint: Checkpoint, module_names: Mapping[str, str] | None) -> dict[str, SourceTensor]:
    sources: dict[str, SourceTensor] = {}
    for file_name, tensor in checkpoint.tensors.items():
        name = module_names[file_name] if module_names is not None else file_name
        if name in sources:
            raise CheckpointError(
                f"tensors {sources[name].name!r} and {file_name!r} are both {name!r} in the model",
                where=str(checkpoint.model_dir),
                fix="remove one of them from the checkpoint",
            )
        sources[name] = tensor
    return sources


def _names_by_module(names: Iterable[str]) -> dict[str, list[str]]:
    inside: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for above in parents(name):
            inside[above].append(name)
    return inside


def _check_quantization(checkpoint: Checkpoint, entries: Sequence[Entry]) -> None:
    if checkpoint.quantization is None:
        return
    for entry in entries:
        if entry.changes_parameters:
            method = checkpoint.quantization.get("quant_method", "unknown method")
            raise CheckpointError(
                f"the checkpoint is quantised ({method}), and layout {entry.layout.name!r} ({entry.where}) repacks weights",
                where=str(checkpoint.model_dir),
                fix="start from the unquantised checkpoint, or use a recipe whose layouts keep the parameters",
            )


def _bind(entry: Entry, claim: Claim, names: Sequence[str], checkpoint: Checkpoint) -> tuple[BoundRule, ...]:
    """The entry's rules on a claim; what is wrong with the tensors is said of the checkpoint, else of the entry."""
    try:
        return entry.bind(claim.paths, names)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=str(checkpoint.model_dir), fix=error.fix) from error
    except RecipeError as error:
        raise RecipeError(error.what, where=entry.where, fix=error.fix) from error


def _part(name: str, tensor: SourceTensor, axis: int) -> Part:
    rows = tensor.shape[axis] if tensor.shape else 1
    return Part(name, tensor.name, tensor.file, tensor.dtype, rows, tensor.offset, tensor.size_bytes)


def _copy_step(name: str, tensor: SourceTensor) -> Step:
    return Step(name, tensor.dtype, tensor.shape, "copy", 0, None, (_part(name, tensor, 0),))


def _step(entry: Entry, rule: BoundRule, sources: Mapping[str, SourceTensor], checkpoint: Checkpoint) -> Step:
    tensors = [sources[name] for name in rule.sources]
    where = str(checkpoint.model_dir)
    listed = ", ".join(
        f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in zip(rule.sources, tensors, strict=True)
    )
    dtype = _target_dtype(entry, rule, tensors, where, listed)
    if rule.op is not Op.RENAME and rule.axis != 0:
        raise CheckpointError(
            f"{rule.target!r} joins along axis {rule.axis}", where=where, fix="only axis 0 can be written so far"
        )
    try:
        shape = target_shape(rule.op, rule.axis, [tensor.shape for tensor in tensors])
    except ShapeError as error:
        raise CheckpointError(
            f"{rule.target!r} cannot be made of {listed} ({error})",
            where=where,
            fix="check the checkpoint's config.json",
        ) from None
    parts = tuple(_part(name, tensor, rule.axis) for name, tensor in zip(rule.sources, tensors, strict=True))
    return Step(rule.target, dtype, shape, rule.op.value, rule.axis, entry.number, parts)


def _target_dtype(entry: Entry, rule: BoundRule, tensors: Sequence[SourceTensor], where: str, listed: str) -> str:
    """The dtype of a rule's target: the entry's for what is joined, where it names one, else that of the sources."""
    found = {tensor.dtype for tensor in tensors}
    if entry.dtype is not None and rule.op is not Op.RENAME:
        for name, tensor in zip(rule.sources, tensors, strict=True):
            if tensor.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{name!r} is {tensor.dtype}, which cannot be stored as {entry.dtype} (the dtype of {entry.where})",
                    where=where,
                    fix=f"only {', '.join(FLOAT_DTYPES)} are converted: leave these layers out of the path",
                )
        return entry.dtype
    if len(found) > 1:
        named = "name the dtype to store it in with `dtype:` in the patch entry"
        raise CheckpointError(
            f"{rule.target!r} would join different dtypes: {listed}",
            where=where,
            fix=f"{named if found <= {*FLOAT_DTYPES} else 'store the group in one dtype'}, "
            "or leave these layers out of the path",
        )
    return tensors[0].dtype


def _check_targets(steps: Sequence[Step]) -> None:
    seen: dict[str, Step] = {}
    for step in steps:
        if step.target in seen:
            raise CheckpointError(
                f"{step.target!r} would be written twice, from {seen[step.target].parts[0].source!r} "
                f"and {step.parts[0].source!r}",
                fix="the checkpoint already holds a tensor of that name: was it packed before?",
            )
        seen[step.target] = step


def _shards(steps: Sequence[Step], files: Sequence[str]) -> tuple[OutputShard, ...]:
    """The source's sharding: a tensor goes where its first part lies; shards left empty are dropped.

    Within a shard wide items come first, because a safetensors file has no holes and a loader wants tensors
    aligned to their item size.
    """
    by_file: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_file[step.parts[0].file].append(step)
    kept = [file for file in files if by_file[file]]
    shards = []
    for number, file in enumerate(kept, start=1):
        name = SINGLE_NAME if len(kept) == 1 else shard_name(number, len(kept))
        ordered = sorted(by_file[file], key=lambda step: (-DTYPE_BITS[step.dtype], natural_key(step.target)))
        shards.append(OutputShard(name, tuple(ordered)))
    return tuple(shards)
