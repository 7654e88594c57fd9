"""An RMSNorm in the form of transformers' guide: imports guarded, both classes here, and a class `layers` for `kernels`."""

from typing import Any

import torch
from torch import nn

try:
    from transformers import WeightConverter
    from transformers.conversion_mapping import WeightRenaming  # type: ignore[attr-defined]  # as the guide has it

    HAS_RULES = True
except ImportError:
    WeightConverter = WeightRenaming = None  # type: ignore[assignment, misc]
    HAS_RULES = False


class GuardedNormLayout(nn.Module):
    """The parameters.  `eps` comes by name, as the model passes it."""

    conversion_mapping: list[Any] = (  # a plain list, as package authors write it
        [WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale")] if HAS_RULES else []
    )

    def __init__(self, hidden_size: int, *, bias: bool = False, eps: float = 0.5) -> None:
        super().__init__()
        if bias:
            raise ValueError("eps was passed for bias")
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps


class GuardedNorm(nn.Module):
    """The forward.  It never has an instance: `self` is a layout."""

    scale: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scale * wide.to(hidden_states.dtype)


class layers:
    """What the `kernels` library looks for."""

    GuardedNorm = GuardedNorm
