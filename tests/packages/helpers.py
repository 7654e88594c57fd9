"""Kernel packages on disk, recipes that name them, and logits to compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kconvert import load_converted
from kconvert.errors import KconvertError
from tests.support import convert, write_recipe

__all__ = [
    "CUSTOM",
    "FUSED",
    "NORM",
    "NORM_KERNEL",
    "NORM_LAYOUT",
    "copy_example",
    "failure",
    "fuse",
    "load",
    "logits",
    "replace",
    "run_recipe",
    "stock",
    "write_package",
]

EXAMPLES = Path(__file__).parent
CUSTOM, FUSED = "./custom_rms_norm:CustomRMSNorm", "./norm_mlp:RMSNormMLP"
HEADER = """
import torch
from torch import nn
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter, WeightRenaming
"""

NORM_KERNEL = """
class Norm:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale * wide.to(hidden_states.dtype)
"""

NORM_LAYOUT = r"""
class NormLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale")]

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
"""

NORM = NORM_KERNEL + NORM_LAYOUT

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def copy_example(name: str, directory: Path) -> Path:
    """One of the example packages in a folder of the test's own."""
    return shutil.copytree(EXAMPLES / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))


def replace(
    kernel: str = CUSTOM, path: str = "model.layers.*.input_layernorm", name: str = "Qwen3RMSNorm", trust: bool = True
) -> str:
    """A patch entry that replaces modules by a package."""
    trusted = "    trust_remote_code: true\n" if trust else ""
    return f'  - kernel: {kernel}\n{trusted}    replace: {{class: {name}, path: "{path}"}}\n'


def fuse(kernel: str = FUSED, layers: str = "*", trust: bool = True) -> str:
    """A patch entry that fuses the norm before the MLP with the MLP."""
    trusted = "    trust_remote_code: true\n" if trust else ""
    return (
        f"  - kernel: {kernel}\n{trusted}    fuse:\n"
        f'      - {{class: Qwen3RMSNorm, path: "model.layers.{layers}.post_attention_layernorm"}}\n'
        f'      - {{class: Qwen3MLP, path: "model.layers.{layers}.mlp"}}\n'
    )


def run_recipe(directory: Path, patches: str, source: Path, *, trust: bool = True, **kw: Any) -> Path:
    """Write a recipe into `directory`, beside its packages, and convert `source` to `directory/out`."""
    recipe = write_recipe(directory / "recipe.yaml", patches, model_type=kw.pop("model_type", "qwen3"))
    return convert(recipe, source, directory / "out", trust_remote_code=trust, **kw).output


def load(directory: Path, **kw: Any) -> Any:
    """`load_converted`, trusting the directory's packages."""
    return load_converted(directory, **{"trust_remote_code": True, **kw})


def stock(directory: Path, **kw: Any) -> Any:
    """The stock model of a source directory, in the checkpoint's dtype."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **kw)


def logits(model: Any) -> torch.Tensor:
    """The model's logits on a fixed input, float32."""
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


def failure(error: KconvertError) -> tuple[int, str]:
    """Exit code and the one line that the user sees."""
    text = str(error)
    assert "\n" not in text
    return error.exit_code, text


def write_package(directory: Path, body: str, name: str = "package") -> Path:
    """A package whose `layers.py` is the usual imports and `body`."""
    (directory / name).mkdir(parents=True)
    (directory / name / "layers.py").write_text(HEADER + body, encoding="utf-8")
    return directory / name
