"""Kernel packages for the Hub's stand-in, recipes that name them, and a mark that shows whether one was imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kconvert.manifest import PackageRecord, load_manifest
from tests.packages.helpers import HEADER, NORM, run_recipe

__all__ = [
    "KERNEL",
    "OWN",
    "PLAIN",
    "REPO",
    "convert_hub",
    "forget_packages",
    "marked",
    "norm_layers",
    "package_record",
]

REPO, KERNEL = "kernels-community/norm", "kernels-community/norm:Norm"
OWN = "somebody/norm:Norm"

PLAIN = """
import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)
"""
"""A kernel without a layout: the forward of an RMSNorm, on the stock parameters."""


def norm_layers(note: str = "", *, marker: Path | None = None) -> str:
    """A two-class `layers.py`; `note` makes it another file, `marker` is touched when it is imported."""
    return HEADER + NORM + f"\nNOTE = {note!r}\n" + marked(marker)


def marked(marker: Path | None) -> str:
    """Code that leaves a file behind when it is imported."""
    return f"open({str(marker)!r}, 'a').write('imported\\n')\n" if marker is not None else ""


def convert_hub(
    directory: Path, source: Path, *, kernel: str = KERNEL, keys: str = "", trust: bool = False, **kw: Any
) -> Path:
    """A recipe with one Hub package on the input norms, and the conversion by it; `keys` are further lines of its entry."""
    extra = "".join(f"    {line}\n" for line in keys.splitlines())
    directory.mkdir(parents=True, exist_ok=True)
    patch = (
        f'  - kernel: {kernel}\n{extra}    replace: {{class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}}\n'
    )
    return run_recipe(directory, patch, source, trust=trust, **kw)


def package_record(output: Path) -> PackageRecord:
    """The one package that a converted directory names."""
    record = load_manifest(output).patches[0].layout.package
    assert record is not None
    return record


def forget_packages() -> None:
    """Drop every imported kernel package, so that the next use imports it again."""
    for name in [name for name in sys.modules if name.startswith("kconvert_package_")]:
        del sys.modules[name]
