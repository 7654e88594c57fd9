"""Which router a class is, found by running its own forward.

The forward runs on random weights of the instance's sizes, on hidden states whose logits are ordinary, far apart, all but a
few far below, all far below zero and all equal, in three dtypes and both modes.  Logits, weights and indices have to be the
bits that a variant gives, and so, within rounding, the gradients.  Numbers that an instance keeps are tried where a variant has
one: a factor, the number of groups.  A forward that no variant reproduces is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from kconvert.kernels.layout import stock_class_of, stock_twin
from kconvert.kernels.proof import plain_key, random_values, same_bits, same_gradients
from kconvert.kernels.router_variant import Groups, RouterVariant, router_formula, router_logits

__all__ = ["CHOICE_BIAS", "find_router", "is_given_bias"]

CHOICE_BIAS = "e_score_correction_bias"
"""What transformers calls the bias of the choice: a tensor of the router, or an input of its forward."""

_TOKENS = 32
_CLIFFS = 16
"""How often weights are drawn by which most scores are exactly 0: only then it shows what is chosen of these."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPS = (None, 0.0, 1e-20)

_Tensors = dict[str, torch.Tensor]


class _Case(NamedTuple):
    """One call of the stock forward: its input, its parameters and buffers by name, and what it gave."""

    hidden: torch.Tensor
    tensors: _Tensors
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


_FOUND: dict[tuple[object, ...], RouterVariant | str] = {}


def find_router(module: nn.Module) -> RouterVariant | str:
    """The variant of the stock forward of `module`, or why it is none that is known.

    Args:
        module: `weight` `[E, n]`, maybe `bias` and a bias of the choice, and an int `top_k`; patched or not, on any device.  It
            is not changed.
    """
    key = plain_key(module)
    if key is None:
        return _find(module)
    if key not in _FOUND:
        _FOUND[key] = _find(module)
    return _FOUND[key]


def is_given_bias(module: nn.Module) -> bool:
    """Whether the stock forward takes the bias of the choice beside the hidden states."""
    _, *names = signature(stock_class_of(module).forward).parameters
    return names[1:] == [CHOICE_BIAS]


