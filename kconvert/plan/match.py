"""Which modules each entry takes: patterns against module paths, then conflicts.

All claims are collected before any is checked against another, so the order of entries cannot matter.
A pattern that matches nothing is an error, and so is a module of another class than the recipe names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kconvert.errors import RecipeError
from kconvert.names import modules_above, near_misses, parents, starred
from kconvert.patterns import NumberSet, PathPattern
from kconvert.plan.model import Claim, Entry, Pair, PatternTrace
from kconvert.transforms import is_taken

__all__ = ["check_conflicts", "match_entries", "module_paths_of"]


def module_paths_of(tensor_names: Iterable[str]) -> tuple[str, ...]:
    """Every module path that the names of tensors, given in natural order, imply; in natural order too."""
    return tuple(dict.fromkeys(path for name in tensor_names for path in modules_above(name)))


class _Paths:
    """Module paths, looked up by the number of their segments and the last one, which most patterns name."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.all = paths
        self._by_length: dict[int, list[str]] = {}
        self._by_end: dict[tuple[int, str], list[str]] = {}
        for path in paths:
            length, last = path.count(".") + 1, path.rpartition(".")[2]
            self._by_length.setdefault(length, []).append(path)
            self._by_end.setdefault((length, last), []).append(path)

    def at(self, pattern: PathPattern) -> dict[tuple[str, ...], str]:
        """The paths that a pattern takes, keyed by what its wildcards took."""
        length, last = len(pattern.segments), pattern.last
        near = self._by_length.get(length, ()) if last is None else self._by_end.get((length, last), ())
        found = ((pattern.match(path), path) for path in near)
        return {binding: path for binding, path in found if binding is not None}


def match_entries(
    entries: Sequence[Entry], module_paths: Sequence[str], classes: Mapping[str, str] | None = None
) -> tuple[tuple[Claim, ...], tuple[PatternTrace, ...]]:
    """The claims of all entries, and what every pattern matched.

    Args:
        entries: resolved patch entries.
        module_paths: every module path of the model.
        classes: module path to class name where the model was built, else None: classes are not checked.

    An optional entry takes the modules that are of its classes, with all siblings; there need be none, unless nothing
    in the model has the name or the class.

    Raises:
        RecipeError: no match, another class, or fused siblings of which one is missing; or no entry matches anything.
    """
    claims, traces = [], []
    paths = _Paths(module_paths)
    for entry in entries:
        if entry.optional:
            found = _optional_matches(entry.pairs, paths, classes)
        else:
            found = [_matches(pair, paths, classes) for pair in entry.pairs]
        for pair, taken in zip(entry.pairs, found, strict=True):
            traces.append(PatternTrace(entry.number, pair.pattern.text, pair.class_name, tuple(taken.values())))
        for binding, path in found[0].items():
            claimed = [path]
            for pair, taken in zip(entry.pairs[1:], found[1:], strict=True):
                if binding not in taken:
                    raise RecipeError(
                        f"{path!r} has no sibling for {pair.pattern.text!r}",
                        where=pair.where,
                        fix="narrow both paths to parents that have both modules, with a number set such as {0-3}",
                    )
                claimed.append(taken[binding])
            claims.append(Claim(entry.number, tuple(claimed)))
        for pair, taken in zip(entry.pairs[1:], found[1:], strict=True):
            lonely = [path for binding, path in taken.items() if binding not in found[0]]
            if lonely:
                raise RecipeError(
                    f"{lonely[0]!r} has no sibling for {entry.pairs[0].pattern.text!r}",
                    where=pair.where,
                    fix="narrow both paths to parents that have both modules, with a number set such as {0-3}",
                )
    if entries and not claims:
        raise RecipeError(
            "no entry of the recipe matches a module",
            where=entries[0].where,
            fix="without optional: true each says why",
        )
    return tuple(claims), tuple(traces)


def _matches(pair: Pair, paths: _Paths, classes: Mapping[str, str] | None) -> dict[tuple[str, ...], str]:
    """The paths that a pair takes, keyed by what the wildcards of its pattern took."""
    taken = paths.at(pair.pattern)
    if not taken:
        raise RecipeError(
            f"path pattern {pair.pattern.text!r} matches no module",
            where=pair.where,
            fix=_nearest(pair.pattern.text, paths.all),
        )
    _check_number_sets(pair, taken)
    if classes is not None:
        for path in taken.values():
            if classes[path] != pair.class_name:
                raise RecipeError(
                    f"{path!r} is a {classes[path]}, the recipe names {pair.class_name}",
                    where=pair.where,
                    fix=f"write class: {classes[path]}, narrow the path, or pass such modules over with optional: true",
                )
    return taken


def _optional_matches(
    pairs: Sequence[Pair], paths: _Paths, classes: Mapping[str, str] | None
) -> list[dict[tuple[str, ...], str]]:
    """The paths of each pair whose modules are of its class, where every other pair has one beside it."""
    for pair in pairs:
        is_known = classes is not None and pair.class_name in classes.values()
        if not is_known and not paths.at(pair.pattern):
            raise RecipeError(
                f"path pattern {pair.pattern.text!r} matches no module, and the model has no {pair.class_name}",
                where=pair.where,
                fix=_nearest(pair.pattern.text, paths.all),
            )
    found = [
        {
            binding: path
            for binding, path in paths.at(pair.pattern).items()
            if classes is None or classes[path] == pair.class_name
        }
        for pair in pairs
    ]
    complete = set.intersection(*map(set, found))
    return [{binding: path for binding, path in taken.items() if binding in complete} for taken in found]


def _nearest(pattern: str, module_paths: Sequence[str]) -> str:
    """The way out of a pattern without a match: near misses, else the shortest paths that there are."""
    shapes = set(map(starred, module_paths))
    near = near_misses(pattern, shapes)
    if near:
        return f"did you mean {' or '.join(near)}?"
    some = sorted(shapes, key=lambda shape: (shape.count("."), shape))[:6]
    return f"the model has {', '.join(some)}, ..."


def _check_number_sets(pair: Pair, taken: Mapping[tuple[str, ...], str]) -> None:
    """A number that a set names and no module has is an error, as a pattern without a match is."""
    sets = [segment for segment in pair.pattern.segments if not isinstance(segment, str)]  # `*` is None
    for place, numbers in enumerate(sets):
        if not isinstance(numbers, NumberSet):
            continue
        found = {int(binding[place]) for binding in taken}
        if len(found) < numbers.size:
            absent = next(
                number for low, high in numbers.ranges for number in range(low, high + 1) if number not in found
            )
            raise RecipeError(
                f"path pattern {pair.pattern.text!r} names {absent}, and no module is there",
                where=pair.where,
                fix=f"the numbers that match are {', '.join(map(str, sorted(found)))}",
            )


def check_conflicts(entries: Sequence[Entry], claims: Sequence[Claim]) -> None:
    """Refuse two claims on one module, or on a module and a part of it.

    Raises:
        RecipeError: naming both entries and the module.
    """
    owner: dict[str, int] = {}
    for claim in claims:
        for path in claim.paths:
            if path in owner:
                _refuse(entries, owner[path], claim.entry, path)
            owner[path] = claim.entry
    for path, number in owner.items():
        for above in parents(path):
            if above in owner and is_taken(path, above, entries[owner[above]].takes):
                _refuse(entries, owner[above], number, path)


def _refuse(entries: Sequence[Entry], first: int, second: int, path: str) -> None:
    raise RecipeError(
        f"{path!r} is already taken by the entry at {entries[first].where}",
        where=entries[second].where,
        fix="no module can be in two entries: keep one of the two, or separate their layers with number sets",
    )
