"""What of a converted directory transformers' KernelConfig can express, and how: a pure decision on names.

KernelConfig replaces a class wherever it stands, or puts one layout under every module of a parent class, once per
parent class; it knows no layers and no places.  So a patch becomes an entry only where what KernelConfig would do to
this model is exactly what the manifest says.  Everything else is refused, each with its reason:

- two fusions under one parent class, of which KernelConfig keeps the last;
- a set of layers that is not all of them;
- a class that is patched in some places, unless a fusion of one pair under its parent says the same;
- names that KernelConfig would match more widely than these modules, where no other spelling helps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kconvert.export.clashes import anchor, find_clashes, too_wide_reason
from kconvert.export.entries import Entry, ModelNames, Refusal
from kconvert.manifest import PackageRecord, PatchRecord
from kconvert.names import starred
from kconvert.patterns import braced

__all__ = ["Routes", "plan_routes"]


@dataclass(frozen=True)
class Routes:
    """The entries, and what is refused."""

    entries: tuple[Entry, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class _Group:
    """The patches of one layout on one class, or one row of classes."""

    layout: str
    package: PackageRecord | None
    classes: tuple[str, ...]
    patches: tuple[int, ...]
    claims: tuple[tuple[str, ...], ...]

    @property
    def takes_module(self) -> bool:
        """Whether the layout can be made of the stock module, which a fusion of one pair hands over."""
        return self.package is None

    @property
    def has_layout(self) -> bool:
        return self.package is None or self.layout == f"{self.package.class_name}Layout"


class _RefusedError(Exception):
    """Carries a reason inside this module."""


def plan_routes(
    patches: Sequence[PatchRecord], model: ModelNames, *, passed_over: Collection[str] = frozenset()
) -> Routes:
    """Choose an entry for every patch, or refuse it.

    Args:
        patches: those of the manifest.
        model: the names in the stock model that the converted directory was made for.
        passed_over: layouts that get no entry.
    """
    entries: list[Entry] = []
    refusals: list[Refusal] = []
    groups = _groups(patches, passed_over)
    for group in groups:
        try:
            entries += _entries(group, groups, model)
        except _RefusedError as error:
            refusals.append(Refusal(group.patches, group.layout, str(error)))
    refusals += find_clashes(entries)
    patched = {entry.patched for entry in entries}
    entries = [anchor(entry, model, patched) for entry in entries]
    refusals += [
        Refusal(entry.patches, entry.layout, reason)
        for entry in entries
        if (reason := too_wide_reason(entry, model, patched))
    ]
    return Routes(tuple(entries), tuple(refusals))


def _groups(patches: Sequence[PatchRecord], passed_over: Collection[str]) -> list[_Group]:
    found: dict[tuple[object, ...], list[tuple[int, PatchRecord]]] = {}
    for number, patch in enumerate(patches):
        if not patch.modules or patch.layout.name in passed_over:  # an optional entry that matched nothing
            continue
        found.setdefault((patch.layout, patch.kind, patch.classes), []).append((number, patch))
    return [
        _Group(
            layout=same[0][1].layout.name,
            package=same[0][1].layout.package,
            classes=same[0][1].classes,
            patches=tuple(number for number, _ in same),
            claims=tuple(claim for _, patch in same for claim in patch.modules),
        )
        for same in found.values()
    ]


def _entries(group: _Group, groups: Sequence[_Group], model: ModelNames) -> list[Entry]:
    for claim in group.claims:
        for path, name in zip(claim, group.classes, strict=True):
            if model.classes.get(path) != name:
                raise _RefusedError(
                    f"{path!r} is {model.classes.get(path, 'no module')} in this transformers, not {name}"
                )
    if len(group.classes) > 1:
        return _fusions(group, groups, model)
    (name,) = group.classes
    claimed = {path for (path,) in group.claims}
    everywhere = set(model.of_class(name))
    if not group.has_layout:
        return [_stateless(group, claimed, model)]
    # a member of a fusion of ours may be replaced too: the fused forward reads its parameters and never calls it
    fused = {path for other in groups if _harmless(other, group) for claim in other.claims for path in claim}
    if claimed == everywhere - fused:
        return [_entry(group, group.claims)]
    left_out = _left_out(claimed, everywhere)
    if left_out is not None:
        raise _RefusedError(f"of its places only {left_out} is patched, and KernelConfig patches {name} in every layer")
    stray = min(everywhere - claimed - fused)
    mixed = f"{name} is patched in some places, not at {stray!r}, and KernelConfig patches a class everywhere"
    if not group.takes_module:
        raise _RefusedError(mixed)
    try:
        return _fusions(group, groups, model)  # of one pair each: KernelConfig gives them the stock module
    except _RefusedError:
        raise _RefusedError(mixed) from None


def _harmless(other: _Group, group: _Group) -> bool:
    return len(other.classes) > 1 and other.package is None and group.package is None and group.layout == "rms_norm"


def _entry(group: _Group, claims: Iterable[tuple[str, ...]], **kw: object) -> Entry:
    return Entry(
        layout=group.layout,
        classes=group.classes,
        patches=group.patches,
        claims=tuple(claims),
        package=group.package,
        **kw,  # type: ignore[arg-type]
    )


def _left_out(claimed: set[str], everywhere: set[str]) -> str | None:
    """The layers that are patched, where the same place of other layers is not."""
    places = {starred(path) for path in claimed}
    if any(path not in claimed and starred(path) in places for path in everywhere):
        return " and ".join(braced(sorted(claimed)))
    return None


def _stateless(group: _Group, claimed: set[str], model: ModelNames) -> Entry:
    (name,) = group.classes
    layer = model.layers.get(name)
    if layer is None:
        raise _RefusedError(
            f"{name} has no layer name, and KernelConfig puts in a kernel without a layout by that name"
        )
    named = {path for path, found in model.classes.items() if model.layers.get(found) == layer}
    if named != claimed:
        stray = min(named - claimed)
        raise _RefusedError(
            f"{layer!r} is also the layer name of {stray!r}, and KernelConfig puts the kernel in there too"
        )
    return _entry(group, group.claims, layer=layer)


def _fusions(group: _Group, groups: Sequence[_Group], model: ModelNames) -> list[Entry]:
    """An entry for each row of child names that the claims have."""

    def children(claim: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path.rpartition(".")[2] for path in claim)

    for name in group.classes:
        other = next((each for each in groups if each.classes == (name,) and each.has_layout), None)
        if len(group.classes) > 1 and other is not None and not _harmless(group, other):
            raise _RefusedError(f"{name} is replaced elsewhere by {other.layout}, and would come into the fusion so")
    ordered = sorted(group.claims, key=children)
    return [_fusion(group, list(claims), model) for _, claims in groupby(ordered, key=children)]


def _fusion(group: _Group, claims: Sequence[tuple[str, ...]], model: ModelNames) -> Entry:
    parents = [claim[0].rpartition(".")[0] for claim in claims]
    names = {model.classes[parent] for parent in parents}
    if len(names) != 1:
        raise _RefusedError(f"it stands under {' and '.join(sorted(names))}, which are two parent classes")
    (parent,) = names
    if parent in model.models:
        raise _RefusedError(f"its parent is the model class {parent} itself")
    children = [path.rpartition(".")[2] for path in claims[0]]
    unpatched = sorted(set(model.of_class(parent)) - set(parents))
    if unpatched:
        shown = " and ".join(braced(sorted(parents)))
        raise _RefusedError(
            f"of its places only those in {shown} are patched, and KernelConfig patches every {parent}, {unpatched[0]!r} too"
        )
    pattern = starred(parents[0])
    # what KernelConfig makes of it: dots match anything, `*` is `\w+`
    matched = [path for path in model.classes if re.fullmatch(pattern.replace("*", r"\w+"), path)]
    stray = [path for path in matched if model.classes[path] != parent]
    if stray:
        raise _RefusedError(f"KernelConfig reads {pattern!r} so that it is also {stray[0]!r}, which is no {parent}")
    return _entry(group, claims, parent=parent, patterns=tuple(f"{pattern}.{child}" for child in children))
