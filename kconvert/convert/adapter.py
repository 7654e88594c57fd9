"""The one adapter: transformers' conversion rules and ops as our own.

A two-class package's `conversion_mapping` becomes `MappingRule`s, with the regular expression that transformers
itself compiled; from there a package goes through the same code as a built-in layout.  The ops of any converter,
a package's or one of transformers' own for a model type, become `transforms` operations.  An op of transformers that
changes values is kept as it is, to be run on the tensors themselves.  An op that is none of transformers' own is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import core_model_loading as stock

from kconvert import transforms
from kconvert.errors import RecipeError
from kconvert.transforms import Computed, MappingRule, Operation

__all__ = ["UnknownOpError", "operations_of", "rules_from_mapping"]


class UnknownOpError(Exception):
    """An op of a converter that is not known here; the text names it."""


def operations_of(converter: Any, config_of: Callable[[], Any]) -> tuple[Operation, ...]:
    """The ops of a `WeightConverter`.

    Args:
        converter: the converter.
        config_of: gives the model's config, which some ops read.

    Raises:
        UnknownOpError: naming an op that is not known.
    """
    values = [op for op in converter.operations if type(op).__name__ not in _OPERATIONS and _is_stock(op)]
    if values:
        return (Computed(", ".join(type(op).__name__ for op in values), converter),)
    return tuple(operation for op in converter.operations for operation in _operations(op, config_of))


def _is_stock(op: Any) -> bool:
    """Whether an op is one of transformers' own, and does what it is called."""
    return (
        isinstance(op, stock.ConversionOps)
        and type(op).__module__.partition(".")[0] == stock.__name__.partition(".")[0]
    )


def _operations(op: Any, config_of: Callable[[], Any]) -> tuple[Operation, ...]:
    make = _OPERATIONS.get(type(op).__name__) if _is_stock(op) else None
    if make is None:
        raise UnknownOpError(f"{type(op).__name__} of {type(op).__module__}")
    return make(op, config_of)


def _chunk(op: Any, config_of: Callable[[], Any]) -> tuple[Operation, ...]:
    attribute = getattr(op, "num_shards_attribute", None)
    count = None if attribute is None else int(getattr(config_of().get_text_config(), attribute))
    return (transforms.Chunk(op.dim, count),)


def _permute(op: Any, config_of: Callable[[], Any]) -> tuple[Operation, ...]:
    config = config_of()
    if op.subconfig_key is not None:
        config = getattr(config, op.subconfig_key, config)
    only = getattr(op, "permute_layer_names", None)
    heads = int(getattr(config, "num_attention_heads", 1))
    return (transforms.PermuteHeads(heads, bool(getattr(op, "inverse", False)), None if only is None else tuple(only)),)


def _chain(op: Any, config_of: Callable[[], Any]) -> tuple[Operation, ...]:
    """An op that is made of two others, which it keeps."""
    parts = (op.permute_op, op.concat_op) if hasattr(op, "concat_op") else (op.chunk_op, op.permute_op)
    return tuple(operation for part in parts for operation in _operations(part, config_of))


_OPERATIONS: dict[str, Callable[[Any, Callable[[], Any]], tuple[Operation, ...]]] = {
    "Chunk": _chunk,
    "Concatenate": lambda op, _: (transforms.Concatenate(op.dim),),
    "Conv3dToLinear": lambda op, _: (transforms.Reshape((-1,), 5),),
    "ErnieFuseAndSplitTextVisionExperts": lambda op, _: (transforms.StackHalves(op.stack_dim, op.concat_dim),),
    "ErnieSplitAndDecoupleTextVisionExperts": lambda op, _: (transforms.UnstackHalves(op.stack_dim, op.concat_dim),),
    "Interleave": lambda op, _: (transforms.Interleave(op.dim, bool(getattr(op, "inverse", False))),),
    "LinearToConv3d": lambda op, _: (transforms.Reshape((op.in_channels, *op.kernel_size), 2),),
    "MergeModulelist": lambda op, _: (transforms.Stack(op.dim),),
    "PermuteForRope": _permute,
    "Split": lambda op, _: (transforms.SplitToShapes(op.dim),),
    "SplitModulelist": lambda op, _: (transforms.Unstack(op.dim),),
    "Transpose": lambda op, _: (transforms.Transpose(op.dim0, op.dim1, bool(getattr(op, "check_dims", False))),),
    "VisionFuseAndPermuteForRope": _chain,
    "VisionUnfuseAndPermuteForRope": _chain,
}
"""Class name in transformers to what it is here; versions that lack one never give it."""


_RENAMINGS = frozenset({"GroupWeightRename", "PrefixChange", "WeightRenaming"})
"""The rules of transformers that change names only; one of another name may match in another way."""


def rules_from_mapping(
    mapping: Iterable[Any], where: str, *, config_of: Callable[[], Any] | None = None
) -> tuple[MappingRule, ...]:
    """Translate a `conversion_mapping`.

    Args:
        mapping: the layout's class attribute.
        where: file and line of the recipe entry, for errors.
        config_of: gives the model's config, which some ops read; None where there is none yet.

    Raises:
        RecipeError: a kind of rule or op that is not known here; it is named.
    """

    def config() -> Any:
        if config_of is None:
            raise RecipeError(
                "conversion_mapping reads the model's config, which is not there without the model",
                where=where,
                fix="leave out --no-model-check",
            )
        return config_of()

    try:
        rules = list(mapping)
    except TypeError:
        raise RecipeError("conversion_mapping is no list of rules", where=where, fix="make it a list") from None
    return tuple(_rule(rule, where, config) for rule in rules)


def _rule(rule: Any, where: str, config_of: Callable[[], Any]) -> MappingRule:
    kind = type(rule).__name__ if type(rule).__module__ == stock.__name__ else ""
    if kind == "WeightConverter":
        try:
            operations = operations_of(rule, config_of)
        except UnknownOpError as error:
            raise RecipeError(
                f"conversion op {error} is not known, so it cannot be written offline",
                where=where,
                fix="use transformers' own ops",
            ) from None
    elif kind in _RENAMINGS:
        operations = ()
    else:
        raise RecipeError(
            f"conversion rule {type(rule).__name__} cannot be written offline",
            where=where,
            fix="use WeightRenaming or WeightConverter",
        )
    if rule.scope_prefix is not None:
        raise RecipeError(f"{rule} has a scope prefix", where=where, fix="write the prefix into the pattern")
    return MappingRule(
        rule.compiled_sources.pattern,
        tuple(rule.source_patterns),
        tuple(rule.target_patterns),
        operations,
        is_group=kind == "GroupWeightRename",
    )
