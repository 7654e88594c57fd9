"""RMSNorm and gated MLP as one module, with gate and up in one projection: a fusion as a two-class package."""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming


class RMSNormMLP(nn.Module):
    """The forward of norm and MLP together."""

    scale: nn.Parameter
    eps: float
    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        gate, up = self.gate_up_proj(self.scale * wide.to(hidden_states.dtype)).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class RMSNormMLPLayout(nn.Module):
    """The parameters, made from the two modules that are fused."""

    conversion_mapping = [  # noqa: RUF012  # a plain list, as package authors write it
        WeightRenaming(r"post_attention_layernorm\.weight", "post_attention_layernorm.scale"),
        WeightConverter(
            [r"mlp\.gate_proj\.weight", r"mlp\.up_proj\.weight"],
            "post_attention_layernorm.gate_up_proj.weight",
            operations=[Concatenate(dim=0)],
        ),
        WeightRenaming(r"mlp\.down_proj\.weight", "post_attention_layernorm.down_proj.weight"),
    ]

    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        width, inner = mlp.down_proj.out_features, mlp.down_proj.in_features
        self.scale = nn.Parameter(torch.ones(width))
        self.eps = norm.variance_epsilon
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
