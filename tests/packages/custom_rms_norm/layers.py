"""An RMSNorm as a two-class package: one class computes, the other one holds the parameters."""

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming


class CustomRMSNorm(nn.Module):
    """The forward.  It never has an instance: `self` is a layout."""

    scale: nn.Parameter
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return self.scale * wide.to(hidden_states.dtype)


class CustomRMSNormLayout(nn.Module):
    """The parameters, built with what the model passes to the class that is replaced."""

    conversion_mapping = [  # noqa: RUF012  # a plain list, as package authors write it
        WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale"),
    ]

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
