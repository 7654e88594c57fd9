"""Dispatch: the kernel of one module, by the device of the input at call time.

Holds what `select` decided for each device type and mode, with the traces, so that a report can be made
at any time and `model.to(...)` after loading is followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from kconvert.kernels.select import ANY_DEVICE, Mode, Selection

__all__ = ["Dispatch", "ForwardKernel"]


class ForwardKernel(Protocol):
    """What dispatch needs of a kernel: a forward that takes the module first."""

    @staticmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any: ...


class Dispatch:
    """The table `(device type, mode) -> kernel` of one module.  Empty, it always gives the reference."""

    def __init__(self) -> None:
        self._table: dict[tuple[str, Mode], type[ForwardKernel]] = {}
        self._selections: dict[tuple[str, Mode], Selection] = {}
        self._modes_differ = False

    def set(self, device: str, mode: Mode, selection: Selection, kernel: type[ForwardKernel] | None) -> None:
        """Record the choice for a device type and mode."""
        self._selections[device, mode] = selection
        self._table.pop((device, mode), None)
        if kernel is not None:
            self._table[device, mode] = kernel
        devices = {key[0] for key in self._selections}
        self._modes_differ = any(
            self._table.get((name, Mode.INFERENCE)) is not self._table.get((name, Mode.TRAINING)) for name in devices
        )

    def kernel_for(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> type[ForwardKernel] | None:
        """The kernel for this call, or None for the reference.

        While a compiler traces the model, a kernel that does not say `can_torch_compile` gives way, as in the `kernels`
        library.
        """
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if tensor is None:
            return None
        mode = Mode.INFERENCE
        if self._modes_differ and torch.is_grad_enabled():
            needs_backward = tensor.requires_grad or any(weight.requires_grad for weight in module.parameters())
            mode = Mode.TRAINING if needs_backward else Mode.INFERENCE
        device = tensor.device.type
        kernel = self._table.get((device if (device, mode) in self._selections else ANY_DEVICE, mode))
        if torch.compiler.is_compiling() and not getattr(kernel, "can_torch_compile", False):
            return None
        return kernel

    def selection(self, device: str, mode: Mode) -> Selection | None:
        """What was decided for a device type and mode."""
        return self._selections.get((device, mode), self._selections.get((ANY_DEVICE, mode)))

    def devices(self) -> tuple[str, ...]:
        """The device types that a choice was made for."""
        return tuple(dict.fromkeys(device for device, _ in self._selections))
