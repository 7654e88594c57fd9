"""Linear layers of one row where a compiler traces a model: by a kernel of ours, which it takes as an operator.

cuBLAS leaves a third of an H200's bandwidth unused there, and a compiler fuses nothing with it.  Eagerly the launch is what
such a product costs, so the layer is called as it is.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["compiled_linear", "takes_row"]

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = (torch.bfloat16, torch.float16)


def takes_row(linear: nn.Module, hidden: torch.Tensor) -> bool:
    """Whether `compiled_linear` runs the kernel: for one row, without gradients, on a plain layer in a narrow dtype.

    Only for code that a compiler traces.  It looks at no `__dict__`, because a compiler would check all of the module
    at every call then.
    """
    if not _HAS_TRITON or not hidden.is_cuda or torch.is_grad_enabled() or type(linear) is not nn.Linear:
        return False
    if any(size != 1 for size in hidden.shape[:-1]):
        return False
    weight = linear.weight
    if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        return False
    if not weight.is_contiguous() or torch.is_autocast_enabled("cuda") or _has_any_global_hook():
        return False
    hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    # by its code: that is what a compiler of every version compares, and accelerate gives an instance a forward of its own
    return not hooks and getattr(linear.forward, "__code__", None) == nn.Linear.forward.__code__


def compiled_linear(linear: nn.Module, hidden: torch.Tensor, *, activation: str | None = None) -> torch.Tensor:
    """`linear(hidden)`, or with an activation that of its gate rows times its up rows, in the kernel.

    Args:
        linear: what `takes_row` takes.
        hidden: `[..., k]` of one row.
        activation: `silu`, `gelu` or `gelu_tanh`.
    """
    from kconvert.kernels.triton.row_linear import row_linear

    own = cast("nn.Linear", linear)
    return cast("torch.Tensor", row_linear(hidden.contiguous(), own.weight, own.bias, activation))
