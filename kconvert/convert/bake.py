"""Baking: the tensors of the stock model, out of those of the source's files, as transformers makes them at load.

For many types the files' names are not those of the model, and for most mixtures of experts several tensors of the
files are one of the model.  Which rule takes which name is decided by transformers' own code, with the rules that it
has for this model; what is done to the tensors is told as arrangements, so nothing is loaded.  A group that is
incomplete is refused, by the model's own shapes: it names what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.core_model_loading import dot_natural_key

from kconvert.checkpoint import Checkpoint
from kconvert.convert.adapter import UnknownOpError, operations_of
from kconvert.convert.compute import compute
from kconvert.errors import CheckpointError
from kconvert.plan import ModuleTensor
from kconvert.runtime.stock_names import StockNames
from kconvert.transforms import (
    Arrangement,
    BoundRule,
    Collected,
    Concatenate,
    Op,
    Operation,
    ShapeError,
    Stack,
    StackHalves,
    Transpose,
    complete_groups,
    whole,
)

__all__ = ["bake", "check_stable_names"]


@dataclass
class _Group:
    """What becomes the tensor `target`, and others with it: names by source pattern, and the rule."""

    target: str
    converter: Any
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def bake(checkpoint: Checkpoint, model: Any) -> tuple[ModuleTensor, ...]:
    """The tensors of `model` (on meta), and those of the checkpoint that it has no place for, under module names.

    Raises:
        CheckpointError: a group is incomplete or of shapes that do not fit, or an op is not known here.
    """
    namer = StockNames(model)
    where = str(checkpoint.model_dir)
    groups: dict[str, _Group] = {}
    found: list[ModuleTensor] = []
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        renamed, pattern = namer.rename(name)
        tensor = checkpoint.tensors[name]
        if renamed not in namer.state or pattern is None:
            # what a converter would join, and the model has no place for, stays as it is
            found.append(ModuleTensor(renamed if pattern is None else name, whole(name, tensor.shape)))
            continue
        converter = namer.converter(pattern)
        group = groups.setdefault(renamed, _Group(renamed, converter))
        if group.converter is not converter:
            raise CheckpointError(
                f"{name!r} and {next(iter(group.names.values()))[0]!r} are both {renamed!r} in the model",
                where=where,
                fix="remove one of them from the checkpoint",
            )
        group.names[pattern].append(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in namer.state.items()}
    for group in groups.values():
        found += _converted(group, checkpoint, shapes, model)
    return tuple(found)


def _converted(
    group: _Group, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], model: Any
) -> list[ModuleTensor]:
    """The tensors of the model that a converter makes of a group."""
    where = str(checkpoint.model_dir)
    try:
        operations = operations_of(group.converter, lambda: model.config)
    except UnknownOpError as error:
        raise CheckpointError(
            f"transformers makes {group.target!r} by {error}, which is not known here",
            where=where,
            fix="load the model with transformers and save it with save_original_format=False, then convert that",
        ) from None
    if any(operation.op is Op.COMPUTE for operation in operations):
        return _computed(group, checkpoint, operations, model)
    collected = {pattern: group.names.get(pattern, []) for pattern in group.converter.source_patterns}
    targets = tuple(group.converter.target_patterns)
    count = _count(operations, [shapes.get(group.target.replace(targets[0], target)) for target in targets])
    try:
        rule = BoundRule(complete_groups(group.target, collected, count), group.target, operations, targets)
        made = rule.arrange({name: whole(name, checkpoint.tensors[name].shape) for name in rule.sources}, shapes.get)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=where, fix=error.fix) from None
    except ShapeError as error:
        listed = ", ".join(f"{name} {list(checkpoint.tensors[name].shape)}" for name in rule.sources[:4])
        raise CheckpointError(
            f"{group.target!r} cannot be made of {listed} ({error})", where=where, fix="check config.json"
        ) from None
    return [
        ModuleTensor(name, stored)
        if len(rule.sources) == 1 and stored.is_whole(checkpoint.tensors[rule.sources[0]].shape)
        else ModuleTensor(name, stored, rule.label)
        for name, stored in made.items()
    ]


def _computed(
    group: _Group, checkpoint: Checkpoint, operations: tuple[Operation, ...], model: Any
) -> list[ModuleTensor]:
    """Those that an op computes; whether its group is whole, it has to tell itself."""
    collected = tuple(Collected(pattern, tuple(names)) for pattern, names in group.names.items())
    rule = BoundRule(collected, group.target, operations, tuple(group.converter.target_patterns))
    sources = {name: ModuleTensor(name, whole(name, checkpoint.tensors[name].shape)) for name in rule.sources}
    made = compute(rule, sources, checkpoint, model, error=CheckpointError, where=str(checkpoint.model_dir))
    return [
        ModuleTensor(name, Arrangement(each.shape, ()), rule.label, each, rule.sources) for name, each in made.items()
    ]


def _count(operations: Sequence[Operation], shapes: Sequence[tuple[int, ...] | None]) -> int | None:
    """How many tensors a list has to have, where the first axis of the model's tensors says so."""
    first, *rest = operations
    if any(not shape for shape in shapes):
        return None
    firsts = [shape[0] for shape in shapes if shape]
    if isinstance(first, StackHalves) and first.stack_axis == 0:
        return sum(firsts)
    keeps_first = all(
        (isinstance(each, Concatenate) and each.axis != 0)
        or (isinstance(each, Transpose) and 0 not in (each.one, each.two))
        for each in rest
    )
    return firsts[0] if isinstance(first, Stack) and first.axis == 0 and keeps_first else None


def check_stable_names(model: Any, names: Collection[str], where: str) -> None:
    """Refuse names of a converted file that transformers would give to another tensor of `model` when it loads it.

    Raises:
        CheckpointError: naming both.
    """
    namer = StockNames(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in namer.state.items()}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = namer.rename(name)
        fault = None
        if renamed in namer.state and renamed != name:
            fault = f"transformers would load {name!r} as {renamed!r}, though the names are the model's own"
        elif (
            pattern is not None
            and name in namer.state
            and not _is_kept(Collected(pattern, (name,)), namer.converter(pattern), shapes, model)
        ):
            fault = f"transformers would convert {name!r} again when it loads it"
        if fault is not None:
            raise CheckpointError(fault, where=where, fix="this model type cannot be stored under its module names")


def _is_kept(taken: Collected, converter: Any, shapes: Mapping[str, tuple[int, ...]], model: Any) -> bool:
    """Whether the converter that takes a tensor of the model, under its own name, leaves it as it is."""
    (name,) = taken.names
    before = {name: whole(name, shapes[name])}
    try:
        operations = operations_of(converter, lambda: model.config)
        return (
            BoundRule((taken,), name, operations, tuple(converter.target_patterns)).arrange(before, shapes.get)
            == before
        )
    except (UnknownOpError, ShapeError):
        return False
