"""What the proofs of norms share: how it is found which formula the class of a norm computes.

The stock forward runs on weights and inputs made for the purpose, never on the model's own, and a formula has to give
the same bits in every case: in three dtypes, with up to four dimensions, on rows so small that eps decides the result
and on large ones, in training and in evaluation.  Gradients have to agree too, within rounding.  Buffers get random
values, so that a forward that reads one is not taken for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from kconvert.kernels.layout import stock_twin
from kconvert.kernels.proof import random_values, same_bits, same_gradients

__all__ = ["Case", "Formula", "eps_of", "find_formula", "structure_reason", "weight_of"]

_Variant = TypeVar("_Variant")
Formula: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor | None], torch.Tensor]
"""Gives the result for the inputs of a forward and a weight."""

_PLAIN = (torch.bfloat16, torch.float32, torch.float16)
# input and weight, as autocast and float32 weights in a bfloat16 model lead to
_MIXED = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_ROWS, _ROWS_OF_LONG, _LONG = 64, 16, 1024
_ANY_SIZES = (48, 7)  # of a norm that has none of its own


@dataclass(frozen=True)
class Case:
    """What a stock forward gave.  `is_mixed` says that its inputs and its weight were not all of one dtype."""

    inputs: tuple[torch.Tensor, ...]
    weight: torch.Tensor | None
    output: object
    is_mixed: bool


def eps_of(module: nn.Module) -> float | str:
    """The instance's eps, or why it is not known."""
    found = {name: getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)}
    if not found:
        return "has no eps"
    values = set(found.values())
    if len(values) != 1:
        return f"has several values for eps: {found}"
    (eps,) = values
    return float(eps) if isinstance(eps, int | float) and not isinstance(eps, bool) else f"its eps is {eps!r}"


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """The parameter `weight`, or None."""
    return module._parameters.get("weight")


def structure_reason(module: nn.Module) -> str | None:
    """Why the module is not built as a norm, or None: one 1-D `weight` and nothing else, or no parameter at all."""
    names = [name for name, _ in module.named_parameters()]
    if any(True for _ in module.children()) or names not in (["weight"], []):
        return "has other parameters than one weight"
    weight = weight_of(module)
    return "its weight is not one-dimensional" if weight is not None and weight.dim() != 1 else None


def find_formula(
    module: nn.Module, eps: float, formulas: Iterable[tuple[_Variant, Formula]], *, kind: str, num_inputs: int = 1
) -> tuple[_Variant, bool] | str:
    """The first formula that gives the bits of the stock forward of `module` everywhere, and its gradients.

    Args:
        module: a norm with or without `weight`, patched or not, on any device; it is not changed.
        eps: its eps.
        formulas: what is tried, in this order.
        kind: what the norm is called, for the reason.
        num_inputs: how many tensors the forward takes, all of one shape.

    Returns:
        The variant, and whether it holds where inputs and weight differ in dtype too; or why there is none.
    """
    with torch.device("cpu"), torch.inference_mode(mode=False), torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        cases: list[Case] = []
        for size in _sizes_of(module):
            for case in _stock_cases(module, size, eps, num_inputs, generator):
                if isinstance(case, str):
                    return case
                cases.append(case)
        for variant, formula in formulas:
            if not all(_holds(formula, case) for case in cases if not case.is_mixed):
                continue
            if not _same_gradients(module, formula, num_inputs, generator):
                return "its gradients are not those of its forward"
            return variant, all(_holds(formula, case) for case in cases if case.is_mixed)
    return f"its forward is no known {kind} variant"


def _holds(formula: Formula, case: Case) -> bool:
    with torch.no_grad():
        try:
            return same_bits(case.output, formula(case.inputs, case.weight))
        except RuntimeError:  # a formula that does not take inputs which the stock forward takes
            return False


def _sizes_of(module: nn.Module) -> tuple[int, ...]:
    weight = weight_of(module)
    return _ANY_SIZES if weight is None else (weight.shape[0],)


