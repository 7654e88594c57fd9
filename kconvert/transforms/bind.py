"""Binding: a layout's rules, put on concrete modules and the tensors that these really have.

Two kinds of declarations end here and become the same `BoundRule`s:

* the rules of a built-in `LayoutSpec`, with exact names relative to each member module;
* the `MappingRule`s of a two-class package: regular expressions, read with transformers' own matching,
  but only inside the modules of the entry and only from the start of a name segment.

Every tensor that an entry takes has to be consumed; a group that is incomplete is an error that names the
target and what is missing.  A group that the checkpoint holds joined already is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kconvert.errors import CheckpointError, RecipeError
from kconvert.names import natural_key
from kconvert.transforms.claims import is_taken
from kconvert.transforms.operations import Op, Operation
from kconvert.transforms.rules import BoundRule, Collected, MemberTensor, Rule
from kconvert.transforms.spec import LayoutSpec

__all__ = ["MappingRule", "bind_mapping", "bind_spec", "complete_groups"]

_NUMBER = re.compile(r"(\d+)(?=\.|$)")  # at the end of a segment: `experts.3.`, `shard_3.`
_INCOMPLETE = "the group has to be complete: download the checkpoint again, or leave these layers out of the path"


@dataclass(frozen=True)
class MappingRule:
    """One rule of a two-class package, as data.

    Attributes:
        regex: alternatives in groups `g0`, `g1`, ...: group `gN` is source pattern N.
        sources: the source patterns, in part order; `*` stands for the numbers of a list of tensors.
        targets: the replacement texts; `\\1` is the first group inside the pattern that matched.
        operations: what happens to the tensors that match; none for a renaming.
        is_group: source pattern N becomes target N, and only after a tensor that matched the first was seen.
    """

    regex: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    is_group: bool = False


def _inside(name: str, path: str) -> str | None:
    """`name` relative to the module `path`, or None if it is not below it."""
    return name[len(path) + 1 :] if name.startswith(f"{path}.") else None


def bind_spec(spec: LayoutSpec, paths: Sequence[str], names: Sequence[str]) -> tuple[BoundRule, ...]:
    """The rules of `spec` for the modules at `paths` (pair order) among tensors called `names`.

    `names` are full module names; only those that the layout takes are looked at.  Targets lie below `paths[0]`.

    Raises:
        RecipeError: there are tensors, and the layout knows none of them: it is the wrong layout for these modules.
        CheckpointError: a source is missing, or a tensor inside the modules is not taken by the layout.
    """
    present = {name for path in paths for name in names if is_taken(name, path, spec.takes)}
    known = (f"{paths[source.member]}.{source.name}" for rule in spec.rules for source in _possible_sources(rule))
    if present and not any(name in present for name in known):
        raise RecipeError(
            f"layout {spec.name!r} does not fit {' and '.join(map(repr, paths))}, which holds {min(present)!r}",
            fix=f"use a kernel for these modules, or paths to {' and '.join(spec.members)}",
        )
    bound: list[BoundRule] = []
    used: set[str] = set()
    for rule in spec.rules:
        sources = tuple(f"{paths[source.member]}.{source.name}" for source in rule.sources)
        missing = [name for name in sources if name not in present]
        target = f"{paths[0]}.{rule.target}"
        joined = f"{paths[rule.packed.member]}.{rule.packed.name}" if rule.packed is not None else None
        if joined is not None and joined in present and len(missing) == len(sources):
            if not rule.takes_packed:
                raise RecipeError(
                    f"{joined!r} is stored packed, in an order of its model's own, which layout {spec.name!r} does not take",
                    fix="leave these modules out of the recipe: their tensors pass through as they are",
                )
            used.add(joined)
            bound.append(BoundRule.renamed(joined, target))
            continue
        if rule.optional and len(missing) == len(sources):
            continue
        if missing:
            named = ", ".join(map(repr, missing))
            raise CheckpointError(
                f"{target!r} needs {named}, which the checkpoint does not have"
                if missing != [target]
                else f"the checkpoint does not have {named}",
                fix=_INCOMPLETE,
            )
        used.update(sources)
        bound.append(_bound(rule, sources, target))
    stray = sorted(present - used)
    if stray:
        raise CheckpointError(
            f"layout {spec.name!r} of {paths[0]!r} has no place for {', '.join(map(repr, stray))}",
            fix="leave these layers out of the path, or use a layout that takes the tensor",
        )
    return tuple(bound)


def _bound(rule: Rule, sources: Sequence[str], target: str) -> BoundRule:
    """A rule of a layout with full names."""
    if rule.op is Op.RENAME:
        return BoundRule.renamed(sources[0], target)
    if rule.op is Op.TRANSPOSE:
        return BoundRule.transposed(sources[0], target, rule.axis)
    return BoundRule.joined(sources, target, rule.axis)


def _possible_sources(rule: Rule) -> tuple[MemberTensor, ...]:
    return rule.sources if rule.packed is None else (*rule.sources, rule.packed)


@dataclass(frozen=True)
class _Match:
    target: str
    source_index: int


def _apply(rule: MappingRule, name: str, active: set[MappingRule]) -> _Match | None:
    """Transformers' matching: the first place where any pattern is found, replaced once."""
    found = re.search(rule.regex, name)
    if found is None:
        return None
    ends_inside = re.match(r"\w", name[found.end() :]) is not None and found[0][-1:].isalnum()
    if ends_inside:
        return None  # `weight` is not the start of `weight_scale`; newer transformers say so in the pattern itself
    if found.start() and name[found.start() - 1] != "." and found[0][:1] != ".":
        raise RecipeError(
            f"conversion mapping pattern {rule.sources[0]!r} would match {name!r} inside a name segment, at {found[0]!r}",
            fix="begin the pattern at the start of a segment",
        )
    group = next(key for key, value in found.groupdict().items() if value is not None)
    index = int(group[1:])
    if rule.is_group and index and rule not in active:
        return None
    active.add(rule)
    replacement = rule.targets[index if rule.is_group else 0]
    if r"\1" in replacement:
        replacement = replacement.replace(r"\1", found.group(found.re.groupindex[group] + 1))
    return _Match(name[: found.start()] + replacement + name[found.end() :], index)


