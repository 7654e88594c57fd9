"""How far a kernel is from the modules that it replaces: bits, results, odd shapes, gradients.

Everything runs on random hidden states in a call that the model really makes.  The limits are those of
`kconvert verify`: shares of the largest value of the stock result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kconvert.authoring.comparing import PLAIN, STOCK, device_of, judged, ran, unreached
from kconvert.authoring.report import Check, Outcome
from kconvert.authoring.subject import CALL_SIZES, Trial
from kconvert.kernels.packing import pack_state, unpack_state
from kconvert.kernels.probe import Call, forked_random_state
from kconvert.parity.compare import Output, compare_outputs
from kconvert.parity.inputs import ModuleInput, cast_module, run_chain
from kconvert.parity.loading import dtype_name, reference_only
from kconvert.parity.tolerances import MODULE_LIMITS, REFERENCE_LIMITS, limit_of

__all__ = [
    "GRADIENT_LIMIT",
    "NUMERICS_DTYPES",
    "check_gradient",
    "check_inverse",
    "check_numerics",
    "check_reference",
    "check_shapes",
]

NUMERICS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

GRADIENT_LIMIT = 1e-4
"""Of a float32 gradient, as a share of the largest value of the reference's.  A backward adds up over all tokens: ten
times the limit of the forward.  The kernels of the templates were measured at 4e-7 at most."""

_REFERENCE = "the reference"
_MAPPING_FIX = "check the order of parts in the conversion_mapping"


def check_inverse(trial: Trial) -> Check:
    """Packing and unpacking have to give every stock tensor back; each value here is another one."""
    numbered: dict[str, torch.Tensor] = {}
    start = 1
    for name, tensor in trial.tensors.items():
        count = tensor.numel()
        numbered[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(tensor.shape)
        start += count
    back = unpack_state(trial.packings, pack_state(trial.packings, numbered))
    wrong = sorted(name for name in numbered if name not in back or not torch.equal(back[name], numbered[name]))
    if wrong or back.keys() != numbered.keys():
        return Check(
            "inverse",
            Outcome.FAILED,
            f"{', '.join(wrong or sorted(back.keys() - numbered.keys()))} does not come back from the packed tensors",
            "the conversion_mapping has to keep every value of every tensor",
        )
    return Check("inverse", Outcome.OK, f"{len(numbered)} stock tensors come back bit for bit")


def check_reference(trial: Trial) -> Check:
    """The stock forward over views of the packed parameters has to give the stock bits."""
    if PLAIN not in trial.inputs:
        return unreached("reference", trial)
    inputs = trial.inputs[PLAIN]
    device = device_of(trial)
    expected = ran("reference", lambda: Output(run_chain(trial.stock, inputs.build(device, None), device)), STOCK)
    if isinstance(expected, Check):
        return expected
    with reference_only(trial.packed):
        found = ran(
            "reference",
            lambda: Output(run_chain((trial.packed,), inputs.build(device, None), device)),
            _REFERENCE,
            _MAPPING_FIX,
        )
    if isinstance(found, Check):
        return found
    limit = limit_of(REFERENCE_LIMITS, dtype_name(inputs.dtype))
    return judged(
        "reference",
        compare_outputs(expected, found),
        limit,
        trial,
        _MAPPING_FIX,
    )


def check_numerics(trial: Trial) -> Iterator[Check]:
    """The kernel beside the stock modules in every dtype that these run in."""
    for dtype in NUMERICS_DTYPES:
        yield _compare(f"numerics {dtype_name(dtype)}", trial, PLAIN, dtype, lambda call: call)


def check_shapes(trial: Trial) -> Iterator[Check]:
    """Shapes at the edge, and hidden states that are not contiguous, in float32."""
    for name in list(CALL_SIZES)[1:]:
        yield _compare(f"shape: {name}", trial, name, torch.float32, lambda call: call)
    yield _compare("shape: not contiguous", trial, PLAIN, torch.float32, _strided)


def _strided(call: Call) -> Call:
    """The same values with a step of two in memory."""

    def spread(value: Any) -> Any:
        is_hidden = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
        return torch.stack([value, value], dim=-1)[..., 0] if is_hidden else value

    return Call(tuple(map(spread, call.args)), {name: spread(value) for name, value in call.kwargs.items()}, None)


def _compare(name: str, trial: Trial, size: str, dtype: torch.dtype, change: Callable[[Call], Call]) -> Check:
    if size not in trial.inputs:
        return unreached(name, trial)
    device, inputs = device_of(trial), trial.inputs[size]
    stock = tuple(cast_module(module, dtype) for module in trial.stock)
    packed = cast_module(trial.packed, dtype)
    expected = ran(name, lambda: Output(run_chain(stock, change(inputs.build(device, dtype)), device)), STOCK)
    if isinstance(expected, Check):
        return expected
    found = ran(name, lambda: Output(run_chain((packed,), change(inputs.build(device, dtype)), device)))
    if isinstance(found, Check):
        return found
    limit = limit_of(MODULE_LIMITS, dtype_name(dtype))
    return judged(
        name, compare_outputs(expected, found), limit, trial, "compare the forward with that of the replaced module"
    )


def check_gradient(trial: Trial) -> Check:
    """Gradients of the input and of every parameter, beside those of the reference, in float32."""
    kernel = trial.kernel
    if not getattr(kernel, "has_backward", True):
        return Check(
            "gradient", Outcome.NOT_RUN, "has_backward is False: where gradients are needed the reference runs"
        )
    if PLAIN not in trial.inputs:
        return unreached("gradient", trial)
    packed = cast_module(trial.packed, torch.float32)
    for weight in packed.parameters():
        weight.requires_grad_(weight.is_floating_point())
    inputs = trial.inputs[PLAIN]
    with reference_only(packed):
        expected = ran("gradient", lambda: _gradients(packed, inputs, device_of(trial)), STOCK)
    if isinstance(expected, Check):
        return expected
    found = ran("gradient", lambda: _gradients(packed, inputs, device_of(trial)))
    fix = "give it a backward, or set has_backward = False"
    if isinstance(found, Check):
        return Check("gradient", Outcome.FAILED, found.text, fix)
    lost = sorted(name for name, value in expected.items() if value is not None and found[name] is None)
    if lost:
        return Check("gradient", Outcome.FAILED, f"{', '.join(lost)} gets no gradient", fix)
    pairs = {name: (value, found[name]) for name, value in expected.items() if value is not None}
    if not pairs:
        return Check("gradient", Outcome.NOT_RUN, "nothing gets a gradient from the stock modules either")
    differences = {name: compare_outputs(Output(one), Output(two)) for name, (one, two) in pairs.items()}
    for name, difference in differences.items():
        checked = judged("gradient", difference, GRADIENT_LIMIT, trial, fix)
        if checked.outcome is Outcome.FAILED:
            return Check("gradient", Outcome.FAILED, f"of {name}: {checked.text}", fix)
    largest = max((each.relative or 0.0 for each in differences.values()), default=0.0)
    names = ", ".join(pairs)
    return Check(
        "gradient", Outcome.OK, f"of {names}: {largest:.1e} of the largest value, allowed {GRADIENT_LIMIT:.2g}"
    )


def _gradients(module: nn.Module, inputs: ModuleInput, device: str) -> dict[str, torch.Tensor | None]:
    """Gradients of a fixed random sum of the output, by name; `input` is the hidden states'."""
    call = inputs.build(device, torch.float32)
    hidden = _hidden(call, inputs)
    if hidden is not None:
        hidden.requires_grad_(True)
    module.zero_grad(set_to_none=True)
    with torch.enable_grad(), forked_random_state(torch.device(device)):
        output: Any = module(*call.args, **call.kwargs)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(inputs.seed)
    total = sum((leaf * torch.randn(leaf.shape, generator=generator).to(leaf)).sum() for leaf in tensors)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    return {**({"input": hidden.grad} if hidden is not None else {}), **found}


def _hidden(call: Call, inputs: ModuleInput) -> torch.Tensor | None:
    """The hidden states of a call that was built from `inputs`."""
    place = inputs.place
    if place is None:
        return None
    value = call.args[place] if isinstance(place, int) else call.kwargs[place]
    return value if isinstance(value, torch.Tensor) else None