def _stock_cases(
    module: nn.Module, size: int, eps: float, num_inputs: int, generator: torch.Generator
) -> Iterator[Case | str]:
    """What the stock forward gives; a text where it does not run."""
    count = _ROWS if size <= _LONG else _ROWS_OF_LONG
    rows = random_values(generator, count, size)
    rows[::2] *= max(eps, 1e-12) ** 0.5
    rows[1::8] *= 1e3
    inputs = (rows, *(random_values(generator, count, size) for _ in range(num_inputs - 1)))
    weight = None if weight_of(module) is None else random_values(generator, size)
    for training, dtypes in product((False, True), _dtypes(num_inputs, weight is not None)):
        *input_dtypes, weight_dtype = dtypes
        given = tuple(each.to(dtype) for each, dtype in zip(inputs, input_dtypes, strict=True))
        own = None if weight is None else weight.to(weight_dtype)
        twin = _twin(module, own, training, generator)
        # one dtype is enough to see what a forward does to shapes
        for number, shaped in enumerate(_shapes(given) if set(dtypes) == {torch.float32} else (given,)):
            try:
                with torch.no_grad():
                    output = twin(*(each.clone() for each in shaped))
            except Exception as error:  # noqa: BLE001 - a foreign forward: another signature or shape
                if number == 0:
                    which = "one tensor" if num_inputs == 1 else f"{num_inputs} tensors"
                    yield f"its forward does not take {which} of two dimensions ({type(error).__name__})"
                    return
                continue
            yield Case(shaped, own, output, len(set(dtypes)) > 1)


def _dtypes(num_inputs: int, has_weight: bool) -> list[tuple[torch.dtype, ...]]:
    """Dtypes of the inputs and the weight, together."""
    made = [(dtype,) * (num_inputs + 1) for dtype in _PLAIN]
    if has_weight:
        made += [(*(x_dtype,) * num_inputs, w_dtype) for x_dtype, w_dtype in _MIXED]
    if num_inputs > 1:
        made += [(x_dtype, *(other,) * (num_inputs - 1), x_dtype) for x_dtype, other in _MIXED]
    return made


def _shapes(inputs: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs `[rows, n]` with up to four dimensions, some of which have only one row, or rows that lie apart."""
    count, size = inputs[0].shape
    some = count // 4
    yield inputs
    yield tuple(each[:1] for each in inputs)
    for shape in ((4, some, size), (count, 1, size), (1, count, size), (2, 2, some, size)):
        yield tuple(each.view(shape) for each in inputs)
    yield tuple(each.view(4, some, size).transpose(0, 1) for each in inputs)


def _twin(
    module: nn.Module,
    weight: torch.Tensor | None,
    training: bool,
    generator: torch.Generator,
) -> nn.Module:
    """A stock instance with this weight and random buffers."""
    twin = stock_twin(module, {} if weight is None else {"weight": nn.Parameter(weight)})
    for name, buffer in module._buffers.items():
        if buffer is not None:
            twin._buffers[name] = random_values(generator, *buffer.shape).to(buffer.dtype)
    twin.training = training
    return twin


def _same_gradients(module: nn.Module, formula: Formula, num_inputs: int, generator: torch.Generator) -> bool:
    """Whether the stock forward and the formula have the same gradients in float32, within rounding."""
    size = _sizes_of(module)[0]
    leaves = [random_values(generator, 8, size).requires_grad_() for _ in range(num_inputs)]
    weight = None if weight_of(module) is None else random_values(generator, size).requires_grad_()
    twin = _twin(module, weight, True, generator)
    wanted = leaves if weight is None else [*leaves, twin.get_parameter("weight")]
    upstream = random_values(generator, 8, size)
    with torch.enable_grad():
        try:
            expected = torch.autograd.grad(twin(*leaves), wanted, upstream)
        except RuntimeError:  # some of it does not require a gradient, or takes none
            return False
        found = torch.autograd.grad(formula(leaves, weight), leaves if weight is None else [*leaves, weight], upstream)
    return same_gradients(found, expected)
