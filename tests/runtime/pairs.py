"""A stock checkpoint and its conversion, loaded side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kconvert.manifest import Manifest, load_manifest
from kconvert.names import MANIFEST_NAME
from kconvert.runtime import load_converted

__all__ = ["IDS", "MLP", "Pair", "edit_config", "edit_manifest", "logits"]

IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11], [2, 4, 8, 16, 32, 0, 1]])

MLP = {
    "qwen3": "model.layers.{}.mlp",
    "llama": "model.layers.{}.mlp",
    "qwen3-fused-norm-mlp": "model.layers.{}.post_attention_layernorm.mlp",
}
"""Recipe to the path of a layer's packed MLP."""


@dataclass(frozen=True)
class Pair:
    """A source directory and what a recipe made of it."""

    recipe: str
    source: Path
    converted: Path

    def stock(self, **kw: Any) -> Any:
        """The stock model."""
        return AutoModelForCausalLM.from_pretrained(self.source, **kw)

    def load(self, **kw: Any) -> Any:
        """The converted model."""
        return load_converted(self.converted, **kw)

    def mlp(self, layer: int) -> str:
        """The path of a layer's packed MLP."""
        return MLP[self.recipe].format(layer)

    def copy(self, directory: Path) -> Pair:
        """The same with a converted directory of its own, to be damaged."""
        shutil.copytree(self.converted, directory)
        return replace(self, converted=directory)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits without gradients."""
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def edit_manifest(directory: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrite a manifest, with a digest that fits."""
    path = directory / MANIFEST_NAME
    path.write_bytes(change(load_manifest(directory)).to_bytes())


def edit_config(directory: Path, **values: Any) -> None:
    """Set values in config.json; None removes one.  The manifest's digest is left as it was."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