def bind_mapping(rules: Sequence[MappingRule], paths: Sequence[str], names: Sequence[str]) -> tuple[BoundRule, ...]:
    """A package's conversion mapping on the modules at `paths`.

    As in transformers every renaming that matches is applied in turn, then at most one converter; a name
    that nothing matches keeps its name.

    Raises:
        RecipeError: a pattern begins inside a segment, or a target leaves the layout's module.
        CheckpointError: a group is incomplete.
    """
    renamings = [rule for rule in rules if not rule.operations]
    converters = [rule for rule in rules if rule.operations]
    groups: dict[tuple[str, MappingRule | None], dict[int, list[str]]] = {}
    active: set[MappingRule] = set()
    for name in sorted(names, key=natural_key):
        if all(_inside(name, path) is None for path in paths):
            continue
        renamed = name
        for rule in renamings:
            match = _apply(rule, renamed, active)
            renamed = match.target if match else renamed
        taken_by, index = None, 0
        for rule in converters:
            match = _apply(rule, renamed, active)
            if match:
                taken_by, renamed, index = rule, match.target, match.source_index
                break
        if _inside(renamed, paths[0]) is None:
            raise RecipeError(
                f"tensor {name!r} becomes {renamed!r}, outside the module {paths[0]!r} where the layout sits",
                fix="every target of the conversion mapping has to lie in the first module of the entry",
            )
        group = groups.setdefault((renamed, taken_by), {})
        is_list = taken_by is not None and "*" in taken_by.sources[index]
        if index in group and not is_list:
            raise RecipeError(
                f"both {group[index][0]!r} and {name!r} become {renamed!r}", fix="make the patterns exact"
            )
        group.setdefault(index, []).append(name)
    bound = []
    for (target, taken_by), members in groups.items():
        if taken_by is None:
            bound.append(BoundRule.renamed(members[0][0], target))
            continue
        collected = {pattern: members.get(number, []) for number, pattern in enumerate(taken_by.sources)}
        ordered = complete_groups(target, collected)
        bound.append(BoundRule(ordered, target, taken_by.operations, taken_by.targets))
    targets = [rule.target for rule in bound]
    twice = sorted({name for name in targets if targets.count(name) > 1})
    if twice:
        raise RecipeError(f"the conversion mapping makes {twice[0]!r} twice", fix="make the patterns exact")
    return tuple(bound)


