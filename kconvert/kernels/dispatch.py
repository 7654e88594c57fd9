"""Dispatch: the kernel of one module, by the device of the input at call time.

Holds what `select` decided for each device type and mode, with the traces, so that a report can be made
at any time and `model.to(...)` after loading is followed.

A kernel that raises at its first call in a module, where the reference does not, is replaced by the reference there for good,
and that is said; `strict` makes it an error.  Caches that the call was given are put back before the reference runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from kconvert.errors import KernelUnavailableError, one_line
from kconvert.kernels.select import ANY_DEVICE, Mode, Selection

__all__ = ["Dispatch", "ForwardKernel", "attach", "dispatched"]


class ForwardKernel(Protocol):
    """What dispatch needs of a kernel: a forward that takes the module first."""

    @staticmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any: ...


class Dispatch:
    """The table `(device type, mode) -> kernel` of one module.  Empty, it always gives the reference."""

    def __init__(self) -> None:
        self.strict = False
        self.has_run: set[type[ForwardKernel]] = set()
        self.traced: dict[str, Callable[..., Any]] = {}
        self._table: dict[tuple[str, Mode], type[ForwardKernel]] = {}
        self._selections: dict[tuple[str, Mode], Selection] = {}
        self._modes_differ = False
        self._chosen: dict[bool, dict[str, type[ForwardKernel] | None]] = {False: {}, True: {}}

    def set(self, device: str, mode: Mode, selection: Selection, kernel: type[ForwardKernel] | None) -> None:
        """Record the choice for a device type and mode."""
        self._selections[device, mode] = selection
        self._table.pop((device, mode), None)
        if kernel is not None:
            self._table[device, mode] = kernel
        self._trace(device)
        # a call looks here: a mode takes long to hash
        self._chosen[mode is Mode.TRAINING][device] = self._table.get((device, mode))
        devices = {key[0] for key in self._selections}
        self._modes_differ = any(
            self._table.get((name, Mode.INFERENCE)) is not self._table.get((name, Mode.TRAINING)) for name in devices
        )

    def _trace(self, device: str) -> None:
        """Note the forward that a compiler may trace on a device.

        A compiler guards everything that is looked at while it traces, at every call and for every module: so it finds one
        function in a dict, and the table stays unseen.  A kernel that does not say `can_torch_compile` gives way, as in the `kernels`
        library, and so does one that is not for both modes.
        """
        kernel = self._table.get((device, Mode.INFERENCE))
        is_same = kernel is self._table.get((device, Mode.TRAINING))
        self.traced.pop(device, None)
        if kernel is not None and is_same and getattr(kernel, "can_torch_compile", False):
            self.traced[device] = kernel.forward

    def kernel_for(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> type[ForwardKernel] | None:
        """The kernel for this call, or None for the reference; where nothing is traced."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                break
        else:
            return None
        needs_backward = (
            self._modes_differ
            and torch.is_grad_enabled()
            and (value.requires_grad or any(weight.requires_grad for weight in module.parameters()))
        )
        chosen, device = self._chosen[needs_backward], _type_of(value.device)
        return chosen[device] if device in chosen else chosen.get(ANY_DEVICE)

    def raise_failures(self) -> None:
        """Whatever a kernel raises at its first call goes through, as later: for who looks for just that."""
        self.has_run.update(self._table.values())

    def fail(self, kernel: type[ForwardKernel], reason: str) -> None:
        """The reference runs from now on wherever `kernel` was chosen."""
        for place in [place for place, chosen in self._table.items() if chosen is kernel]:
            device, mode = place
            before = self._selections[place]
            trace = tuple(
                replace(verdict, accepted=False, reason=reason) if verdict.accepted else verdict
                for verdict in before.trace
            )
            self.set(device, mode, Selection(None, trace), None)

    def selection(self, device: str, mode: Mode) -> Selection | None:
        """What was decided for a device type and mode."""
        return self._selections.get((device, mode), self._selections.get((ANY_DEVICE, mode)))

    def devices(self) -> tuple[str, ...]:
        """The device types that a choice was made for."""
        return tuple(dict.fromkeys(device for device, _ in self._selections))


