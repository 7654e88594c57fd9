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
from collections.abc import Sequence
from dataclasses import dataclass

from kconvert.errors import CheckpointError, RecipeError
from kconvert.transforms.claims import is_taken
from kconvert.transforms.rules import BoundRule, MemberTensor, Op, Rule
from kconvert.transforms.spec import LayoutSpec

__all__ = ["MappingRule", "bind_mapping", "bind_spec"]


@dataclass(frozen=True)
class MappingRule:
    """One rule of a two-class package, as data.

    Attributes:
        op: what happens to the tensors that match.
        regex: alternatives in groups `g0`, `g1`, ...: group `gN` is source pattern N.
        sources: the source patterns, in part order.
        target: the replacement text; `\\1` is the first group inside the pattern that matched.
        axis: of a concatenation.
    """

    op: Op
    regex: str
    sources: tuple[str, ...]
    target: str
    axis: int = 0


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
    present = {name for name in names if any(is_taken(name, path, spec.takes) for path in paths)}
    known = {f"{paths[source.member]}.{source.name}" for rule in spec.rules for source in _possible_sources(rule)}
    if present and not present & known:
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
        if joined in present and len(missing) == len(sources):
            if not rule.takes_packed:
                raise RecipeError(
                    f"{joined!r} is stored packed, in an order of its model's own, which layout {spec.name!r} does not take",
                    fix="leave these modules out of the recipe: their tensors pass through as they are",
                )
            used.add(joined)
            bound.append(BoundRule(Op.RENAME, (joined,), target, rule.axis))
            continue
        if rule.optional and len(missing) == len(sources):
            continue
        if missing:
            named = ", ".join(map(repr, missing))
            raise CheckpointError(
                f"{target!r} needs {named}, which the checkpoint does not have"
                if missing != [target]
                else f"the checkpoint does not have {named}",
                fix="the group has to be complete: download the checkpoint again, or leave these layers out of the path",
            )
        used.update(sources)
        bound.append(BoundRule(rule.op, sources, target, rule.axis))
    stray = sorted(present - used)
    if stray:
        raise CheckpointError(
            f"layout {spec.name!r} of {paths[0]!r} has no place for {', '.join(map(repr, stray))}",
            fix="leave these layers out of the path, or use a layout that takes the tensor",
        )
    return tuple(bound)


def _possible_sources(rule: Rule) -> tuple[MemberTensor, ...]:
    return rule.sources if rule.packed is None else (*rule.sources, rule.packed)


@dataclass(frozen=True)
class _Match:
    target: str
    source_index: int


def _apply(rule: MappingRule, name: str) -> _Match | None:
    """Transformers' matching: the first place where any pattern is found, replaced once."""
    found = re.search(rule.regex, name)
    if found is None:
        return None
    ends_inside = re.match(r"\w", name[found.end() :]) is not None and found[0][-1:].isalnum()
    if ends_inside:
        return None  # `weight` is not the start of `weight_scale`; newer transformers say so in the pattern itself
    if found.start() and name[found.start() - 1] != ".":
        raise RecipeError(
            f"conversion mapping pattern {rule.sources[0]!r} would match {name!r} inside a name segment, at {found[0]!r}",
            fix="begin the pattern at the start of a segment",
        )
    group = next(key for key, value in found.groupdict().items() if value is not None)
    replacement = rule.target
    if r"\1" in replacement:
        replacement = replacement.replace(r"\1", found.group(found.re.groupindex[group] + 1))
    return _Match(name[: found.start()] + replacement + name[found.end() :], int(group[1:]))


def bind_mapping(rules: Sequence[MappingRule], paths: Sequence[str], names: Sequence[str]) -> tuple[BoundRule, ...]:
    """A package's conversion mapping on the modules at `paths`.

    As in transformers every renaming that matches is applied in turn, then at most one converter; a name
    that nothing matches keeps its name.

    Raises:
        RecipeError: a pattern begins inside a segment, or a target leaves the layout's module.
        CheckpointError: a group is incomplete.
    """
    renamings = [rule for rule in rules if rule.op is Op.RENAME]
    converters = [rule for rule in rules if rule.op is not Op.RENAME]
    groups: dict[tuple[str, MappingRule | None], dict[int, str]] = {}
    for name in names:
        if all(_inside(name, path) is None for path in paths):
            continue
        renamed = name
        for rule in renamings:
            match = _apply(rule, renamed)
            renamed = match.target if match else renamed
        taken_by, index = None, 0
        for rule in converters:
            match = _apply(rule, renamed)
            if match:
                taken_by, renamed, index = rule, match.target, match.source_index
                break
        if _inside(renamed, paths[0]) is None:
            raise RecipeError(
                f"tensor {name!r} becomes {renamed!r}, outside the module {paths[0]!r} where the layout sits",
                fix="every target of the conversion mapping has to lie in the first module of the entry",
            )
        group = groups.setdefault((renamed, taken_by), {})
        if index in group:
            raise RecipeError(f"both {group[index]!r} and {name!r} become {renamed!r}", fix="make the patterns exact")
        group[index] = name
    bound = []
    for (target, taken_by), members in groups.items():
        if taken_by is None:
            bound.append(BoundRule(Op.RENAME, (members[0],), target))
            continue
        missing = [pattern for number, pattern in enumerate(taken_by.sources) if number not in members]
        if missing:
            raise CheckpointError(
                f"{target!r} needs a tensor that matches {', '.join(map(repr, missing))}, which the checkpoint does not have",
                fix="the group has to be complete: download the checkpoint again, or leave these layers out of the path",
            )
        bound.append(BoundRule(taken_by.op, tuple(members[i] for i in sorted(members)), target, taken_by.axis))
    targets = [rule.target for rule in bound]
    twice = sorted({name for name in targets if targets.count(name) > 1})
    if twice:
        raise RecipeError(f"the conversion mapping makes {twice[0]!r} twice", fix="make the patterns exact")
    return tuple(bound)
