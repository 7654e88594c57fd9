"""Every norm of the installed transformers: found in its source, and built by what its constructor asks for.

A class is a norm here if its name contains Norm and its own code computes a mean or a sum of squares, or if its name
says RMSNorm or L2Norm.  Classes are found in the text of all `modeling_*.py`, so that none has to be imported to be
known; importing all of these files takes minutes.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN
from transformers.integrations.hub_kernels import use_kernel_forward_from_hub

from kconvert.errors import one_line

__all__ = ["Build", "NormClass", "NotBuiltError", "builds_of", "find_norms", "make"]

# with decorators, and inside a condition too
_HEAD = re.compile(r"^( *)((?:@[^\n]*\n *)*)class (\w+)\(([^)]*)\)", re.MULTILINE)
_NORM_NAME = re.compile(r"RMS_?Norm|L2_?Norm", re.IGNORECASE)
_SQUARES = re.compile(r"pow\(2\)|square\(|\*\*\s*2\b|rms_norm\(|\bvar\(|\.norm\((?:p=|dim|-1|2)|normalize\(")
_INSIDE = {margin: re.compile(rf"[^\n]*\n(?:[ \t]*\n|[ ]{{{margin + 1}}}[^\n]*\n)*") for margin in (0, 4, 8, 12)}
"""The rest of a class that stands so many columns in: blank lines, and what stands further in."""
_MODULE_BASES = re.compile(r"(?:torch\.)?nn\.\w+|\w*Norm\w*")


class NotBuiltError(Exception):
    """No instance was made; says why."""


@dataclass(frozen=True)
class NormClass:
    """A class by the module that holds it, relative to `transformers.models`, its name, and its source."""

    module: str
    name: str
    source: str

    def load(self) -> type[nn.Module]:
        """The class itself, from its module."""
        return getattr(importlib.import_module(f"transformers.models.{self.module}"), self.name)  # type: ignore[no-any-return]

    def compiled(self) -> type[nn.Module]:
        """The class, made of its source alone: the same code without the import of all that stands beside it.

        Raises:
            NotBuiltError: it needs something of its module.
        """
        known = {
            "ACT2CLS": ACT2CLS,
            "ACT2FN": ACT2FN,
            "F": F,
            "math": math,
            "nn": nn,
            "torch": torch,
            "use_kernel_forward_from_hub": use_kernel_forward_from_hub,
            "__name__": f"norms.{self.module}",
        }
        flags = __future__.annotations.compiler_flag  # no annotation is looked up
        try:
            exec(compile(self.source, self.name, "exec", flags=flags, dont_inherit=True), known)
        except Exception as error:
            raise NotBuiltError(one_line(error)) from error
        return known[self.name]  # type: ignore[return-value]


@dataclass(frozen=True)
class Build:
    """How an instance is made: the options of its constructor that are not the defaults."""

    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options)


def find_norms() -> Iterator[NormClass]:
    """Every norm, by module and then in the order of its file."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for head in _HEAD.finditer(text):
            margin, _, name, bases = head.groups()
            if "norm" not in name.lower() or not all(map(_MODULE_BASES.fullmatch, re.split(r",\s*", bases))):
                continue
            source = dedent(head[0] + _INSIDE[len(margin)].match(text, head.end())[0])  # type: ignore[index]
            if _NORM_NAME.search(name) or _SQUARES.search(re.sub(r'""".*?"""', "", source, flags=re.DOTALL)):
                yield NormClass(f"{path.parent.name}.{path.stem}", name, source)


_SIZES = ("hidden_size", "dim", "size", "normalized_shape", "num_channels", "head_dim", "num_features")
_SWITCHES: dict[str, tuple[object, ...]] = {
    "with_scale": (False,),
    "use_weight": (False,),
    "group_size": (16,),
    "n_groups": (3,),
    "norm_before_gate": (False,),
    "activation": ("sigmoid", "gelu"),
    "bias": (True,),
    "use_bias": (True,),
    "force_float32_reductions": (False,),
    "elementwise_affine": (False,),
}
"""Options that change what a class computes, and what they are set to beside their default."""


def builds_of(cls: type[nn.Module]) -> tuple[Build, ...]:
    """The ways to make an instance: all defaults, and with every combination of what changes the computation."""
    parameters = inspect.signature(cls.__init__).parameters
    choices = [
        [None, *_SWITCHES[name]] for name in parameters if name in _SWITCHES and not _is_needed(parameters[name])
    ]
    names = [name for name in parameters if name in _SWITCHES and not _is_needed(parameters[name])]
    return tuple(
        Build(tuple((name, value) for name, value in zip(names, values, strict=True) if value is not None))
        for values in product(*choices)
    )


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def make(cls: type[nn.Module], build: Build, *, size: int = 48, eps: float | None = None) -> nn.Module:
    """An instance for rows of `size`.

    Raises:
        NotBuiltError: the constructor asks for something unknown, or fails.
    """
    given: dict[str, Any] = dict(build.options)
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in given:
            continue
        if parameter.name in _SIZES:
            given[parameter.name] = size
        elif parameter.name == "eps" and (eps is not None or _is_needed(parameter)):
            given["eps"] = 1e-6 if eps is None else eps
        elif parameter.name == "group_size" and _is_needed(parameter):
            given["group_size"] = size // 3 if size % 3 == 0 else size
        elif parameter.name == "num_groups":
            given["num_groups"] = 3
        elif parameter.name == "num_heads":
            given["num_heads"] = 2
        elif parameter.name == "feature_dims":
            given["feature_dims"] = (2,)
        elif parameter.name == "config":
            given["config"] = _config(size, 1e-6 if eps is None else eps)
        elif _is_needed(parameter):
            raise NotBuiltError(f"its constructor asks for {parameter.name}")
    try:
        return cls(**given)
    except Exception as error:
        raise NotBuiltError(f"its constructor fails ({one_line(error)})") from error


def _config(size: int, eps: float) -> SimpleNamespace:
    eps_names = ("eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
    return SimpleNamespace(
        hidden_size=size,
        d_model=size,
        head_dim=size,
        num_key_value_heads=2,
        intermediate_size=size,
        hidden_act="silu",
        gated_norm_rank=8,
        **dict.fromkeys(eps_names, eps),
    )
