"""The planner: from headers and resolved entries to steps and output shards.  Pure; opens no file.

The result depends on the set of tensors, not on how they are spread over shards or in which order files
are read.  Everything that can be wrong with names, shapes and dtypes is refused here, before a byte is
written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kconvert.checkpoint import DTYPE_BITS, FLOAT_DTYPES, Checkpoint
from kconvert.errors import CheckpointError, RecipeError
from kconvert.names import SINGLE_NAME, natural_key, parents, shard_name
from kconvert.plan.match import check_conflicts, match_entries, module_paths_of
from kconvert.plan.model import COPY, Claim, Entry, Made, ModuleTensor, Origin, OutputShard, Part, Plan, Step
from kconvert.transforms import Arrangement, BoundRule, ShapeError, is_taken, runs_of, whole

__all__ = ["build_plan"]

Compute: TypeAlias = Callable[[Entry, BoundRule, Mapping[str, ModuleTensor]], Mapping[str, Made]]
"""(entry, rule, its sources) to what it computes, by full name."""

ShapeOf: TypeAlias = Callable[[str], tuple[int, ...] | None]
"""The shape of a tensor, by full name; None where it is not known."""


def build_plan(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    *,
    tensors: Iterable[ModuleTensor] | None = None,
    classes: Mapping[str, str] | None = None,
    check_claims: Callable[[Sequence[Claim]], None] | None = None,
    shapes_of: Callable[[Sequence[Claim]], ShapeOf] = lambda claims: lambda name: None,
    compute: Compute | None = None,
) -> Plan:
    """Plan the conversion of `checkpoint`.

    Args:
        checkpoint: the opened source.
        entries: resolved patch entries.
        tensors: the tensors of the stock model, out of the source's; those of the files themselves if left out.
        classes: module path to class name of the model, where it was built; without it the module paths are
            those that the tensor names imply, and classes are not checked.
        check_claims: called with the claims before any is bound to tensors, to look at the modules themselves.
        shapes_of: called with the claims, gives the shape that the packed model has for a tensor, or None; asked where a
            conversion mapping depends on it.
        compute: makes what a conversion mapping computes; None where there is no model to do it with.

    Raises:
        RecipeError: patterns, classes or claims do not fit.
        CheckpointError: a group is incomplete, of mixed dtypes, or of shapes that do not join.
    """
    if tensors is None:
        tensors = (ModuleTensor(name, whole(name, tensor.shape)) for name, tensor in checkpoint.tensors.items())
    sources = _by_name(checkpoint, tensors)
    paths = module_paths_of(sources) if classes is None else tuple(classes)
    claims, traces = match_entries(entries, paths, classes)
    check_conflicts(entries, claims)
    if check_claims is not None:
        check_claims(claims)
    _check_quantization(checkpoint, entries, sources.values())

    inside = _names_by_module(sources)
    steps, taken = [], set()
    shape_of = shapes_of(claims)
    for claim in claims:
        entry = entries[claim.entry]
        held = {name for path in claim.paths for name in inside.get(path, ()) if is_taken(name, path, entry.takes)}
        names = sorted(held, key=natural_key)
        taken.update(names)
        for rule in _bind(entry, claim, names, checkpoint):
            if rule.is_computed:
                steps += _computed_steps(entry, claim, rule, sources, checkpoint, compute)
            else:
                steps += _steps(entry, claim, rule, sources, checkpoint, shape_of)
    steps += [_copy_step(tensor, checkpoint) for name, tensor in sources.items() if name not in taken]
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


def _by_name(checkpoint: Checkpoint, tensors: Iterable[ModuleTensor]) -> dict[str, ModuleTensor]:
    sources: dict[str, ModuleTensor] = {}
    for tensor in tensors:
        if tensor.name in sources:
            one, two = sources[tensor.name].sources[0], tensor.sources[0]
            raise CheckpointError(
                f"tensors {one!r} and {two!r} are both {tensor.name!r} in the model",
                where=str(checkpoint.model_dir),
                fix="remove one of them from the checkpoint",
            )
        sources[tensor.name] = tensor
    return sources


def _names_by_module(names: Iterable[str]) -> dict[str, list[str]]:
    inside: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for above in parents(name):
            inside[above].append(name)
    return inside


def _check_quantization(checkpoint: Checkpoint, entries: Sequence[Entry], tensors: Iterable[ModuleTensor]) -> None:
    if checkpoint.quantization is None:
        return
    for tensor in tensors:
        if tensor.op != COPY:
            method = checkpoint.quantization.get("quant_method", "unknown method")
            raise CheckpointError(
                f"the checkpoint is quantised ({method}), and transformers joins or splits tensors into {tensor.name!r}",
                where=str(checkpoint.model_dir),
                fix="start from the unquantised checkpoint",
            )
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
        if entry.layout.package is not None:  # its mapping is in question before the checkpoint is
            held = ", ".join(name.removeprefix(f"{claim.paths[0]}.") for name in names[:6])
            raise CheckpointError(
                error.what,
                where=entry.where,
                fix="check the package's conversion_mapping against the names in the module: "
                f"{held}{', ...' if len(names) > 6 else ''}",
            ) from error
        raise CheckpointError(error.what, where=str(checkpoint.model_dir), fix=error.fix) from error
    except RecipeError as error:
        raise RecipeError(error.what, where=entry.where, fix=error.fix) from error


def _steps(
    entry: Entry,
    claim: Claim,
    rule: BoundRule,
    sources: Mapping[str, ModuleTensor],
    checkpoint: Checkpoint,
    shape_of: ShapeOf,
) -> list[Step]:
    """The targets of a rule, told twice: out of the stock model's tensors, and out of those of the files."""
    taken = {name: sources[name] for name in rule.sources}
    computed = next((tensor for tensor in taken.values() if tensor.computed is not None), None)
    if computed is not None:
        raise RecipeError(
            f"{computed.name!r} is made by {computed.op}, so it cannot be packed as well",
            where=entry.where,
            fix="leave these layers out of the path",
        )
    origins = [_origin(name, checkpoint) for tensor in taken.values() for name in tensor.stored.sources]
    listed = ", ".join(f"{origin.name} {origin.dtype} {list(origin.shape)}" for origin in origins[:4])
    listed += f" and {len(origins) - 4} more" if len(origins) > 4 else ""
    dtype = _target_dtype(rule.target, origins, checkpoint, None if rule.is_rename else entry)
    try:
        stored = rule.arrange({name: tensor.stored for name, tensor in taken.items()}, shape_of)
        made = rule.arrange({name: whole(name, tensor.stored.shape) for name, tensor in taken.items()}, shape_of)
    except ShapeError as error:
        what = f"{rule.target!r} cannot be made of {listed} ({error})"
        if entry.layout.package is not None:
            raise RecipeError(what, where=entry.where, fix="check the package's conversion_mapping") from None
        raise CheckpointError(what, where=str(checkpoint.model_dir), fix="check the checkpoint's config.json") from None
    _check_inside(entry, claim, rule, made)
    done = dict.fromkeys(tensor.op for tensor in taken.values() if tensor.op != COPY)
    op = ", ".join((*done, rule.label) if not (done and rule.is_rename) else done)
    return [
        _step(target, dtype, op, entry.number, made[target], sources, stored[target], checkpoint) for target in made
    ]


