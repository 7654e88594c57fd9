"""The gated MLP as a layout: `gate_up_proj` (gate rows first) and `down_proj`.

    y = down( act(gate(x)) * up(x) ),    gate, up = halves of gate_up(x)

The activation and any further arithmetic belong to the stock class; the reference runs it as it is, and a
kernel stands in only where its own activation is proven to be the one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.errors import KernelUnavailableError
from kconvert.kernels.layout import other_inputs, stock_twin
from kconvert.kernels.ops.gated_mlp.spec import SPEC
from kconvert.kernels.packed_linear import PackedLinearLayout

__all__ = ["ACTIVATIONS", "GELUS", "GatedMLPLayout", "gelu_of", "prove_activation"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""What kernels compute, by name; `gelu` is the exact one, `gelu_tanh` is transformers' `gelu_pytorch_tanh` and `gelu_new`."""

GELUS = ("gelu", "gelu_tanh")
"""What the kernels called geglu compute."""

_LISTED = f"{', '.join(list(ACTIVATIONS)[:-1])} or {list(ACTIVATIONS)[-1]}"


class GatedMLPLayout(PackedLinearLayout):
    """`gate_up_proj.weight` `[2 * intermediate, hidden]`, `down_proj.weight` `[hidden, intermediate]`."""

    spec = SPEC
    gate_up_proj: nn.Linear
    down_proj: nn.Linear
    kconvert_found_activation: tuple[str | None, str]

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose parameters are those of plain linear children, gate and up of one shape, and down."""
        (module,) = modules
        children = dict(module.named_children())
        if type(children.get("down_proj")) is not nn.Linear:
            return "has no plain linear down_proj"
        reason = super().unfit(modules)
        if reason is not None:
            return reason
        joined = {name for packed, parts in cls.kconvert_joined.items() for name in (packed, *parts)}
        known = {f"{name}.{kind}" for name in (*joined, "down_proj") for kind in ("weight", "bias")}
        stray = [name for name, _ in module.named_parameters() if name not in known]
        if stray:
            return f"has other parameters: {stray[0]}"
        rows = {cast("nn.Linear", children[name]).out_features for name in joined & children.keys()}
        return None if len(rows) == 1 else "gate_proj and up_proj differ in shape"

    @classmethod
    def unfit_packed(cls, module: nn.Module) -> str | None:
        """The order of the halves shows in what the stock forward computes, where its activation is one of ours."""
        activation, reason = _find_activation(module)
        return None if activation is not None else f"is built packed, and {reason}"

    @property
    def kconvert_activation(self) -> tuple[str | None, str]:
        """The proven activation of this instance, or None and why it is none that is known; found once."""
        # not the property's own name: a compiler of torch 2.11 takes a look into `__dict__` for the property, without end
        found = self.__dict__.get("kconvert_found_activation")
        if found is None:
            found = self.__dict__["kconvert_found_activation"] = _find_activation(self)
        return cast("tuple[str | None, str]", found)


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """A copy of a module in train or eval mode that shares its parameters and leaves it as it is."""
    children = {name: _in_mode(child, training) for name, child in module.named_children()}
    twin = stock_twin(module, module._parameters, children)
    twin.training = training
    return twin


def prove_activation(module: GatedMLPLayout, *names: str) -> str | None:
    """Why the stock forward is not `down(act(gate) * up)` with one of the activations called `names`, or None."""
    activation, reason = module.kconvert_activation
    if activation is None:
        return reason
    return None if activation in names else f"its activation is {activation}, not {' or '.join(names)}"


def gelu_of(module: GatedMLPLayout) -> str:
    """Which gelu the stock forward has.

    Raises:
        KernelUnavailableError: it has none.
    """
    activation, _ = module.kconvert_activation
    if activation not in GELUS:
        raise KernelUnavailableError(str(prove_activation(module, *GELUS)), fix="use the reference")
    return activation


def _find_activation(module: nn.Module) -> tuple[str | None, str]:
    """The activation of the stock forward, or None and why it is none that is known.

    The forward runs on small random projections in float64, with inputs of several magnitudes and in both modes, so
    that clamps, multipliers, other activations and a dropout show.
    """
    inputs = other_inputs(module)
    if inputs is not None:
        return None, inputs
    possible = dict(ACTIVATIONS)
    # a dropout of the stock class draws from the global generator, which is the user's
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)

        def linear(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False, dtype=torch.float64, device="meta")
            made.weight = nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
            return made

        gate, up, down, both = linear(12, 8), linear(12, 8), linear(8, 12), linear(24, 8)
        both.weight = nn.Parameter(torch.cat([gate.weight, up.weight]))
        is_packed = "gate_up_proj" in module._modules and not getattr(module, "kconvert_rows", None)
        parts = {"gate_up_proj": both} if is_packed else {"gate_proj": gate, "up_proj": up}
        others = {key: value for key, value in module.named_children() if key not in ("gate_up_proj", "down_proj")}
        for scale, training in product((0.1, 1.0, 100.0), (False, True)):
            children = {name: _in_mode(child, training) for name, child in others.items()}
            twin = stock_twin(module, {}, {**parts, "down_proj": down, **children})
            twin.training = training
            hidden = scale * torch.randn(2, 128, 8, generator=generator, dtype=torch.float64)
            try:
                found = twin(hidden)
            except Exception as error:  # noqa: BLE001 - another signature, or sizes read from the config
                return None, f"its forward does not run on other sizes ({type(error).__name__})"
            if not isinstance(found, torch.Tensor) or found.shape != hidden.shape:
                return None, "its forward does not give one tensor of the input's shape"
            for name, activate in tuple(possible.items()):
                expected = down(activate(gate(hidden)) * up(hidden))
                if not torch.allclose(found, expected, rtol=1e-9, atol=1e-9):
                    del possible[name]
            if not possible:
                return None, f"its forward is not down(act(gate) * up) with {_LISTED}"
    return next(iter(possible)), ""