def complete_groups(
    target: str, collected: Mapping[str, Sequence[str]], count: int | None = None
) -> tuple[Collected, ...]:
    """The tensors per pattern, lists in numeric order, where none is missing.

    A pattern with `*` collects a list of tensors, numbered from 0 without gaps, as many for each pattern; any other
    pattern one tensor.

    Args:
        target: what they become, for errors.
        collected: source pattern to the names that it matched.
        count: how many there have to be in a list, where that is known.

    Raises:
        CheckpointError: naming what is missing.
    """
    lists = {pattern: _numbered(pattern, names) for pattern, names in collected.items() if "*" in pattern}
    wanted = max([count or 0, *(max(numbers, default=-1) + 1 for numbers, _ in lists.values())])
    lacking = []
    for pattern, names in collected.items():
        if pattern not in lists:
            if not names:
                lacking.append(f"a tensor that matches {pattern!r}")
            continue
        numbers, name_of = lists[pattern]
        if not names:
            lacking.append(f"tensors that match {pattern!r}")
        lacking += [repr(name_of(number)) for number in range(wanted) if names and number not in numbers]
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        raise CheckpointError(
            f"{target!r} needs {', '.join(lacking[:4])}{more}, which the checkpoint does not have", fix=_INCOMPLETE
        )
    if count is not None and wanted > count:
        stray = next(name_of(count) for numbers, name_of in lists.values())
        raise CheckpointError(
            f"{target!r} has {count} parts in the model, and the checkpoint has {stray!r} too", fix="check config.json"
        )
    return tuple(
        Collected(pattern, tuple(lists[pattern][0].values()) if pattern in lists else tuple(names))
        for pattern, names in collected.items()
    )


def _numbered(pattern: str, names: Sequence[str]) -> tuple[dict[int, str], Callable[[int], str]]:
    """The names of a list by number, in numeric order, and how a name with another number is spelled.

    The number is the one in which the names differ; of a single name, the last one that can stand for the `*`: as many
    numbers follow it as there are behind the `*` in the pattern.

    Raises:
        CheckpointError: the names differ in more than one number, or in its spelling alone.
    """
    spelled = [_NUMBER.split(name) for name in names]
    if not spelled:
        return {}, lambda number: str(number)
    places = [
        place
        for place in range(1, len(spelled[0]), 2)
        if len({tuple(parts[place : place + 1]) for parts in spelled}) > 1
    ]
    behind = len(_NUMBER.findall(pattern.rpartition("*")[2].replace("\\", "")))
    place = places[0] if places else len(spelled[0]) - 2 - 2 * behind
    around = {(*parts[:place], *parts[place + 1 :]) for parts in spelled}
    if len(around) > 1 or place < 1:
        raise CheckpointError(
            f"{names[0]!r} and {names[-1]!r} are no list of numbered tensors", fix="make the pattern exact"
        )
    found: dict[int, str] = {}
    for parts, name in zip(spelled, names, strict=True):
        other = found.setdefault(int(parts[place]), name)
        if other is not name:
            raise CheckpointError(
                f"{other!r} and {name!r} have the same number", fix="remove one of them from the checkpoint"
            )

    def name_of(number: int) -> str:
        return "".join((*spelled[0][:place], str(number), *spelled[0][place + 1 :]))

    return dict(sorted(found.items())), name_of
