"""A router on CUDA: its product, and all that follows in one Triton kernel; the stock forward where a compiler traces it."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, cast

import torch
from torch import nn

from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.ops.topk_router.layout import Choose, Routed, TopKRouterLayout
from kconvert.kernels.registry import register_kernel
from kconvert.kernels.router_variant import RouterVariant

__all__ = ["CudaFusedRouter"]

_MOST_EXPERTS = 4096  # a program holds all scores of a token
_MOST_CHOICES = 32  # and goes through the choices one by one


@cache
def _device_code() -> Choose:
    from kconvert.kernels.triton.router import choose_experts

    return choose_experts


def _choose(
    logits: torch.Tensor, bias: torch.Tensor | None, variant: RouterVariant, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return _device_code()(logits, bias, variant, dtype)


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


@register_kernel
class CudaFusedRouter(CudaKernel):
    """Scores, top-k and weights in one kernel forward and one backward.

    Of experts with equal scores the first ones are chosen, as torch's top-k on CUDA does.
    """

    _kernel_id = "cuda_fused_router"
    layout = TopKRouterLayout
    dtypes: ClassVar[frozenset[str] | None] = frozenset({"bfloat16", "float16", "float32"})

    @staticmethod
    def forward(
        module: nn.Module, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor | None = None
    ) -> Routed:
        """`hidden_states` `[..., n]` to logits `[T, E]`, weights and indices `[T, k]`, in the dtypes of the stock forward."""
        return cast("TopKRouterLayout", module).kconvert_route(hidden_states, e_score_correction_bias, _choose)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Known variants only, of so many experts as one program can hold, in groups that it can tell apart."""
        variant = cast("TopKRouterLayout", module).variant
        if isinstance(variant, str):
            return variant
        num_experts = module.get_parameter("weight").shape[0]
        if num_experts > _MOST_EXPERTS or variant.top_k > _MOST_CHOICES:
            return f"{variant.top_k} of {num_experts} experts are more than {_MOST_CHOICES} of {_MOST_EXPERTS}"
        groups = variant.groups
        if groups is not None and not (_is_power_of_2(groups.num_groups) and _is_power_of_2(num_experts)):
            return f"its {groups.num_groups} groups of {num_experts} experts are no powers of two"
        return None
