"""The gated MLP as a layout: `gate_up_proj` (gate rows first) and `down_proj`.

    y = down( silu(gate(x)) * up(x) ),    gate, up = halves of gate_up(x)

The activation and any further arithmetic belong to the stock class; the reference runs it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from kconvert.kernels.layout import Layout, LinearView, other_inputs, stock_twin
from kconvert.kernels.ops.gated_mlp.spec import SPEC

__all__ = ["GatedMLPLayout", "prove_swiglu"]


class GatedMLPLayout(Layout):
    """`gate_up_proj.weight` `[2 * intermediate, hidden]`, `down_proj.weight` `[hidden, intermediate]`."""

    spec = SPEC
    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose parameters are those of three plain linear children, gate and up of one shape."""
        (module,) = modules
        children = dict(module.named_children())
        for name in ("gate_proj", "up_proj", "down_proj"):
            if type(children.get(name)) is not nn.Linear:
                return f"has no plain linear {name}"
        known = {f"{name}.{kind}" for name in ("gate_proj", "up_proj", "down_proj") for kind in ("weight", "bias")}
        stray = [name for name, _ in module.named_parameters() if name not in known]
        if stray:
            return f"has other parameters: {stray[0]}"
        gate, up = module.get_submodule("gate_proj"), module.get_submodule("up_proj")
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
            return "gate_proj and up_proj differ in shape or bias"
        for one, two in zip(gate.parameters(), up.parameters(), strict=True):
            if (one.dtype, one.device, one.requires_grad) != (two.dtype, two.device, two.requires_grad):
                return "gate_proj and up_proj differ in dtype, device or requires_grad"
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("gate_proj", "up_proj") and "gate_up_proj" in self.__dict__.get("_modules", {}):
            raise AttributeError(
                f"{name} is packed into gate_up_proj and cannot be set; change the stock model instead"
            )
        super().__setattr__(name, value)

    def pack_parameters(self) -> None:
        """Join the two projections; empty on meta, with the rows copied elsewhere."""
        gate, up = (cast("nn.Linear", self._modules.pop(name)) for name in ("gate_proj", "up_proj"))
        packed = nn.Linear(
            gate.in_features,
            gate.out_features + up.out_features,
            bias=gate.bias is not None,
            device="meta",
            dtype=gate.weight.dtype,
        )
        for name in ("weight", "bias"):
            first, second = getattr(gate, name), getattr(up, name)
            if first is not None:
                joined = torch.cat([first.detach(), second.detach()])
                setattr(packed, name, nn.Parameter(joined, requires_grad=first.requires_grad))
        packed.train(self.training)
        others = dict(self._modules)
        self._modules.clear()
        self._modules.update({"gate_up_proj": packed, **others})

    @property
    def gate_proj(self) -> LinearView:
        """The first half of the packed rows, as stock code expects it."""
        rows = self.gate_up_proj.weight.shape[0] // 2
        return LinearView(self.gate_up_proj, 0, rows)

    @property
    def up_proj(self) -> LinearView:
        """The second half of the packed rows."""
        rows = self.gate_up_proj.weight.shape[0] // 2
        return LinearView(self.gate_up_proj, rows, rows)


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """A copy of a module in train or eval mode that shares its parameters and leaves it as it is."""
    children = {name: _in_mode(child, training) for name, child in module.named_children()}
    twin = stock_twin(module, module._parameters, children)
    twin.training = training
    return twin


def prove_swiglu(module: GatedMLPLayout) -> str | None:
    """Why the stock forward is not `down(silu(gate) * up)`, or None.

    It runs on small random projections in float64, with inputs of several magnitudes and in both modes, so that
    clamps, multipliers, other activations and a dropout show.
    """
    inputs = other_inputs(module)
    if inputs is not None:
        return inputs
    # a dropout of the stock class draws from the global generator, which is the user's
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)

        def linear(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False, dtype=torch.float64, device="meta")
            made.weight = nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
            return made

        gate, up, down = linear(12, 8), linear(12, 8), linear(8, 12)
        others = {key: value for key, value in module.named_children() if key not in ("gate_up_proj", "down_proj")}
        for scale, training in product((0.1, 1.0, 100.0), (False, True)):
            children = {name: _in_mode(child, training) for name, child in others.items()}
            twin = stock_twin(module, {}, {"gate_proj": gate, "up_proj": up, "down_proj": down, **children})
            twin.training = training
            hidden = scale * torch.randn(2, 128, 8, generator=generator, dtype=torch.float64)
            try:
                found = twin(hidden)
            except Exception as error:  # noqa: BLE001 - another signature, or sizes read from the config
                return f"its forward does not run on other sizes ({type(error).__name__})"
            expected = down(F.silu(gate(hidden)) * up(hidden))
            if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
                return "its forward does not give one tensor of the input's shape"
            if not torch.allclose(found, expected, rtol=1e-9, atol=1e-9):
                return "its forward is not down(silu(gate) * up)"
    return None
