"""RMSNorm and gated MLP fused: the two layouts side by side, in one module at the norm's path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.dispatch import Dispatch, attach, dispatched
from kconvert.kernels.layout import Layout
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.ops.norm_gated_mlp.spec import SPEC
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout

__all__ = ["NormGatedMLPLayout"]


class NormGatedMLPLayout(Layout):
    """`norm` is an `RMSNormLayout`, `mlp` a `GatedMLPLayout`: `y = mlp(norm(x))`."""

    spec = SPEC
    norm: nn.Module
    mlp: nn.Module

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNormLayout.patch([norm])
        self.mlp = GatedMLPLayout.patch([mlp])
        attach(self, Dispatch())
        self.train(norm.training)

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """What either of the two layouts says; the norm has to have a weight."""
        norm, mlp = modules
        bare = None if any(True for _ in norm.parameters()) else "its norm has no weight"
        return RMSNormLayout.unfit([norm]) or bare or GatedMLPLayout.unfit([mlp])

    @classmethod
    def patch(cls, modules: Sequence[nn.Module]) -> nn.Module:
        """A new module of the two; it takes the norm's place."""
        return cls(*modules)

    def facts(self) -> dict[str, Any]:
        """Those of the norm."""
        return cast("RMSNormLayout", self.norm).facts()

    def reference(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Both stock forwards, one after the other."""
        normed = cast("RMSNormLayout", self.norm).reference(hidden_states)
        return cast("torch.Tensor", cast("GatedMLPLayout", self.mlp).reference(normed))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The kernel for the input's device, or the reference."""
        return cast("torch.Tensor", dispatched(self, (hidden_states,), {}))
