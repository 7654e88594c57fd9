"""Transformers' naming of tensors while it loads: which tensor of a model a name in the files stands for.

Its own code decides, with the rules that it has for the model; nothing is matched here.  Where a rule would turn the
model's own name into one that the model does not have, the name stays.  Nothing is refused: a name without a place in
the model is given back as the rules leave it.
"""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

__all__ = ["StockNames"]


class StockNames:
    """The rules that transformers has for one model.

    Names have to be asked in the order in which the loader takes them (`dot_natural_key`): a rule may depend on what was
    seen before.

    Attributes:
        state: the model's state dict.
    """

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self.state: dict[str, Any] = model.state_dict()

    def rename(self, name: str) -> tuple[str, str | None]:
        """The name in the model, and the pattern of the converter that takes the tensor, if one does."""
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)
        if renamed not in self.state and name in self.state:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self.state)
        return renamed, pattern

    def converter(self, pattern: str) -> Any:
        """The `WeightConverter` of a pattern."""
        return self._by_pattern[pattern]

    def reported(self, name: str) -> set[str]:
        """What the loader calls a tensor that the model has no place for."""
        renamed, pattern = self.rename(name)
        targets = [] if pattern is None else self.converter(pattern).target_patterns
        return {renamed.replace(targets[0], target) for target in targets} or {renamed}
