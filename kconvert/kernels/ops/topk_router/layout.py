"""The router of a mixture as a layout: `[T, n]` to logits `[T, E]`, weights and indices `[T, k]`.

What it computes is found by running the stock forward (see `proof`), never read off a flag; a router that is no variant of
`RouterVariant` keeps its stock forward.  In which order the experts of a token come is not part of the layout: stock
routers that ask for no order get a different one from every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from kconvert.kernels.layout import Layout, other_inputs
from kconvert.kernels.ops.topk_router.proof import CHOICE_BIAS, find_router, is_given_bias
from kconvert.kernels.ops.topk_router.spec import SPEC
from kconvert.kernels.router_variant import RouterVariant, router_logits

__all__ = ["Choose", "Routed", "TopKRouterLayout"]

Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits `[T, E]`, weights and indices `[T, k]`."""

Choose: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor | None, RouterVariant, torch.dtype], tuple[torch.Tensor, torch.Tensor]
]
"""`router_formula`, or what computes the same."""


class TopKRouterLayout(Layout):
    """A router with its parameters as they are: `weight` `[E, n]`, and where it has them `bias` and a bias of the choice `[E]`."""

    spec = SPEC
    takes_one_tensor = False

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits that has these tensors, no child, and an int `top_k`.

        Its forward takes one tensor, and the bias of the choice where that is not the module's own (MiniMax-M2).
        """
        (module,) = modules
        names = {name for name, each in (*module._parameters.items(), *module._buffers.items()) if each is not None}
        weight = module._parameters.get("weight")
        if any(True for _ in module.children()) or names - {"weight", "bias", CHOICE_BIAS}:
            return "has other parameters than a router"
        if weight is None or weight.dim() != 2:
            return "has no weight of two dimensions"
        if type(vars(module).get("top_k")) is not int:
            return "has no top_k"
        return None if CHOICE_BIAS not in names and is_given_bias(module) else other_inputs(module)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set may be what the stock forward reads, as `top_k` is: the variant is found anew."""
        super().__setattr__(name, value)
        if name != "training":  # the proof runs both modes
            self.__dict__.pop("kconvert_router", None)

    @property
    def variant(self) -> RouterVariant | str:
        """The proven variant of this instance as it is, or why it is none that is known."""
        found = self.__dict__.get("kconvert_router")
        if found is None:
            found = self.__dict__["kconvert_router"] = find_router(self)
        return cast("RouterVariant | str", found)

    def kconvert_route(self, hidden: torch.Tensor, given_bias: torch.Tensor | None, choose: Choose) -> Routed:
        """Logits, weights and indices for `hidden`, with what follows the product by `choose`.

        `given_bias` is the bias of the choice where the stock forward takes it.

        The reference runs where a compiler traces the model, and where the variant is not proven: for another dtype than that of
        the weight, more dimensions than stock takes for rows, autocast.
        """
        if torch.compiler.is_compiling():  # before anything is looked at, which a compiler would guard
            return self._reference(hidden, given_bias)
        variant, own = self.variant, self._parameters
        weight = cast("torch.Tensor", own["weight"])
        if (
            isinstance(variant, str)
            or (hidden.dim() != 2 and not variant.flattens)
            or hidden.dtype != weight.dtype
            or torch.is_autocast_enabled(hidden.device.type)
        ):
            return self._reference(hidden, given_bias)
        logits = router_logits(hidden, weight, own.get("bias"), variant)
        bias = given_bias if variant.has_bias else None
        if variant.has_bias and bias is None:
            bias = own[CHOICE_BIAS] if CHOICE_BIAS in own else self._buffers[CHOICE_BIAS]  # getattr finds it slowly
        weights, index = choose(logits, bias, variant, hidden.dtype)
        return logits, weights, index

    def _reference(self, hidden: torch.Tensor, given_bias: torch.Tensor | None) -> Routed:
        return cast("Routed", self.reference(hidden) if given_bias is None else self.reference(hidden, given_bias))

    @staticmethod
    def kconvert_in_order(result: Any) -> Any:
        """The experts of a token by their number."""
        logits, weights, index = result
        order = index.argsort(dim=-1)
        return logits, weights.gather(-1, order), index.gather(-1, order)

    def facts(self) -> dict[str, Any]:
        """What is proven of the class, as the manifest stores it."""
        variant = self.variant
        if isinstance(variant, str):
            return {"unknown": variant}
        found: dict[str, Any] = {
            "scores": variant.scores,
            "product": variant.product,
            "is_divided": variant.eps is not None,
            "casts": variant.casts,
            "has_bias": variant.has_bias,
        }
        if variant.groups is not None:
            found |= {"by_two": variant.groups.by_two, "masks_with_zero": variant.groups.masks_with_zero}
        return found
