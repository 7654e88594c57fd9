"""Layouts that join linear projections: several `nn.Linear` children of a module become one with all their rows.

Which children are joined is read off the layout's spec.  The stock code goes on reading the old names: each
gives a read-only view of its rows, which is no module and in no state dict.  A module that its author built
packed keeps its child as it is, where the layout takes such modules, and has no views: no code of its own asks for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from kconvert.kernels.layout import Layout, marked_view
from kconvert.kernels.row_linear import compiled_linear, takes_row
from kconvert.transforms import LayoutSpec, Op

__all__ = ["LinearView", "PackedLinearLayout", "call_linear", "join_linears"]


class LinearView:
    """Rows of a packed `nn.Linear`, usable where stock code expects the original projection.

    Not a module, so it is in no state dict, and read-only.
    """

    def __init__(self, packed: nn.Linear, start: int, rows: int) -> None:
        self._packed, self._start, self._rows = packed, start, rows

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self._packed.in_features

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self._rows

    @property
    def weight(self) -> torch.Tensor:
        """A view of the rows, marked as initialised: a model's `_init_weights` must not fill it."""
        return self._view(self._packed.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """A view of the bias rows, where there is a bias."""
        return None if self._packed.bias is None else self._view(self._packed.bias)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        return marked_view(tensor.narrow(0, self._start, self._rows), tensor)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden @ weight.T + bias`.

        A packed projection that is more than a plain linear layer (an adapter around it, hooks) is called whole,
        and its rows are taken from the result; where accelerate offloads it, its hook brings the weights.
        """
        hook = getattr(self._packed, "_hf_hook", None)
        if not _is_plain(self._packed, offloaded=hook is not None):
            return cast("torch.Tensor", self._packed(hidden)).narrow(-1, self._start, self._rows)
        if hook is None:
            return F.linear(hidden, self.weight, self.bias)
        (moved,), _ = hook.pre_forward(self._packed, hidden)
        return cast("torch.Tensor", hook.post_forward(self._packed, F.linear(moved, self.weight, self.bias)))


def _is_plain(linear: nn.Module, *, offloaded: bool) -> bool:
    """Whether calling it is `F.linear` on its weight; accelerate gives an offloaded one a forward of its own.

    Where accelerate has taken that back, the instance keeps the forward of its class as an attribute.
    """
    own = linear.__dict__.get("forward")
    is_replaced = own is not None and getattr(own, "__func__", None) is not nn.Linear.forward and not offloaded
    hooks = (
        linear._forward_hooks,
        linear._forward_pre_hooks,
        linear._backward_hooks,
        linear._backward_pre_hooks,
    )
    return type(linear) is nn.Linear and not any(hooks) and not is_replaced


def call_linear(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """`linear(hidden)`, without `nn.Module.__call__` where that does nothing more: it takes longer than a small product.

    Where a compiler traces it, one row goes through a kernel of ours.
    """
    if torch.compiler.is_compiling():
        return compiled_linear(linear, hidden) if takes_row(linear, hidden) else cast("torch.Tensor", linear(hidden))
    if not _is_plain(linear, offloaded=False) or _has_any_global_hook():
        return cast("torch.Tensor", linear(hidden))
    own = linear._parameters
    return F.linear(hidden, cast("torch.Tensor", own["weight"]), own["bias"])


def _joined_children(spec: LayoutSpec) -> dict[str, tuple[str, ...]]:
    """Packed child to the children whose rows it holds, in order; weights and biases have to agree."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in spec.rules:
        if rule.op is Op.CONCATENATE:
            packed = rule.target.rpartition(".")[0]
            parts = tuple(source.name.rpartition(".")[0] for source in rule.sources)
            if found.setdefault(packed, parts) != parts:
                raise TypeError(f"layout {spec.name!r} joins {found[packed]} and {parts} in {packed!r}")
    return found


class PackedLinearLayout(Layout):
    """Base of layouts whose joining rules take the weights and biases of linear children.

    Class attributes:
        kconvert_joined: packed child to the children whose rows it holds, in part order.

    Instances keep `kconvert_rows`, the rows of each part as they were packed, for what was packed here.
    """

    kconvert_joined: ClassVar[dict[str, tuple[str, ...]]] = {}
    kconvert_rows: dict[str, tuple[int, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "spec" in cls.__dict__:
            cls.kconvert_joined = _joined_children(cls.spec)
            for packed, parts in cls.kconvert_joined.items():
                for number, part in enumerate(parts):
                    setattr(cls, part, _view_property(packed, number, part))

    @classmethod
    def unfit(cls, modules: Sequence[nn.Module]) -> str | None:
        """A module fits whose parts are plain linear children that can share one weight, or one packed child."""
        (module,) = modules
        children = dict(module.named_children())
        for packed, parts in cls.kconvert_joined.items():
            is_packed = packed in children and not any(part in children for part in parts)
            for name in (packed,) if is_packed else parts:
                if type(children.get(name)) is not nn.Linear:
                    return f"has no plain linear {name}"
            if is_packed:
                reason = cls.unfit_packed(module)
            else:
                reason = _unlike([cast("nn.Linear", children[part]) for part in parts], parts)
            if reason is not None:
                return reason
        return None

    @classmethod
    def unfit_packed(cls, module: nn.Module) -> str | None:
        """Why a module that is built packed is not the layout, or None; its parts have to be in the layout's order."""
        return "is built packed, in an order of its own"

    def __setattr__(self, name: str, value: Any) -> None:
        for packed in self.__dict__.get("kconvert_rows", ()):
            if name in self.kconvert_joined[packed]:
                raise AttributeError(
                    f"{name} is packed into {packed} and cannot be set; change the stock model instead"
                )
        super().__setattr__(name, value)

    def pack_parameters(self) -> None:
        """Join the projections, in the place of the first; empty on meta, with the rows copied elsewhere."""
        rows: dict[str, tuple[int, ...]] = {}
        for packed, parts in self.kconvert_joined.items():
            if packed in self._modules:
                continue
            linears = [cast("nn.Linear", self._modules[part]) for part in parts]
            rows[packed] = tuple(linear.out_features for linear in linears)
            joined = join_linears(linears)
            joined.train(self.training)
            children = dict(self._modules)
            self._modules.clear()
            for name, child in children.items():
                if name == parts[0]:
                    self._modules[packed] = joined
                elif name not in parts:
                    self._modules[name] = child
        self.__dict__["kconvert_rows"] = rows

    def kconvert_sizes(self, packed: str, total: int) -> list[int]:
        """How `total` rows of a packed projection, all of them or one rank's share, fall to its parts."""
        rows = self.kconvert_rows[packed]
        return [count * total // sum(rows) for count in rows]

    def kconvert_apply(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """What the child `name`, a projection, gives for `hidden`."""
        return call_linear(cast("nn.Module", self._modules[name]), hidden)

    def kconvert_project(self, packed: str, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All parts of a packed projection of `hidden` `[..., in]` in one GEMM, each `[..., rows of the part]`."""
        joined = call_linear(cast("nn.Module", self._modules[packed]), hidden)
        sizes = self.kconvert_sizes(packed, joined.shape[-1])
        # not `split`: autograd forbids to change one of several views in place, which stock code may do
        return tuple(joined.narrow(-1, sum(sizes[:number]), size) for number, size in enumerate(sizes))

    def kconvert_project_apart(self, packed: str, hidden: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """All parts of a packed projection of `hidden`, each by a product of its own, so that none has gaps.

        None where that is not the same: the projection is more than a plain linear layer, or was not packed here; or where the
        products of one weight would be dear: under gradients each would have one as large as the whole.
        """
        joined = cast("nn.Linear", self._modules[packed])
        if packed not in self.kconvert_rows or not _is_plain(joined, offloaded=False) or _has_any_global_hook():
            return None
        weight, bias = joined.weight, joined.bias
        if type(weight) is not nn.Parameter:  # a quantised one need not be able to give its rows
            return None
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return None
        sizes = self.kconvert_sizes(packed, weight.shape[0])
        biases = bias.split(sizes) if bias is not None else (None,) * len(sizes)
        return tuple(F.linear(hidden, *part) for part in zip(weight.split(sizes), biases, strict=True))


def _view_property(packed: str, number: int, part: str) -> property:
    def view(self: PackedLinearLayout) -> LinearView:
        if packed not in self.__dict__.get("kconvert_rows", ()):
            raise AttributeError(f"{type(self).__name__} has no {part}")
        linear = cast("nn.Linear", self._modules[packed])
        sizes = self.kconvert_sizes(packed, linear.weight.shape[0])
        return LinearView(linear, sum(sizes[:number]), sizes[number])

    return property(view, doc=f"The rows of `{part}` in `{packed}`.")


def _unlike(linears: Sequence[nn.Linear], names: Sequence[str]) -> str | None:
    """Why these cannot share one weight, or None."""
    first = linears[0]
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    if any(linear.in_features != first.in_features for linear in linears):
        return f"{listed} have inputs of different sizes"
    without = [name for name, linear in zip(names, linears, strict=True) if linear.bias is None]
    if 0 < len(without) < len(names):
        return f"of {listed}, {' and '.join(without)} {'has' if len(without) == 1 else 'have'} no bias"
    for linear in linears[1:]:
        for one, two in zip(first.parameters(), linear.parameters(), strict=True):
            if (one.dtype, one.device, one.requires_grad) != (two.dtype, two.device, two.requires_grad):
                return f"{listed} differ in dtype, device or requires_grad"
    return None


def join_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer with all their rows, in order; on meta where they are."""
    first = linears[0]
    packed = nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in linears),
        bias=first.bias is not None,
        device="meta",
        dtype=first.weight.dtype,
    )
    for name in ("weight", "bias"):
        tensor = getattr(first, name)
        if tensor is not None:
            if tensor.is_meta:  # made so already, and joining takes long there
                joined = getattr(packed, name).detach()
            else:
                joined = torch.cat([getattr(linear, name).detach() for linear in linears])
            setattr(packed, name, nn.Parameter(joined, requires_grad=tensor.requires_grad))
    return packed