def _check_inside(entry: Entry, claim: Claim, rule: BoundRule, made: Iterable[str]) -> None:
    outside = [name for name in made if not name.startswith(f"{claim.paths[0]}.")]
    if outside:
        raise RecipeError(
            f"{rule.target!r} comes with {outside[0]!r}, outside the module {claim.paths[0]!r} where the layout sits",
            where=entry.where,
            fix="every target of the conversion mapping has to lie in the first module of the entry",
        )


def _computed_steps(
    entry: Entry,
    claim: Claim,
    rule: BoundRule,
    sources: Mapping[str, ModuleTensor],
    checkpoint: Checkpoint,
    compute: Compute | None,
) -> list[Step]:
    if compute is None:
        raise RecipeError(
            f"conversion op {rule.label} of {rule.target!r} needs the model",
            where=entry.where,
            fix="leave out --no-model-check",
        )
    taken = {name: sources[name] for name in rule.sources}
    made = compute(entry, rule, taken)
    _check_inside(entry, claim, rule, made)
    parts = tuple(Part(name, tensor.stored) for name, tensor in taken.items())
    origins = tuple(_origin(name, checkpoint) for tensor in taken.values() for name in tensor.stored.sources)
    return [
        Step(
            name,
            each.dtype,
            rule.label,
            entry.number,
            parts,
            Arrangement(each.shape, ()),
            origins,
            Arrangement(each.shape, ()),
            each,
        )
        for name, each in made.items()
    ]


