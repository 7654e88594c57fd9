"""A package's mapping has to mean the modules of its entry, and no modules of another class.

transformers applies a conversion mapping to every tensor of the model, wherever its pattern is found, also inside a
name's segment; here it is applied to the modules that the entry takes.  So a pattern that is wider than the entry is
refused, with the tensor that it means too: the package would load here and break a model in transformers.  Modules of
the entry's own classes may be outside, because transformers puts a package on all of them, and here a path or a
number set can leave some out; such a tensor has to stay in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kconvert.convert.resolve import ResolvedRecipe
from kconvert.errors import RecipeError
from kconvert.names import parents
from kconvert.plan import Entry

__all__ = ["check_mapping_scope"]


def check_mapping_scope(resolved: ResolvedRecipe, names: Iterable[str], classes: Mapping[str, str]) -> None:
    """Refuse a conversion mapping that transformers would match outside the modules of its entry.

    Args:
        resolved: the entries and their packages.
        names: every tensor name of the model.
        classes: module path to class name, of the whole model.

    Raises:
        RecipeError: showing the tensor, and what transformers would make of it.
    """
    every = list(names)
    for number, package in resolved.packages.items():
        entry = resolved.entries[number]
        meant = {pair.class_name for each in resolved.entries if each.layout == entry.layout for pair in each.pairs}
        for rule in _rules(package.classes.layout):
            for name in every:
                renamed, pattern = rule.rename_source_key(name)
                if pattern is None or renamed == name:
                    continue
                if _begins_a_segment(rule, name) and _is_meant(entry, name, renamed, meant, classes):
                    continue
                raise RecipeError(
                    f"conversion mapping pattern {pattern!r} means {name!r} too, which transformers would make "
                    f"{renamed!r}, and not only tensors of a {' or '.join(sorted(meant))}",
                    where=entry.where,
                    fix="begin the pattern at the start of a segment, with the name of the module",
                )


def _is_meant(entry: Entry, name: str, renamed: str, meant: set[str], classes: Mapping[str, str]) -> bool:
    """Whether the tensor belongs to a module of one of these classes, and stays in it, or beside it for a fusion."""
    for path in parents(name):
        if classes.get(path) in meant:
            home = path if entry.kind == "replace" else path.rpartition(".")[0]
            return not home or renamed.startswith(f"{home}.")
    return False


def _begins_a_segment(rule: Any, name: str) -> bool:
    found = rule.compiled_sources.search(name)
    return found is None or found[0].startswith(".") or name[: found.start()].endswith(".") or not found.start()


def _rules(layout: Any) -> Iterator[Any]:
    """Copies of a layout's rules: a rule notes what it has matched."""
    return (copy.deepcopy(rule) for rule in getattr(layout, "conversion_mapping", ()))
