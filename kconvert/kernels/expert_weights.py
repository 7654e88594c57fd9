"""The parameters of a mixture's experts, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ExpertWeights"]


class ExpertWeights(NamedTuple):
    """The parameters of all experts, as their module holds them.

    Attributes:
        gate_up: `[E, 2 * m, n]`, or `[E, n, 2 * m]` where it is transposed; of any strides.
        down: `[E, n, m]`, or `[E, m, n]`.
        gate_up_bias: `[E, 2 * m]` or None.
        down_bias: `[E, n]` or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def transposed(self) -> ExpertWeights:
        """The same with views of the weights that lie the other way."""
        return self._replace(gate_up=self.gate_up.transpose(1, 2), down=self.down.transpose(1, 2))