def _copy_step(tensor: ModuleTensor, checkpoint: Checkpoint) -> Step:
    name, shape = tensor.name, tensor.stored.shape
    origins = [_origin(source, checkpoint) for source in tensor.sources]
    if tensor.computed is not None:
        part = Part(name, tensor.stored)
        dtype = tensor.computed.dtype
        return Step(
            name, dtype, tensor.op, None, (part,), tensor.stored, tuple(origins), tensor.stored, tensor.computed
        )
    dtype = _target_dtype(name, origins, checkpoint, None)
    return _step(name, dtype, tensor.op, None, whole(name, shape), {name: tensor}, tensor.stored, checkpoint)


def _step(
    target: str,
    dtype: str,
    op: str,
    entry: int | None,
    made: Arrangement,
    sources: Mapping[str, ModuleTensor],
    stored: Arrangement,
    checkpoint: Checkpoint,
) -> Step:
    parts = tuple(Part(name, sources[name].stored) for name in made.sources)
    step = Step(
        target, dtype, op, entry, parts, made, tuple(_origin(name, checkpoint) for name in stored.sources), stored
    )
    bits = DTYPE_BITS[dtype]
    if bits < 8 and any(start * bits % 8 for run in runs_of(stored.pieces) for start in (run[0], run[1], run[2])):
        raise CheckpointError(
            f"{target!r} is {dtype}, and its parts begin inside of a byte",
            where=str(checkpoint.model_dir),
            fix="leave these layers out of the path",
        )
    return step


def _origin(name: str, checkpoint: Checkpoint) -> Origin:
    tensor = checkpoint.tensors[name]
    return Origin(name, tensor.file, tensor.dtype, tensor.shape, tensor.offset, tensor.size_bytes)


def _target_dtype(target: str, origins: Sequence[Origin], checkpoint: Checkpoint, entry: Entry | None) -> str:
    """The dtype of a target: that of `entry`, which joins tensors, where it names one; else that of the origins."""
    found = {origin.dtype for origin in origins}
    where = str(checkpoint.model_dir)
    if entry is not None and entry.dtype is not None:
        for origin in origins:
            if origin.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{origin.name!r} is {origin.dtype}, which cannot be stored as {entry.dtype} "
                    f"(the dtype of {entry.where})",
                    where=where,
                    fix=f"only {', '.join(FLOAT_DTYPES)} are converted: leave these layers out of the path",
                )
        return entry.dtype
    if len(found) > 1:
        named = entry is not None and found <= {*FLOAT_DTYPES}
        examples = {origin.dtype: origin for origin in reversed(origins)}.values()
        listed = ", ".join(f"{origin.name} {origin.dtype} {list(origin.shape)}" for origin in reversed([*examples]))
        more = f" and {len(origins) - len(examples)} more" if len(origins) > len(examples) else ""
        raise CheckpointError(
            f"{target!r} would join different dtypes: {listed}{more}",
            where=where,
            fix="name the dtype to store it in with `dtype:` in the patch entry, or leave these layers out of the path"
            if named
            else "store the group in one dtype"
            + (", or leave these layers out of the path" if entry is not None else ""),
        )
    return found.pop()


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
        by_file[step.origins[0].file].append(step)
    kept = [file for file in files if by_file[file]]
    shards = []
    for number, file in enumerate(kept, start=1):
        name = SINGLE_NAME if len(kept) == 1 else shard_name(number, len(kept))
        ordered = sorted(by_file[file], key=lambda step: (-DTYPE_BITS[step.dtype], natural_key(step.target)))
        shards.append(OutputShard(name, tuple(ordered)))
    return tuple(shards)
