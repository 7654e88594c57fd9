"""What a kernel does beside its result: what it leaves behind, and whether a compiler can trace it.

A forward fails that changes an attribute or tensor of its module, or its input.  Where the kernel says that it can be
compiled, one fails that is not traced whole or gives something else then; where it does not say so, that is not run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kconvert.authoring.comparing import PLAIN, device_of, judged, ran, unreached
from kconvert.authoring.report import Check, Outcome
from kconvert.authoring.subject import Trial
from kconvert.kernels.probe import Call, forked_random_state
from kconvert.parity.compare import Output, compare_outputs
from kconvert.parity.inputs import run_chain
from kconvert.parity.loading import dtype_name
from kconvert.parity.tolerances import MODULE_LIMITS, limit_of

__all__ = ["check_compile", "check_state"]


def check_state(trial: Trial) -> Check:
    """What a forward leaves behind: nothing on the module, nothing in its tensors, nothing in its input."""
    if PLAIN not in trial.inputs:
        return unreached("state", trial)
    packed, device, inputs = copy.deepcopy(trial.packed), device_of(trial), trial.inputs[PLAIN]
    call = inputs.build(device, None)
    before = _snapshot(packed), _snapshot_call(call)
    result = ran("state", lambda: run_chain((packed,), call, device))
    if isinstance(result, Check):
        return result
    changed = _changed(before[0], _snapshot(packed))
    if changed:
        fix = "compute it in the forward, or make it in the layout's __init__: threads and copies share the module"
        return Check("state", Outcome.FAILED, f"the forward changes {', '.join(changed)} of the module", fix)
    if _changed(before[1], _snapshot_call(call)):
        fix = "work on a copy: the model goes on with its own tensor"
        return Check("state", Outcome.FAILED, "the forward writes into its input", fix)
    return Check("state", Outcome.OK, "the forward leaves the module and its input as they were")


def _snapshot(module: nn.Module) -> dict[str, object]:
    """Every attribute of a module and its parts, tensors by value."""
    found: dict[str, object] = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        plain = {key: value for key, value in vars(owner).items() if key not in _MACHINERY}
        for name, value in {**plain, **owner._parameters, **owner._buffers, **owner._modules}.items():
            found[f"{prefix}{name}"] = _frozen(value)
    return found


_MACHINERY = (
    "_parameters",
    "_buffers",
    "_modules",
    "kconvert_class",
    "kconvert_dispatch",
    "kconvert_traced",
    "kconvert_members",
)


def _snapshot_call(call: Call) -> dict[str, object]:
    leaves = tree_leaves((call.args, dict(call.kwargs)))
    return {str(number): _frozen(leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _frozen(value: object) -> object:
    """Something that compares equal as long as `value` is the same: a copy of a tensor or container, else its identity."""
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_frozen(item) for item in value]
    return value if isinstance(value, int | float | str | bytes | None) else id(value)


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if name not in before or name not in after or before[name] != after[name]]


def check_compile(trial: Trial) -> Check:
    """torch.compile traces the forward whole and gives the same, where the kernel says that it can."""
    kernel = trial.kernel
    if not getattr(kernel, "can_torch_compile", False):
        text = "can_torch_compile is not True: in a compiled model the reference runs"
        return Check("torch.compile", Outcome.NOT_RUN, text)
    if PLAIN not in trial.inputs:
        return unreached("torch.compile", trial)
    packed, device, inputs = copy.deepcopy(trial.packed), device_of(trial), trial.inputs[PLAIN]
    expected = ran("torch.compile", lambda: Output(run_chain((packed,), inputs.build(device, None), device)))
    if isinstance(expected, Check):
        return expected
    compiled: Any = torch.compile(_fresh_function(packed), backend="eager", fullgraph=True)
    found = ran("torch.compile", lambda: Output(_call(compiled, inputs.build(device, None), device)))
    fix = "set can_torch_compile = False, or write the forward so that it can be traced"
    if isinstance(found, Check):
        return Check("torch.compile", Outcome.FAILED, found.text, fix)
    limit = limit_of(MODULE_LIMITS, dtype_name(inputs.dtype))
    return judged("torch.compile", compare_outputs(expected, found), limit, trial, fix)


def _call(function: Callable[..., Any], call: Call, device: str) -> Any:
    with torch.no_grad(), forked_random_state(torch.device(device)):
        return function(*call.args, **call.kwargs)


def _fresh_function(module: nn.Module) -> Callable[..., Any]:
    """A function that calls `module` and is not known to the compiler, which limits how often one code is traced."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
