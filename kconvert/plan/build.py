"""The planner: from headers and resolved entries to steps and output shards.  Pure; opens no file.

The result depends on the set of tensors, not on how they are spread over shards or in which order files
are read.  Everything that can be wrong with names, shapes and dtypes is refused here, before a byte is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kconvert.checkpoint import DTYPE_BITS, FLOAT_DTYPES, Checkpoint, SourceTensor
from kconvert.errors import CheckpointError, RecipeError
from kconvert.garbage import collector_stopped
from kconvert.names import modules_above, natural_key
from kconvert.plan.match import check_conflicts, match_entries, module_paths_of
from kconvert.plan.model import COPY, Claim, Entry, Made, ModuleTensor, Part, Plan, Step
from kconvert.plan.sharding import output_shards
from kconvert.transforms import Arrangement, BoundRule, Piece, ShapeError, cuts_bytes, is_taken, whole

__all__ = ["build_plan"]

Compute: TypeAlias = Callable[[Entry, BoundRule, Mapping[str, ModuleTensor]], Mapping[str, Made]]
"""(entry, rule, its sources) to what it computes, by full name."""

ShapeOf: TypeAlias = Callable[[str], tuple[int, ...] | None]
"""The shape of a tensor, by full name; None where it is not known."""


@collector_stopped()
def build_plan(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    *,
    tensors: Iterable[ModuleTensor] | None = None,
    classes: Mapping[str, str] | None = None,
    check_claims: Callable[[Sequence[Claim]], None] | None = None,
    shapes_of: Callable[[Sequence[Claim]], ShapeOf] = lambda claims: lambda name: None,
    compute: Compute | None = None,
    max_shard_bytes: int | None = None,
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
        max_shard_bytes: see `output_shards`.

    Raises:
        UsageError: `max_shard_bytes` below 1.
        RecipeError: patterns, classes or claims do not fit.
        CheckpointError: a group is incomplete, of mixed dtypes, or of shapes that do not join.
    """
    if tensors is None:
        sources = {name: ModuleTensor(name, whole(name, each.shape)) for name, each in checkpoint.tensors.items()}
    else:
        sources = _by_name(checkpoint, tensors)
    paths = module_paths_of(sources) if classes is None else tuple(classes)
    claims, traces = match_entries(entries, paths, classes)
    check_conflicts(entries, claims)
    if check_claims is not None:
        check_claims(claims)
    _check_quantization(checkpoint, entries, sources.values())

    inside = _names_by_module(sources, {path for claim in claims for path in claim.paths})
    steps, taken = [], set[str]()
    shape_of = shapes_of(claims)
    repeats = _Repeats(sources, checkpoint)
    for claim in claims:
        entry = entries[claim.entry]
        names = [name for path in claim.paths for name in inside[path] if is_taken(name, path, entry.takes)]
        if len(claim.paths) > 1:
            names = sorted({*names}, key=natural_key)
        taken.update(names)
        may_repeat = tensors is None and entry.layout.package is None  # else names may decide, or shapes in the model
        found = repeats.find(claim, names) if may_repeat else None
        if found is None:
            found = []
            for rule in _bind(entry, claim, names, checkpoint):
                if rule.is_computed:
                    found += _computed_steps(entry, claim, rule, sources, checkpoint, compute)
                else:
                    found += _steps(entry, claim, rule, sources, checkpoint, shape_of)
            if may_repeat:
                repeats.add(claim, names, found)
        steps += found
    steps += [
        _moved_step(tensor, checkpoint, target=name, op=tensor.op, entry=None)
        for name, tensor in sources.items()
        if name not in taken
    ]
    _check_targets(steps)
    steps.sort(key=lambda step: natural_key(step.target))
    return Plan(
        model_type=checkpoint.model_type or "",
        architecture=checkpoint.architectures[0] if checkpoint.architectures else "",
        entries=tuple(entries),
        claims=claims,
        traces=traces,
        steps=tuple(steps),
        shards=output_shards(steps, checkpoint.files, max_shard_bytes),
    )


def _by_name(checkpoint: Checkpoint, tensors: Iterable[ModuleTensor]) -> dict[str, ModuleTensor]:
    """The tensors in natural order of their names."""
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
    return {name: sources[name] for name in sorted(sources, key=natural_key)}


def _names_by_module(names: Iterable[str], paths: Collection[str]) -> dict[str, list[str]]:
    """Each of the module `paths`, to the tensors below it."""
    inside: dict[str, list[str]] = {path: [] for path in paths}
    for name in names:
        for above in modules_above(name):
            if above in inside:
                inside[above].append(name)
    return inside


_Form: TypeAlias = tuple[int, tuple[tuple[int, str, str, tuple[int, ...]], ...]]
"""An entry, and per tensor in its modules: which module, its name there, its dtype and its shape."""


class _Template(NamedTuple):
    """A step of a module, and what changes in others: the end of its target, and the places of its parts and pieces.

    Places are those of their names among the names of the module's tensors; no pieces where it is a part as it is.
    """

    step: Step
    end: str
    parts: tuple[int, ...]
    pieces: tuple[int, ...]


