"""What is timed of CUDA kernels beside their layouts: the part that is ours of a kernel whose other parts are products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from kconvert.benching.cases import Inputs
from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.rotation import Rotation

__all__ = ["Part", "parts_of"]

_SILU = GatedVariant("silu")
_ACTIVATION_SIZES = ((4096, 6144), (16384, 12288))
_ROTATION_SIZES = ((4096, 32, 8, 128),)


@dataclass(frozen=True)
class Part:
    """A function of tensors in one kernel, and the same in the stock model's operations.

    Attributes:
        label: the sizes, and what it is, for people.
        kernel: ours.
        stock: the stock arithmetic, of the same arguments.
        inputs: (device, dtype) to what is passed.
        num_moved: how many elements are read and written at least.
        liger: makes Liger's function of the same arguments.
    """

    label: str
    kernel: Callable[..., Any]
    stock: Callable[..., Any]
    inputs: Callable[[torch.device, torch.dtype], Inputs]
    num_moved: int
    liger: Callable[[], Callable[..., Any]]


def parts_of(kernel_id: str) -> Iterator[Part]:
    """The parts of a kernel that can run on this machine."""
    if kernel_id == "cuda_fused_swiglu":
        yield from (_silu_mul(*size) for size in _ACTIVATION_SIZES)
    if kernel_id == "cuda_fused_rope":
        yield from (_rotation(*size) for size in _ROTATION_SIZES)


def _silu_mul(rows: int, size: int) -> Part:
    from kconvert.kernels.triton.gated_act import gated_act

    def liger() -> Callable[..., Any]:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda packed: LigerSiLUMulFunction.apply(*packed.chunk(2, dim=-1))

    return Part(
        f"{rows} x {size}, activation alone",
        lambda packed: gated_act(packed, _SILU),
        lambda packed: gated_formula(packed, _SILU),
        lambda device, dtype: Inputs((torch.randn(rows, 2 * size, device=device, dtype=dtype),), {}),
        3 * rows * size,
        liger,
    )


def _rotation(tokens: int, num_heads: int, num_kv_heads: int, dim: int) -> Part:
    from kconvert.kernels.triton.rope import rope

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        q, k = (
            torch.randn(1, tokens, heads, dim, device=device, dtype=dtype).transpose(1, 2)
            for heads in (num_heads, num_kv_heads)
        )
        config = Qwen3Config(head_dim=dim, hidden_size=num_heads * dim, num_attention_heads=num_heads)
        cos, sin = Qwen3RotaryEmbedding(config).to(device)(q, torch.arange(tokens, device=device)[None])
        return Inputs((q, k, cos, sin), {})

    def liger() -> Callable[..., Any]:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        return lambda q, k, cos, sin: liger_rotary_pos_emb(q.clone(), k.clone(), cos, sin)  # it works in place

    return Part(
        f"{tokens} tokens, {num_heads} + {num_kv_heads} heads of {dim}, rotation alone",
        lambda q, k, cos, sin: rope(q, k, cos, sin, rotation=Rotation(dim), heads_axis=1),
        apply_rotary_pos_emb,
        inputs,
        2 * tokens * (num_heads + num_kv_heads) * dim,
        liger,
    )
