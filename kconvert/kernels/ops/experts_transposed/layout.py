"""Stacked experts whose weights are stored transposed: `gate_up_proj_transposed` and `down_proj_transposed`.

What the experts compute is that of `kconvert.kernels.ops.experts`.  The stock code goes on reading `gate_up_proj` and
`down_proj`: each gives a view of what is stored, the other way round, which is in no state dict.  Kernels read what is stored;
the reference copies it for a call, because a product with a view is rounded in another order than stock's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.layout import marked_view, stock_twin
from kconvert.kernels.ops.experts.layout import ExpertsLayout
from kconvert.kernels.ops.experts.proof import WEIGHTS, ExpertsVariant, find_variant, is_shaped
from kconvert.kernels.ops.experts_transposed.spec import SPEC

__all__ = ["TransposedExpertsLayout"]

_STORED = {name: f"{name}_transposed" for name in WEIGHTS}


class TransposedExpertsLayout(ExpertsLayout):
    """`gate_up_proj_transposed` `[E, n, 2 * m]`, `down_proj_transposed` `[E, m, n]`, and the biases as they were."""

    spec = SPEC
    kconvert_weight_names: ClassVar[tuple[str, str]] = ("gate_up_proj_transposed", "down_proj_transposed")

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose class has the weights as `[experts, outputs, inputs]`."""
        reason = super().unfit(modules)
        if reason is not None:
            return reason
        (module,) = modules
        variant, _ = find_variant(module)
        is_transposed = variant is not None and variant.is_transposed
        if is_transposed or not is_shaped(dict(module.named_parameters()), is_transposed=False):
            return "has its weights transposed already: the layout for it is 'experts'"
        return None

    def pack_parameters(self) -> None:
        """Transpose the weights, each in its place; on meta where they are."""
        own = dict(self._parameters)
        self._parameters.clear()
        for name, parameter in own.items():
            if name in _STORED and parameter is not None:
                stored = parameter.detach().transpose(1, 2).contiguous()
                parameter = nn.Parameter(stored, requires_grad=parameter.requires_grad)
            self._parameters[_STORED.get(name, name)] = parameter

    @property
    def kconvert_variant(self) -> tuple[ExpertsVariant | None, str]:
        """The proven variant of the stock forward, with the weights as they are stored here; found once."""
        found = self.__dict__.get("kconvert_experts")
        if found is None:
            variant, reason = find_variant(self._stock_form(lambda view: nn.Parameter(view.detach(), False)))
            found = (variant and variant._replace(is_transposed=True), reason)
            self.__dict__["kconvert_experts"] = found
        return cast("tuple[ExpertsVariant | None, str]", found)

    def kconvert_views(self) -> frozenset[str]:
        """Those of devices that take weights as stock has them."""
        return self.spec.view_devices

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """A view `[E, 2 * m, n]`."""
        return self._view("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        """A view `[E, n, m]`."""
        return self._view("down_proj")

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward over copies of the weights as stock has them; where a compiler traces it, over views."""
        if torch.compiler.is_compiling():
            return super().reference(*args, **kwargs)
        return self._stock_form(torch.Tensor.contiguous)(*args, **kwargs)

    def _stock_form(self, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        """The stock module, with what `make` gives for each view as its weights."""
        own: dict[str, Any] = {name: make(self._view(name)) for name in WEIGHTS}
        own |= {name: value for name, value in self._parameters.items() if name not in _STORED.values()}
        return stock_twin(self, own)

    def _view(self, name: str) -> torch.Tensor:
        stored = cast("torch.Tensor", self._parameters[_STORED[name]])
        return marked_view(stored.transpose(1, 2), stored)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STORED and _STORED[name] in self.__dict__.get("_parameters", ()):
            raise AttributeError(
                f"{name} is stored as {_STORED[name]} and cannot be set; change the stock model instead"
            )
        super().__setattr__(name, value)