def attach(module: nn.Module, dispatch: Dispatch) -> None:
    """Give a module its dispatch.

    What a compiler may trace lies beside it, in a dict of the module's own: torch 2.11 checks a module of which only
    dicts, functions and tensors were looked at by the version of its dict, and any other object makes it check all of it.
    """
    module.__dict__["kconvert_dispatch"] = dispatch
    module.__dict__["kconvert_traced"] = dispatch.traced


def dispatched(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the module gives for a call: by the kernel that its dispatch chooses, or by the reference.

    Raises:
        KernelUnavailableError: the kernel fails at its first call, and the dispatch is strict.
    """
    if torch.compiler.is_compiling():
        traced = module.kconvert_traced
        forward = traced.get(_device_of(args, kwargs)) or traced.get(ANY_DEVICE)
        return module.reference(*args, **kwargs) if forward is None else forward(module, *args, **kwargs)
    dispatch: Dispatch = module.kconvert_dispatch
    kernel = dispatch.kernel_for(module, args, kwargs)
    if kernel is None:
        return module.reference(*args, **kwargs)
    if kernel in dispatch.has_run:
        return kernel.forward(module, *args, **kwargs)
    with _put_back_on_error((*args, *kwargs.values())) as failed:
        result = kernel.forward(module, *args, **kwargs)
    if not failed:
        dispatch.has_run.add(kernel)
        return result
    (error,) = failed
    result = module.reference(*args, **kwargs)  # raises by itself where the call was wrong
    reason = f"fails at its first call ({one_line(error)})"
    name = getattr(kernel, "_kernel_id", kernel.__name__)
    if dispatch.strict:
        raise KernelUnavailableError(f"kernel {name!r} {reason}") from error
    dispatch.fail(kernel, reason)
    warnings.warn(f"kernel {name!r} {reason}: the reference runs instead", stacklevel=2)
    return result


@cache
def _type_of(device: torch.device) -> str:
    return device.type  # which makes a string each time


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The device type of the first tensor; of none, one that no kernel has."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return ANY_DEVICE


@contextmanager
def _put_back_on_error(values: Sequence[Any]) -> Iterator[list[Exception]]:
    """Gives a list, empty at first; an error inside goes into it, and objects with a state of their own are as before."""
    kept = [_kept(value) for value in values if _has_state(value)]
    failed: list[Exception] = []
    try:
        yield failed
    except torch.OutOfMemoryError:  # the reference needs no less
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises
        failed.append(error)
        for each in kept:
            _put_back(each)


class _Kept(NamedTuple):
    """An object and the attributes that it had."""

    value: Any
    state: dict[str, Any]


_SMALL = 1024
"""Elements of a tensor that may be a counter, which is changed in place; larger ones are replaced, or written again."""


def _kept(value: Any) -> Any:
    """What `_put_back` makes `value` of again."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.numel() <= _SMALL and not value.requires_grad else value
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if _has_state(value):
        return _Kept(value, {name: _kept(item) for name, item in vars(value).items()})
    return value


def _put_back(kept: Any) -> Any:
    if isinstance(kept, _Kept):
        vars(kept.value).clear()
        vars(kept.value).update({name: _put_back(item) for name, item in kept.state.items()})
        return kept.value
    if type(kept) in (list, tuple):
        return type(kept)(map(_put_back, kept))
    return {key: _put_back(item) for key, item in kept.items()} if type(kept) is dict else kept


def _has_state(value: Any) -> bool:
    """Whether a forward may have changed it, as it does a cache; a config is none of it."""
    if isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return False
    return hasattr(value, "__dict__") and not hasattr(value, "to_json_string")
