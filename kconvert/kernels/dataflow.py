"""Proof that modules may be fused: nobody but the next module reads what a module gives.

In eleven model types a norm feeds the MLP and still must not be fused with it, because its output is the
residual too, or goes to a second reader.  So the model runs once on the meta device, where tensors have
shapes and no data, and every operation that touches the output in question is watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kconvert.errors import one_line
from kconvert.kernels.probe import eval_mode

__all__ = ["check_chains"]


@dataclass
class _Link:
    """What is seen of one module of a chain and its successor."""

    output: torch.Tensor | None = None
    calls: list[int] = field(default_factory=lambda: [0, 0])
    reason: str | None = None
    inside: int = 0

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


class _Watch(TorchDispatchMode):
    """Refuses a link when an operation outside its successor reads the output."""

    def __init__(self, links: Sequence[_Link]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._links = links

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        }
        for link in self._links:
            if link.output is not None and not link.inside and link.output.untyped_storage()._cdata in read:
                link.refuse("its output has another reader")
        return func(*args, **(kwargs or {}))


def check_chains(model: nn.Module, chains: Sequence[Sequence[str]]) -> list[str | None]:
    """For each chain of module paths, why it must not be fused, or None.

    Args:
        model: a causal or encoder model on the meta device, stock.
        chains: module paths in pair order; each feeds the next.
    """
    flat = [(number, first, second) for number, chain in enumerate(chains) for first, second in pairwise(chain)]
    links = [_Link() for _ in flat]
    handles = []
    for link, (_, first, second) in zip(links, flat, strict=True):
        handles += _hook(link, model.get_submodule(first), model.get_submodule(second))
    try:
        failure = _run(model, links)
    finally:
        for handle in handles:
            handle.remove()
    reasons: list[str | None] = [None] * len(chains)
    for link, (number, first, second) in zip(links, flat, strict=True):
        found = f"the model does not run on the meta device ({failure})" if failure else link.reason
        if found is None and link.calls != [1, 1]:
            found = f"{first!r} and {second!r} were called {link.calls[0]} and {link.calls[1]} times"
        reasons[number] = reasons[number] or found
    return reasons


def _hook(link: _Link, first: nn.Module, second: nn.Module) -> list[Any]:
    def after_first(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        link.calls[0] += 1
        if not isinstance(output, torch.Tensor):
            link.refuse("the first module does not give one tensor")
            return
        if len(args) + len(kwargs) != 1:
            link.refuse("the first module takes more than one input")
        link.output = output

    def before_second(module: nn.Module, args: Any, kwargs: Any) -> None:
        link.calls[1] += 1
        if len(args) + len(kwargs) != 1:
            link.refuse("the second module takes more than one input")
        elif [*args, *kwargs.values()][0] is not link.output:
            link.refuse("the second module's input is not the first one's output")
        link.inside += 1

    def after_second(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        link.inside -= 1
        if not isinstance(output, torch.Tensor):
            link.refuse("the second module does not give one tensor")

    return [
        first.register_forward_hook(after_first, with_kwargs=True),
        second.register_forward_pre_hook(before_second, with_kwargs=True),
        second.register_forward_hook(after_second, with_kwargs=True),
    ]


def _run(model: nn.Module, links: Sequence[_Link]) -> str | None:
    """One forward with the first kind of input that the model takes; the last error where none does."""
    failure = "it takes no input_ids"
    for extra in (("attention_mask", "position_ids"), (), ("attention_mask_2d",)):
        for link in links:
            link.output, link.calls, link.reason, link.inside = None, [0, 0], None, 0
        try:
            with torch.device("meta"), torch.no_grad(), eval_mode(model), _Watch(links):
                inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
                if "attention_mask" in extra:
                    # a 4-D mask and positions keep mask code from asking a meta tensor for its values
                    inputs["attention_mask"] = torch.ones(1, 1, 4, 4)
                    inputs["position_ids"] = torch.zeros(1, 4, dtype=torch.long)
                if "attention_mask_2d" in extra:
                    inputs["attention_mask"] = torch.ones(1, 4, dtype=torch.long)
                model(**inputs)
            return None
        except Exception as error:  # noqa: BLE001 - any failure of foreign model code means: not proven
            failure = one_line(error)
    return failure