def _find(module: nn.Module) -> RouterVariant | str:
    # a jitter of the stock class draws from the global generator, which is the user's
    with torch.device("cpu"), torch.inference_mode(mode=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        try:
            cases = list(_cases(module, generator))
        except Exception as error:  # noqa: BLE001 - a foreign forward: another signature, another result
            return f"its forward does not give logits, weights and indices of rows ({type(error).__name__})"
        flattens = _flattens(module, generator)
        for start in _products(module, flattens=flattens):
            made = [
                router_logits(case.hidden, case.tensors["weight"], case.tensors.get("bias"), start) for case in cases
            ]
            if not all(same_bits(found, case.logits) for found, case in zip(made, cases, strict=True)):
                continue
            for variant in _variants(module, start):
                if all(_holds(variant, logits, case) for logits, case in zip(made, cases, strict=True)):
                    if not _same_gradients(module, variant, generator):
                        return "its gradients are not those of its forward"
                    return variant
    return "its forward is no known router variant"


def _shape(module: nn.Module) -> tuple[int, int]:
    num_experts, hidden = cast("torch.Tensor", module._parameters["weight"]).shape
    return num_experts, hidden


def _made(module: nn.Module, generator: torch.Generator) -> _Tensors:
    """Random parameters and buffers in float32, for logits of about 1."""
    num_experts, hidden = _shape(module)
    made = {"weight": random_values(generator, num_experts, hidden) / hidden**0.5}
    named = (*module._parameters.items(), *module._buffers.items())
    biases = [name for name, each in named if each is not None and name != "weight"]
    biases += [CHOICE_BIAS] if is_given_bias(module) else []
    return made | {name: 0.5 * random_values(generator, num_experts) for name in biases}


def _twin(module: nn.Module, tensors: _Tensors, *, training: bool) -> nn.Module:
    parameters = {
        name: None if each is None else nn.Parameter(tensors[name]) for name, each in module._parameters.items()
    }
    twin = stock_twin(module, parameters)
    twin._buffers.update({name: tensors[name] for name, each in module._buffers.items() if each is not None})
    twin.training = training
    return twin


def _call(twin: nn.Module, hidden: torch.Tensor, tensors: _Tensors) -> Any:
    """What a twin of these tensors gives for `hidden`, and for the bias where it takes one."""
    return twin(hidden, tensors[CHOICE_BIAS]) if is_given_bias(twin) else twin(hidden)


def _cases(module: nn.Module, generator: torch.Generator) -> Iterator[_Case]:
    """Raises: whatever the stock forward raises, and TypeError where it gives something else."""
    num_experts, width = _shape(module)
    made = _made(module, generator)
    rows = random_values(generator, _TOKENS, width)
    sunk = {**made, "weight": made["weight"].abs()}
    inputs = (
        (rows, made),
        (100.0 * rows, made),
        (-80.0 * rows.abs() / width**0.5, sunk),  # logits of about -50, where an eps shows
        (0.0 * rows, made),
    )
    for (hidden, tensors), dtype, training in product(inputs, _DTYPES, (False, True)):
        # the bias of the choice stays float32 in models, whatever dtype these have
        own = {name: each if name == CHOICE_BIAS else each.to(dtype) for name, each in tensors.items()}
        yield _case(module, hidden.to(dtype), own, training=training)
    single = torch.eye(width).repeat(-(-_TOKENS // width), 1)[:_TOKENS]
    for _ in range(_CLIFFS):
        is_low = torch.rand(num_experts, width, generator=generator) < 0.8
        weight = torch.where(is_low, -300.0, 3.0 * random_values(generator, num_experts, width))
        yield _case(module, single, {**made, "weight": weight}, training=False)


def _case(module: nn.Module, hidden: torch.Tensor, tensors: _Tensors, *, training: bool) -> _Case:
    found = _call(_twin(module, tensors, training=training), hidden.clone(), tensors)
    logits, weights, index = found
    if type(found) is not tuple or logits.shape != (_TOKENS, _shape(module)[0]) or index.dtype != torch.int64:
        raise TypeError("another result")
    return _Case(hidden, tensors, logits, weights, index)


def _flattens(module: nn.Module, generator: torch.Generator) -> bool:
    """Whether hidden states of three dimensions give what their rows give."""
    _, width = _shape(module)
    made = _made(module, generator)
    twin, rows = _twin(module, made, training=False), random_values(generator, _TOKENS, width)
    try:
        found, expected = (_call(twin, hidden, made) for hidden in (rows.view(2, _TOKENS // 2, width), rows))
    except Exception:  # noqa: BLE001 - a forward that takes rows only
        return False
    return all(map(same_bits, found, expected))


def _products(module: nn.Module, *, flattens: bool) -> Iterator[RouterVariant]:
    """Variants that differ in how the logits are made; what follows is not said yet."""
    for made in ("own", "cast", "wide"):
        yield RouterVariant(vars(module)["top_k"], product=made, flattens=flattens)


def _variants(module: nn.Module, start: RouterVariant) -> Iterator[RouterVariant]:
    """Every variant with the logits of `start`."""
    own = vars(module)
    factors = dict.fromkeys((1.0, *(value for value in own.values() if type(value) is float)))
    is_kept = CHOICE_BIAS in module._parameters or CHOICE_BIAS in module._buffers
    biases = (True, False) if is_kept or is_given_bias(module) else (False,)
    for scores, eps, factor, casts, has_bias, groups, is_sorted in product(
        ("softmax", "sigmoid", "logits"), _EPS, factors, (True, False), biases, _groups(own), (True, False)
    ):
        yield start._replace(
            scores=scores,
            eps=eps,
            factor=factor,
            casts=casts,
            has_bias=has_bias,
            groups=groups,
            is_sorted=is_sorted,
        )


def _groups(own: dict[str, Any]) -> Iterator[Groups | None]:
    yield None
    num_groups, num_kept = own.get("num_group", own.get("n_group")), own.get("topk_group")
    if isinstance(num_groups, int) and isinstance(num_kept, int):
        for by_two, masks_with_zero in product((True, False), (False, True)):
            yield Groups(num_groups, num_kept, by_two, masks_with_zero)


def _holds(variant: RouterVariant, logits: torch.Tensor, case: _Case) -> bool:
    try:
        found = router_formula(logits, case.tensors.get(CHOICE_BIAS), variant, case.hidden.dtype)
    except RuntimeError:  # sizes that the variant does not take
        return False
    # a sum of weights may be 0, and is divided by
    return all(same_bits(*pair, equal_nan=True) for pair in zip(found, (case.weights, case.ids), strict=True))


def _same_gradients(module: nn.Module, variant: RouterVariant, generator: torch.Generator) -> bool:
    """Whether the stock forward and the formula have the same gradients in float32, within rounding."""
    num_experts, width = _shape(module)
    tensors = _made(module, generator)
    names = [name for name, each in module._parameters.items() if each is not None and name != CHOICE_BIAS]
    hidden = random_values(generator, _TOKENS, width).requires_grad_()
    upstream = (random_values(generator, _TOKENS, num_experts), random_values(generator, _TOKENS, variant.top_k))
    with torch.enable_grad():
        leaves = {name: tensors[name].clone().requires_grad_() for name in names}
        twin = _twin(module, tensors, training=True)
        own = [twin.get_parameter(name) for name in names]
        try:
            expected = torch.autograd.grad(_call(twin, hidden, tensors)[:2], [hidden, *own], upstream)
        except RuntimeError:  # some of it does not require a gradient, or takes none
            return False
        logits = router_logits(hidden, leaves["weight"], leaves.get("bias"), variant)
        weights, _ = router_formula(logits, tensors.get(CHOICE_BIAS), variant, hidden.dtype)
        found = torch.autograd.grad((logits, weights), [hidden, *leaves.values()], upstream)
    return same_gradients(found, expected)
