"""The names that the source's files had, for `save_pretrained` in the stock layout.

transformers writes a model back under the names that it was loaded from, by the reverse of the rules that it used.
A converted directory holds module names and needs no rule to load, so the way back is read off the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers.core_model_loading import WeightRenaming

from kconvert.manifest import Manifest

__all__ = ["source_names"]


class _SourceNames(WeightRenaming):
    """A rule in transformers' list whose reverse, which is all that is ever used, is a look-up of whole names."""

    def __init__(self, by_module_name: Mapping[str, str]) -> None:
        super().__init__("module name", "name in the source")
        self.by_module_name = dict(by_module_name)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        found = self.by_module_name.get(source_key)
        return (source_key, None) if found is None else (found, source_key)

    def reverse_transform(self) -> _SourceNames:
        return self


def source_names(manifest: Manifest) -> list[WeightRenaming]:
    """What to give transformers as the conversions of a loaded model; empty where the names are the same."""
    differing = {
        part.source: part.file_name
        for record in manifest.tensors
        for part in record.parts
        if part.source != part.file_name
    }
    return [_SourceNames(differing)] if differing else []
