"""Gemma 2's norm, MLP and norm as one module: a fusion of three, with gate and up in one projection."""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming


def _normed(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden_states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(hidden_states.dtype)


class SandwichMLP(nn.Module):
    """The forward of all three."""

    before: nn.Parameter
    after: nn.Parameter
    eps: float
    act_fn: Any
    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(_normed(x, self.before, self.eps)).chunk(2, dim=-1)
        return _normed(self.down_proj(self.act_fn(gate) * up), self.after, self.eps)


class SandwichMLPLayout(nn.Module):
    """The parameters, at the path of the first norm."""

    conversion_mapping = [  # noqa: RUF012  # a plain list, as package authors write it
        WeightRenaming(r"pre_feedforward_layernorm\.weight", "pre_feedforward_layernorm.before"),
        WeightRenaming(r"post_feedforward_layernorm\.weight", "pre_feedforward_layernorm.after"),
        WeightConverter(
            [r"mlp\.gate_proj\.weight", r"mlp\.up_proj\.weight"],
            "pre_feedforward_layernorm.gate_up_proj.weight",
            operations=[Concatenate(dim=0)],
        ),
        WeightRenaming(r"mlp\.down_proj\.weight", "pre_feedforward_layernorm.down_proj.weight"),
    ]

    def __init__(self, before: Any, mlp: Any, after: Any) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Parameter(torch.zeros_like(before.weight)),
            nn.Parameter(torch.zeros_like(after.weight)),
        )
        self.eps, self.act_fn = before.eps, mlp.act_fn
        width, inner = mlp.down_proj.out_features, mlp.down_proj.in_features
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
