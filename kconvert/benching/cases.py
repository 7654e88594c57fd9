"""What is timed: for each layout stock modules of a real model's sizes, and what goes into them.

A case says how many bytes the operation has to move at least, where moving them is what it costs; a projection costs its
product, and is compared by time alone.  Sizes are those of Qwen3-8B and of Qwen3-30B-A3B on an accelerator, and small ones
on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

__all__ = ["Case", "Inputs", "cases_of", "first_tensor"]


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor of a result: the hidden states of attention, which gives its weights too."""
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Stock modules of a layout, in pair order, and a call of the first.

    Attributes:
        layout: the layout's name.
        label: the sizes, for people.
        modules: makes the stock modules, on the CPU in float32 with random weights.
        inputs: (device, dtype) to what is passed.
        num_moved: how many elements are read and written at least; 0 where that is not what the operation costs.
        is_compiled: whether the stock module is timed under `torch.compile` too; a loop over experts takes minutes there.
        peers: what else computes it, as `liger`, by what makes it with the weights of the first stock module.
        result: of what a call gives, the tensor that is checked, and from which gradients flow when it is timed.
    """

    layout: str
    label: str
    modules: Callable[[], Sequence[nn.Module]]
    inputs: Callable[[torch.device, torch.dtype], Inputs]
    num_moved: int = 0
    is_compiled: bool = True
    peers: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = field(default_factory=dict)
    result: Callable[[Any], torch.Tensor] = first_tensor


def cases_of(layout: str, *, is_small: bool, is_gelu: bool = False) -> Iterator[Case]:
    """The cases of a layout; none for one that is not known here.

    Args:
        layout: its name.
        is_small: sizes for a CPU.
        is_gelu: gated MLPs with gelu, for kernels that compute that.
    """
    sizes = _SMALL if is_small else _LARGE
    make = partial(_gated_mlp, is_gelu=True) if is_gelu and layout == "gated_mlp" else _MAKERS.get(layout)
    if make is not None:
        yield from (make(*size) for size in sizes[layout])


_LARGE: dict[str, Sequence[tuple[int, ...]]] = {
    "rms_norm": ((1, 4096), (4096, 2048), (16384, 4096), (16384, 8192)),
    "gated_rms_norm": ((1, 128), (131072, 128), (16384, 4096)),
    "gated_mlp": ((1, 4096, 12288), (4096, 4096, 12288)),
    "norm_gated_mlp": ((1, 4096, 12288), (4096, 4096, 12288)),
    "qkv_proj": ((1, 4096, 32, 8, 128), (4096, 4096, 32, 8, 128)),
    "rope": ((1, 4096, 32, 8, 128), (4096, 4096, 32, 8, 128)),
    "decoder_layer": ((1, 4096, 32, 8, 128), (4096, 4096, 32, 8, 128)),
    "experts": ((16, 2048, 768, 128, 8), (4096, 2048, 768, 128, 8)),
    "experts_transposed": ((16, 2048, 768, 128, 8), (4096, 2048, 768, 128, 8)),
    "topk_router": ((1, 2048, 128, 1), (4096, 2048, 128, 1), (1, 7168, 256, 8), (4096, 7168, 256, 8)),
}
_SMALL: dict[str, Sequence[tuple[int, ...]]] = {
    "rms_norm": ((1, 576), (512, 576)),
    "gated_rms_norm": ((1, 128), (4096, 128)),
    "gated_mlp": ((1, 576, 1536), (512, 576, 1536)),
    "norm_gated_mlp": ((1, 576, 1536), (512, 576, 1536)),
    "qkv_proj": ((1, 576, 9, 3, 64), (512, 576, 9, 3, 64)),
    "rope": ((1, 576, 9, 3, 64), (512, 576, 9, 3, 64)),
    "decoder_layer": ((1, 576, 9, 3, 64), (512, 576, 9, 3, 64)),
    "experts": ((1, 256, 128, 16, 4), (128, 256, 128, 16, 4)),
    "experts_transposed": ((1, 256, 128, 16, 4), (128, 256, 128, 16, 4)),
    "topk_router": ((1, 256, 64, 1), (128, 256, 64, 1), (1, 256, 64, 8), (128, 256, 64, 8)),
}


def _random(*shape: int) -> Callable[[torch.device, torch.dtype], Inputs]:
    return lambda device, dtype: Inputs((torch.randn(shape, device=device, dtype=dtype),), {})


def _rms_norm(rows: int, hidden: int) -> Case:
    def torch_norm(stock: nn.Module) -> Callable[..., Any]:
        weight = stock.get_parameter("weight")
        return lambda x: F.rms_norm(x, (hidden,), weight, 1e-6)

    def liger(stock: nn.Module) -> nn.Module:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        return _with_weights_of(stock, LigerRMSNorm(hidden, eps=1e-6))

    return Case(
        "rms_norm",
        f"{rows} x {hidden}",
        lambda: [_scattered(Qwen3RMSNorm(hidden))],
        _random(1, rows, hidden),
        2 * rows * hidden,
        peers={"torch": torch_norm, "liger": liger},
    )


def _gated_rms_norm(rows: int, hidden: int) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        x, gate = torch.randn(2, rows, hidden, device=device, dtype=dtype)
        return Inputs((x, gate), {})

    return Case(
        "gated_rms_norm",
        f"{rows} x {hidden}",
        lambda: [_scattered(Qwen3NextRMSNormGated(hidden))],
        inputs,
        3 * rows * hidden,
    )


def _gated_mlp(tokens: int, hidden: int, intermediate: int, *, is_gelu: bool = False) -> Case:
    config = _config(hidden, intermediate)
    if is_gelu:
        config.hidden_act = "gelu_pytorch_tanh"

    def liger(stock: nn.Module) -> nn.Module:
        from liger_kernel.transformers.geglu import LigerGEGLUMLP
        from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

        return _with_weights_of(stock, (LigerGEGLUMLP if is_gelu else LigerSwiGLUMLP)(config))

    return Case(
        "gated_mlp",
        f"{tokens} x {hidden} x {intermediate}{', gelu' if is_gelu else ''}",
        lambda: [Qwen3MLP(config)],
        _random(1, tokens, hidden),
        peers={"liger": liger},
    )


def _norm_gated_mlp(tokens: int, hidden: int, intermediate: int) -> Case:
    config = _config(hidden, intermediate)
    return Case(
        "norm_gated_mlp",
        f"{tokens} x {hidden} x {intermediate}",
        lambda: [_scattered(Qwen3RMSNorm(hidden)), Qwen3MLP(config)],
        _random(1, tokens, hidden),
    )


def _attention_of(layout: str, make: Callable[[Qwen3Config], nn.Module]) -> Callable[..., Case]:
    def case(tokens: int, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Case:
        config = _config(hidden, 3 * hidden, num_heads, num_kv_heads, head_dim)

        def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
            states = torch.randn(1, tokens, hidden, device=device, dtype=dtype)
            positions = torch.arange(tokens, device=device)[None]
            embeddings = Qwen3RotaryEmbedding(config).to(device)(states, positions)
            return Inputs((states,), {"position_embeddings": embeddings, "attention_mask": None})

        label = f"{tokens} x {hidden}, {num_heads} + {num_kv_heads} heads"
        return Case(layout, label, lambda: [make(config)], inputs)

    return case


def _experts(layout: str, tokens: int, hidden: int, intermediate: int, num_experts: int, top_k: int) -> Case:
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    config = _with_implementation(config, "eager")

    def make() -> list[nn.Module]:
        experts = Qwen3MoeExperts(config)
        for weight in experts.parameters():
            nn.init.normal_(weight, std=0.02)
        return [experts]

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        states = torch.randn(tokens, hidden, device=device, dtype=dtype)
        weights, index = torch.rand(tokens, num_experts, device=device).softmax(-1).topk(top_k)
        return Inputs((states, index, (weights / weights.sum(-1, keepdim=True)).to(dtype)), {})

    def grouped(stock: nn.Module) -> nn.Module:
        other = Qwen3MoeExperts(_with_implementation(config, "grouped_mm"))
        return _with_weights_of(stock, other)

    label = f"{tokens} x {hidden}, {top_k} of {num_experts} x {intermediate}"
    return Case(layout, label, make, inputs, is_compiled=False, peers={"grouped_mm": grouped})


def _router(tokens: int, hidden: int, num_experts: int, num_groups: int) -> Case:
    """8 choices, as Qwen3 MoE makes them, and where there are groups as DeepSeek-V3 does."""

    def make() -> list[nn.Module]:
        if num_groups == 1:
            config = Qwen3MoeConfig(hidden_size=hidden, num_experts=num_experts, num_experts_per_tok=8)
            router: nn.Module = Qwen3MoeTopKRouter(config)
        else:
            router = DeepseekV3TopkRouter(
                DeepseekV3Config(
                    hidden_size=hidden,
                    n_routed_experts=num_experts,
                    num_experts_per_tok=8,
                    n_group=num_groups,
                    topk_group=num_groups // 2,
                )
            )
            router.get_buffer("e_score_correction_bias").normal_(std=0.05)
        nn.init.normal_(router.get_parameter("weight"), std=hidden**-0.5)
        return [router]

    label = f"{tokens} x {hidden}, 8 of {num_experts}{f' in {num_groups} groups' if num_groups > 1 else ''}"
    return Case("topk_router", label, make, _random(tokens, hidden), result=lambda output: output[1])


_MAKERS: dict[str, Callable[..., Case]] = {
    "rms_norm": _rms_norm,
    "gated_rms_norm": _gated_rms_norm,
    "gated_mlp": _gated_mlp,
    "norm_gated_mlp": _norm_gated_mlp,
    "qkv_proj": _attention_of("qkv_proj", lambda config: Qwen3Attention(config, 0)),
    "rope": _attention_of("rope", lambda config: Qwen3Attention(config, 0)),
    "decoder_layer": _attention_of("decoder_layer", lambda config: Qwen3DecoderLayer(config, 0)),
    "experts": partial(_experts, "experts"),
    "experts_transposed": partial(_experts, "experts_transposed"),
    "topk_router": _router,
}


def _config(
    hidden: int, intermediate: int, num_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128
) -> Qwen3Config:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    return config


def _with_implementation(config: Qwen3MoeConfig, name: str) -> Qwen3MoeConfig:
    """A copy by which stock experts compute as transformers calls it."""
    changed = copy.deepcopy(config)
    changed._experts_implementation = name
    return changed


def _scattered(norm: nn.Module) -> nn.Module:
    """The norm with weights that are not all one, so that a forgotten one shows."""
    nn.init.normal_(norm.get_parameter("weight"), mean=1.0, std=0.1)
    return norm


def _with_weights_of(stock: nn.Module, other: nn.Module) -> nn.Module:
    weight = next(stock.parameters())
    other.to(device=weight.device, dtype=weight.dtype).load_state_dict(stock.state_dict())
    return other
