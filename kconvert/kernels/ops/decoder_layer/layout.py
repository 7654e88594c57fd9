"""A decoder layer as a layout: its norms, attention and MLP are patched as layouts of their own, inside of it.

    h, normed = add_norm(residual, h)          where the stock forward adds first and then calls a norm

The children choose their kernels as they do alone; the layer's kernel joins each residual add with the norm behind it.
Everything else in the forward is the stock one: attention interface, caches, what is recorded, gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from kconvert.kernels.joined_adds import join_adds
from kconvert.kernels.joined_layout import JoinedLayout
from kconvert.kernels.layout import Layout, has_hooks
from kconvert.kernels.ops.decoder_layer.spec import NORMS, SPEC
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout

__all__ = ["DecoderLayerLayout"]

_PARTS: Mapping[str, type[Layout]] = {
    **dict.fromkeys(NORMS, RMSNormLayout),
    "self_attn": QKVProjLayout,
    "mlp": GatedMLPLayout,
}


class DecoderLayerLayout(JoinedLayout):
    """`self_attn.qkv_proj`, `mlp.gate_up_proj`, and everything else under its own name."""

    spec = SPEC

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A layer fits that has `self_attn`, `mlp` and norms that fit their layouts, and no other parameters."""
        (module,) = modules
        children = dict(module.named_children())
        for name in ("self_attn", "mlp"):
            if name not in children:
                return f"has no {name}"
        for name, layout in _PARTS.items():
            reason = layout.unfit([children[name]]) if name in children else None
            if reason is not None:
                return f"its {name} {reason}"
        known = {source.name for rule in cls.spec.rules for source in rule.sources}
        known |= {rule.target for rule in cls.spec.rules}
        stray = [name for name, _ in module.named_parameters() if name not in known]
        return f"has other parameters: {stray[0]}" if stray else None

    @classmethod
    def join(cls, stock: type[nn.Module]) -> Callable[..., Any]:
        """The stock forward with every add in front of a norm joined with it."""
        return join_adds(stock, NORMS)

    def pack_parameters(self) -> None:
        """Patch the children."""
        for name, layout in self.kconvert_parts().items():
            self._modules[name] = layout.patch([cast("nn.Module", self._modules[name])])
            self._modules[name].__dict__["kconvert_layout"] = layout.spec.name

    def kconvert_parts(self) -> Mapping[str, type[Layout]]:
        """The layouts of the children."""
        return {name: layout for name, layout in _PARTS.items() if name in self._modules}

    def facts(self) -> dict[str, Any]:
        """Those of the children, under their names."""
        children = {name: cast("Layout", self._modules[name]) for name in self.kconvert_parts()}
        return {f"{name}.{fact}": value for name, child in children.items() for fact, value in child.facts().items()}

    def kconvert_add_norm(self, name: str, left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`left + right` and the norm `name` of that; in one kernel where the norm's kernel has it so."""
        norm = cast("Any", self._modules[name])
        fused = None
        if torch.compiler.is_compiling():  # which fuses by itself, and guards all that it sees here
            total = left + right
            return total, norm(total)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape:
            kernel = norm.kconvert_dispatch.kernel_for(norm, (right,), {})
            fused = getattr(kernel, "add_forward", None)
        if fused is None or left.dtype != right.dtype or has_hooks(norm):
            total = left + right
            return total, norm(total)
        return cast("tuple[torch.Tensor, torch.Tensor]", fused(norm, left, right))