class _Repeats:
    """The steps of modules whose tensors have the names, dtypes and shapes of others': most layers are alike.

    Only for steps that take tensors of the files as they are.
    """

    def __init__(self, sources: Mapping[str, ModuleTensor], checkpoint: Checkpoint) -> None:
        self._sources = sources
        self._tensors = checkpoint.tensors
        self._known: dict[_Form, list[_Template]] = {}

    def add(self, claim: Claim, names: Sequence[str], steps: Iterable[Step]) -> None:
        """Note the steps of a claim that holds the tensors `names`."""
        place_of = {name: place for place, name in enumerate(names)}
        templates = self._known[self._form(claim, names)] = []
        for step in steps:
            is_part = step.stored is step.parts[0].stored
            parts = tuple(place_of[part.source] for part in step.parts)
            pieces = () if is_part else tuple(place_of[piece.source] for piece in step.stored.pieces)
            templates.append(_Template(step, step.target[len(claim.paths[0]) :], parts, pieces))

    def find(self, claim: Claim, names: Sequence[str]) -> list[Step] | None:
        """The steps of a claim, where one of its form was noted."""
        templates = self._known.get(self._form(claim, names))
        if templates is None:
            return None
        return [self._again(template, claim.paths[0] + template.end, names) for template in templates]

    def _form(self, claim: Claim, names: Sequence[str]) -> _Form:
        prefixes = [f"{path}." for path in claim.paths]
        form, module = [], 0
        for name in names:
            if not name.startswith(prefixes[module]):
                module = next(number for number, prefix in enumerate(prefixes) if name.startswith(prefix))
            tensor = self._tensors[name]
            form.append((module, name[len(prefixes[module]) :], tensor.dtype, tensor.shape))
        return claim.entry, tuple(form)

    def _again(self, template: _Template, target: str, names: Sequence[str]) -> Step:
        step = template.step
        taken = [names[place] for place in template.parts]
        parts = tuple([Part(name, self._sources[name].stored) for name in taken])
        stored = parts[0].stored
        if template.pieces:
            pieces = [
                Piece(names[place], piece.source_start, piece.target_start, piece.dims)
                for place, piece in zip(template.pieces, step.stored.pieces, strict=True)
            ]
            stored = Arrangement(step.stored.shape, tuple(pieces))
        origins = tuple([self._tensors[name] for name in taken])
        return Step(target, step.dtype, step.op, step.entry, parts, stored, origins, stored)


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
    for tensor in taken.values():
        if tensor.computed is not None:
            raise RecipeError(
                f"{tensor.name!r} is made by {tensor.op}, so it cannot be packed as well",
                where=entry.where,
                fix="leave these layers out of the path",
            )
    if rule.is_rename:
        (tensor,) = taken.values()
        _check_inside(entry, claim, rule, (rule.target,))
        op = tensor.op if tensor.op != COPY else rule.label
        return [_moved_step(tensor, checkpoint, target=rule.target, op=op, entry=entry.number)]
    origins = [checkpoint.tensors[name] for tensor in taken.values() for name in tensor.stored.sources]
    dtype = _target_dtype(rule.target, origins, checkpoint, entry)
    try:
        stored = made = rule.arrange({name: tensor.stored for name, tensor in taken.items()}, shape_of)
        if not all(tensor.is_unchanged for tensor in taken.values()):
            made = rule.arrange({name: whole(name, tensor.stored.shape) for name, tensor in taken.items()}, shape_of)
    except ShapeError as error:
        listed = ", ".join(f"{origin.name} {origin.dtype} {list(origin.shape)}" for origin in origins[:4])
        listed += f" and {len(origins) - 4} more" if len(origins) > 4 else ""
        what = f"{rule.target!r} cannot be made of {listed} ({error})"
        if entry.layout.package is not None:
            raise RecipeError(what, where=entry.where, fix="check the package's conversion_mapping") from None
        raise CheckpointError(what, where=str(checkpoint.model_dir), fix="check the checkpoint's config.json") from None
    _check_inside(entry, claim, rule, made)
    done = dict.fromkeys(tensor.op for tensor in taken.values() if tensor.op != COPY)
    op = ", ".join((*done, rule.label))
    steps = [
        Step(
            target,
            dtype,
            op,
            entry.number,
            tuple(Part(name, sources[name].stored) for name in made[target].sources),
            made[target],
            tuple(checkpoint.tensors[name] for name in stored[target].sources),
            stored[target],
        )
        for target in made
    ]
    _check_bytes(steps, checkpoint)
    return steps


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
    origins = tuple(checkpoint.tensors[name] for tensor in taken.values() for name in tensor.stored.sources)
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


def _moved_step(tensor: ModuleTensor, checkpoint: Checkpoint, *, target: str, op: str, entry: int | None) -> Step:
    """A tensor of the stock model, as it is, under the name `target`."""
    parts = (Part(tensor.name, tensor.stored),)
    origins = tuple(checkpoint.tensors[name] for name in tensor.sources)
    if tensor.computed is not None:
        dtype = tensor.computed.dtype
        return Step(target, dtype, op, entry, parts, tensor.stored, origins, tensor.stored, tensor.computed)
    dtype = _target_dtype(target, origins, checkpoint, None)
    made = tensor.stored if tensor.is_unchanged else whole(tensor.name, tensor.stored.shape)
    step = Step(target, dtype, op, entry, parts, made, origins, tensor.stored)
    _check_bytes((step,), checkpoint)
    return step


def _check_bytes(steps: Iterable[Step], checkpoint: Checkpoint) -> None:
    """Refuse what would cut a byte that holds several values."""
    for step in steps:
        if cuts_bytes(step.stored.pieces, DTYPE_BITS[step.dtype]):
            raise CheckpointError(
                f"{step.target!r} is {step.dtype}, and its parts begin inside of a byte",
                where=str(checkpoint.model_dir),
                fix="leave these layers out of the path",
            )


def _target_dtype(target: str, origins: Sequence[SourceTensor], checkpoint: Checkpoint, entry: Entry | None) -> str:
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
