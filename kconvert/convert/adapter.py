"""The one adapter: transformers' conversion rules of a two-class package as our own.

`WeightRenaming` and `WeightConverter` become `MappingRule`s, with the regular expression that transformers
itself compiled; from there a package goes through the same code as a built-in layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from kconvert.errors import RecipeError
from kconvert.transforms import MappingRule, Op

__all__ = ["rules_from_mapping"]


def rules_from_mapping(mapping: Iterable[Any], where: str) -> tuple[MappingRule, ...]:
    """Translate a `conversion_mapping`.

    Args:
        mapping: the layout's class attribute.
        where: file and line of the recipe entry, for errors.

    Raises:
        RecipeError: a kind of rule or op that has no byte form here; it is named.
    """
    try:
        rules = list(mapping)
    except TypeError:
        raise RecipeError("conversion_mapping is no list of rules", where=where, fix="make it a list") from None
    return tuple(_rule(rule, where) for rule in rules)


def _rule(rule: Any, where: str) -> MappingRule:
    if type(rule) is WeightRenaming:
        op, axis = Op.RENAME, 0
    elif type(rule) is WeightConverter:
        op, axis = Op.CONCATENATE, _concatenation_axis(rule, where)
    else:
        raise RecipeError(
            f"conversion rule {type(rule).__name__} cannot be written offline",
            where=where,
            fix="use WeightRenaming, or WeightConverter with Concatenate",
        )
    if len(rule.target_patterns) != 1:
        raise RecipeError(f"{rule} has several targets", where=where, fix="give each target a rule of its own")
    if rule.scope_prefix is not None:
        raise RecipeError(f"{rule} has a scope prefix", where=where, fix="write the prefix into the pattern")
    return MappingRule(op, rule.compiled_sources.pattern, tuple(rule.source_patterns), rule.target_patterns[0], axis)


def _concatenation_axis(rule: Any, where: str) -> int:
    names = [type(op).__name__ for op in rule.operations]
    if len(rule.operations) != 1 or type(rule.operations[0]) is not Concatenate:
        raise RecipeError(f"conversion ops {names} cannot be written offline", where=where, fix="use one Concatenate")
    if len(rule.source_patterns) < 2:
        raise RecipeError(f"{rule} joins a single pattern", where=where, fix="use WeightRenaming")
    return int(rule.operations[0].dim)
