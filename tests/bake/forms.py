"""A tiny model in the forms that transformers itself writes and reads: what baking is held against.

The reference is the model in module names: `save_original_format=False`.  Its sources are what a published checkpoint
could look like, each with the mapping undone:

- `saved`: as `save_pretrained` writes a model that was just built.  It leaves out the rules about prefixes.
- `prefixed`: with these undone too (`PrefixChange` in the mapping), as in a checkpoint that had the prefix.
- `outer`: with the model's own mapping undone and those of its sub-models left, where their rules would be met first.
- `transposed`: what a rule turns over only where the shapes differ, turned over; transformers never writes that back.
- `legacy`: in names of old checkpoints, which transformers maps for every type.  Not of `forms_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import extract_weight_conversions_for_model, get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter

from tests.support import RawTensor, raw

__all__ = ["Form", "Stock", "describe_rules", "difference", "forms_of", "load_stock", "save_source", "state_of"]

Form = Literal["saved", "prefixed", "outer", "transposed", "legacy"]


@dataclass(frozen=True)
class Stock:
    """What stock `from_pretrained` made of a directory.

    Attributes:
        model: the loaded model, in eval mode.
        fault: how its tensors differ from those that were saved, in one line; empty where they do not.
        is_whole: whether every tensor of the file and of the model found its place, whatever the values are.
        rules: the rules that matched a name.
    """

    model: Any
    fault: str
    is_whole: bool
    rules: tuple[Any, ...]


def forms_of(model: Any) -> tuple[Form, ...]:
    """The forms in which the model's mapping can find a checkpoint."""
    forms: list[Form] = ["saved"]
    if any(isinstance(rule, PrefixChange) for rule in _mapping(model)):
        forms.append("prefixed")
    if any(rule.scope_prefix is not None for rule in _mapping(model)) and any(
        isinstance(rule, WeightConverter) for rule in extract_weight_conversions_for_model(model) or ()
    ):
        forms.append("outer")
    if _turned_over(model):
        forms.append("transposed")
    return tuple(forms)


def save_source(model: Any, directory: Path, form: Form, **options: Any) -> None:
    """Write the model, which was built and not loaded, as a source of one form.

    Args:
        model: is as before afterwards.
        directory: made here.
        form: one of `forms_of`.
        options: of `save_pretrained`.
    """
    undone = {
        "prefixed": _mapping,
        "outer": extract_weight_conversions_for_model,
        "legacy": get_model_conversion_mapping,
    }.get(form)
    if undone is not None:
        model._weight_conversions = undone(model)
    try:
        model.save_pretrained(directory, **options)
    finally:
        model.__dict__.pop("_weight_conversions", None)
    if form == "transposed":
        turned = _turned_over(model)
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            for name in tensors.keys() & turned.keys():
                tensors[name] = tensors[name].transpose(*turned[name]).contiguous()
            save_file(tensors, path, metadata={"format": "pt"})


def _mapping(model: Any) -> list[Any]:
    return list(get_model_conversion_mapping(model, add_legacy=False))


def _turned_over(model: Any) -> dict[str, tuple[int, int]]:
    """Name to dims of the tensors that a rule transposes only where the stored shape is not the model's."""
    found = {}
    for rule in _mapping(model):
        for op in getattr(rule, "operations", ()):
            if isinstance(op, Transpose) and op.check_dims:
                names = [name for name in model.state_dict() if rule._scoped_match(name) is not None]
                found.update(dict.fromkeys(names, (op.dim0, op.dim1)))
    return found


def state_of(model: Any) -> dict[str, RawTensor]:
    """Name to the bytes of every tensor of the `state_dict`, tied ones under each name."""
    return {name: raw(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def load_stock(cls: type, directory: Path, expected: Mapping[str, RawTensor]) -> Stock:
    """Load with stock transformers and compare with the tensors that were saved."""
    model, info = cls.from_pretrained(directory, output_loading_info=True)  # type: ignore[attr-defined]
    faults = []
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(item) for item in info.get(key) or ())
        if names:
            faults.append(f"{len(names)} {key.replace('_', ' ')} ({names[0]})")
    is_whole = not faults
    found = difference(state_of(model), expected)
    if found:
        faults.append(found)
    return Stock(model.eval(), "; ".join(faults), is_whole, tuple(model._weight_conversions))


def difference(found: Mapping[str, RawTensor], expected: Mapping[str, RawTensor]) -> str:
    """How two sets of tensors differ, in one line; empty where names, dtypes, shapes and bytes are the same."""
    parts = []
    for what, names in (("lacks", expected.keys() - found.keys()), ("has too", found.keys() - expected.keys())):
        if names:
            parts.append(f"{what} {len(names)} tensors ({min(names)})")
    both = found.keys() & expected.keys()
    for what, attribute in (("dtypes", "dtype"), ("shapes", "shape"), ("bytes", "data")):
        names = {name for name in both if getattr(found[name], attribute) != getattr(expected[name], attribute)}
        if names:
            parts.append(f"{len(names)} tensors have other {what} ({min(names)})")
            break
    return ", ".join(parts)


def describe_rules(rules: Iterable[Any]) -> tuple[str, ...]:
    """The kinds of rules, each once: `rename`, `PrefixChange`, `GroupWeightRename`, or the ops of a converter."""
    return tuple(sorted({_kind(rule) for rule in rules}))


def _kind(rule: Any) -> str:
    if isinstance(rule, WeightConverter):
        return " + ".join(_op(op) for op in rule.operations)
    name = type(rule).__name__
    return "rename" if name == "WeightRenaming" else name


def _op(op: Any) -> str:
    values = {key: value for key, value in vars(op).items() if value is not None and value is not False}
    return f"{type(op).__name__}({', '.join(f'{key}={value}' for key, value in values.items())})"
