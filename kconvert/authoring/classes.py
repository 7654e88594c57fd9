"""What can be said of the two classes without running them: state, members and the forward's signature.

`self` in the kernel's forward is an instance of the layout, so whatever else the kernel class has is never found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from kconvert.authoring.report import Check, Outcome
from kconvert.kernels.packages import PackageClasses
from kconvert.kernels.stateless import signature_reason

__all__ = ["check_classes", "check_signature"]

_FLAGS = ("has_backward", "can_torch_compile")


def check_classes(classes: PackageClasses) -> Check:
    """Whether the kernel class is a forward and nothing else."""
    kernel, layout = classes.kernel, classes.layout
    name = kernel.__name__
    own = [cls for cls in kernel.__mro__ if cls not in nn.Module.__mro__]
    members = {member for cls in own for member in vars(cls)}
    if "__init__" in members or "__new__" in members:
        return Check(
            "stateless",
            Outcome.FAILED,
            f"{name} has an __init__ of its own, which never runs",
            f"move what it sets to {name}Layout.__init__",
        )
    others = sorted(member for member in members - {"forward", *_FLAGS} if not _is_dunder(member))
    if others:
        return Check(
            "stateless",
            Outcome.FAILED,
            f"{name} has {', '.join(others)}, which its forward does not find: self is a {name}Layout",
            "move functions to the module, and values to the layout",
        )
    if not issubclass(kernel, nn.Module):
        return Check(
            "stateless",
            Outcome.WARNING,
            f"{name} is no torch.nn.Module; kconvert runs it, the kernels library refuses it",
            f"write class {name}(nn.Module)",
        )
    if layout is not None and "forward" in vars(layout):
        return Check(
            "stateless",
            Outcome.WARNING,
            f"{name}Layout has a forward of its own, which is never run",
            "remove it; the kernel class has the forward",
        )
    return Check("stateless", Outcome.OK, f"{name} has a forward and no state")


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def check_signature(kernel: type[Any], stock: type[nn.Module]) -> Check:
    """Whether the model's calls of the (first) replaced module fit the kernel's forward."""
    found, wanted = (_shown(cls.forward) for cls in (kernel, stock))
    reason = signature_reason(kernel, stock)
    if reason is None:
        return Check("signature", Outcome.OK, f"forward{found}, as {stock.__name__}")
    return Check(
        "signature",
        Outcome.FAILED,
        f"forward{found} does not stand in for {stock.__name__}.forward{wanted}: {reason}",
        "give it the parameters of the module that it replaces",
    )


def _shown(forward: Callable[..., Any]) -> str:
    """The parameters without `self` and annotations."""
    _, *parameters = inspect.signature(forward).parameters.values()
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))
