"""What a class of stacked experts computes, found by running its own forward.

The forward runs on small random parameters in float64, with inputs of several magnitudes and in both modes, and is held
against the formula with every gate that is known.  Numbers that a gate has, such as a limit, are tried out of those
that the instance keeps.  A forward that no gate reproduces is refused, and so is one whose class has another gate for
other implementations of experts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.layout import stock_twin

__all__ = ["BIASES", "WEIGHTS", "ExpertsVariant", "find_variant", "is_shaped"]

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
_MOST_EXPERTS, _HIDDEN, _HALF, _TOKENS, _MOST_CHOICES = 3, 8, 6, 32, 2
"""Sizes that the stock forward is tried with; no two dimensions of a weight are alike."""


class ExpertsVariant(NamedTuple):
    """What the experts compute: their gate, and whether the weights are `[E, inputs, outputs]`."""

    gate: GatedVariant
    is_transposed: bool


class _Case(NamedTuple):
    """One call of the stock forward; in the choices that name no expert there, `ids` holds -1."""

    hidden_states: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    found: torch.Tensor


def is_shaped(parameters: Mapping[str, torch.Tensor], *, is_transposed: bool) -> bool:
    """Whether the shapes go together, one way or the other."""
    gate_up, down = (parameters[name].shape for name in WEIGHTS)
    if is_transposed:
        gate_up, down = (torch.Size((shape[0], shape[2], shape[1])) for shape in (gate_up, down))
    num_experts, both, hidden = gate_up
    if down != (num_experts, hidden, both // 2) or both % 2:
        return False
    expected = {"gate_up_proj_bias": (num_experts, both), "down_proj_bias": (num_experts, hidden)}
    return all(parameters[name].shape == shape for name, shape in expected.items() if name in parameters)


class _EagerConfig:
    """A module's config, seen by a copy of it that runs the forward of its own class."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def find_variant(module: nn.Module) -> tuple[ExpertsVariant | None, str]:
    """The variant of the stock forward, or None and why it is none that is known."""
    reason = ""
    # a dropout of the stock class draws from the global generator, which is the user's
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for is_transposed in (False, True):
            if not is_shaped(dict(module.named_parameters()), is_transposed=is_transposed):
                continue
            gate, why_not = _find_gate(module, is_transposed=is_transposed)
            if gate is not None:
                return ExpertsVariant(gate, is_transposed), ""
            reason = reason or why_not
    return None, reason


def _find_gate(module: nn.Module, *, is_transposed: bool) -> tuple[GatedVariant | None, str]:
    generator = torch.Generator().manual_seed(0)
    made = _random_parameters(module, generator, is_transposed=is_transposed)
    numbers = _numbers(module)
    try:
        cases = list(_cases(module, made, generator, largest=max(numbers, default=1.0)))
    except Exception as error:  # noqa: BLE001 - another signature, or sizes read from the config
        return None, f"its forward does not run on other sizes ({type(error).__name__})"
    if any(case.found.shape != case.hidden_states.shape for case in cases):
        return None, "its forward does not give one tensor of the tokens' shape"
    products = [_products(case, made, is_transposed=is_transposed) for case in cases]
    for gate in _gates(numbers):
        pairs = zip(cases, products, strict=True)
        if all(_is_same(case.found, _result(case, both, made, gate, is_transposed)) for case, both in pairs):
            if not _is_gate_of_others(module, made, gate, generator):
                return None, "its _apply_gate is not the gate of its forward"
            return gate, ""
    return None, "its forward is not that of experts with a gate that is known"


def _random_parameters(
    module: nn.Module, generator: torch.Generator, *, is_transposed: bool
) -> dict[str, nn.Parameter | None]:
    """Small ones in place of the module's, which may have None under a name."""
    num_experts = min(_num_experts(module), _MOST_EXPERTS)
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (num_experts, _HIDDEN, 2 * _HALF) if is_transposed else (num_experts, 2 * _HALF, _HIDDEN),
        "down_proj": (num_experts, _HALF, _HIDDEN) if is_transposed else (num_experts, _HIDDEN, _HALF),
        "gate_up_proj_bias": (num_experts, 2 * _HALF),
        "down_proj_bias": (num_experts, _HIDDEN),
    }
    return {
        name: None
        if value is None
        else nn.Parameter(torch.randn(shapes[name], generator=generator, dtype=torch.float64))
        for name, value in module._parameters.items()
    }


def _num_experts(module: nn.Module) -> int:
    return cast("torch.Tensor", module._parameters["down_proj"]).shape[0]


def _numbers(module: nn.Module) -> list[float]:
    """The numbers that an instance keeps: one of them may be a limit or a factor.  Which, only a run can tell."""
    values = (value for value in vars(module).values() if type(value) in (int, float))
    return sorted({float(value) for value in values if value > 0 and math.isfinite(value)})


def _gates(numbers: Sequence[float]) -> Iterator[GatedVariant]:
    limits = (None, *numbers)
    for limit, is_up_first, is_interleaved in product(limits, (False, True), (False, True)):
        for activation in ("silu", "gelu", "gelu_tanh"):
            gate = GatedVariant(activation, limit, is_up_first=is_up_first, is_interleaved=is_interleaved)
            yield gate
        for alpha in dict.fromkeys((1.0, 1.702, *numbers)):
            yield GatedVariant("swiglu_oai", limit, alpha, is_up_first, is_interleaved)


def _cases(
    module: nn.Module, made: dict[str, nn.Parameter | None], generator: torch.Generator, *, largest: float
) -> Iterator[_Case]:
    """Calls of the stock forward: tokens of all magnitudes in both modes, and one with choices that name no expert.

    Raises:
        Exception: whatever the stock forward raises on small parameters.
    """

    num_experts = min(_num_experts(module), _MOST_EXPERTS)

    def call(scale: float, *, training: bool, outside: int | None = None) -> _Case:
        twin = _eager_twin(module, made, training=training)
        hidden = scale * torch.randn(_TOKENS, _HIDDEN, generator=generator, dtype=torch.float64)
        ids = torch.rand(_TOKENS, num_experts, generator=generator).argsort(dim=1)[:, :_MOST_CHOICES]
        weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        if outside is not None:
            ids[::3, 0] = outside
        found = twin(hidden.clone(), ids.clone(), weights.clone())
        if not isinstance(found, torch.Tensor):
            raise TypeError("no tensor")
        return _Case(hidden, torch.where(ids < num_experts, ids, -1), weights, found)

    for scale, training in product((1.0, 0.1, 100.0, 10.0 * largest), (False, True)):
        yield call(scale, training=training)
    with suppress(RuntimeError, IndexError):  # of a class that knows of no such choice
        # what expert parallelism passes for the experts of other ranks
        yield call(1.0, training=False, outside=_num_experts(module))


def _eager_twin(module: nn.Module, made: Mapping[str, nn.Parameter | None], *, training: bool) -> nn.Module:
    children = {name: copy.deepcopy(child).train(training) for name, child in module.named_children()}
    twin = stock_twin(module, made, children)
    twin.training = training
    if "config" in twin.__dict__:
        twin.__dict__["config"] = _EagerConfig(twin.__dict__["config"])
    return twin


def _weight(made: Mapping[str, nn.Parameter | None], name: str, ids: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    weight = cast("torch.Tensor", made[name])
    return (weight if is_transposed else weight.transpose(1, 2))[ids.clamp(min=0)]


def _products(case: _Case, made: Mapping[str, nn.Parameter | None], *, is_transposed: bool) -> torch.Tensor:
    """Gate and up of every choice, `[T, k, 2 * m]`."""
    weight = _weight(made, "gate_up_proj", case.ids, is_transposed)
    both = torch.einsum("tn,tknm->tkm", case.hidden_states, weight)
    bias = made.get("gate_up_proj_bias")
    return both if bias is None else both + bias[case.ids.clamp(min=0)]


def _result(
    case: _Case,
    both: torch.Tensor,
    made: Mapping[str, nn.Parameter | None],
    gate: GatedVariant,
    is_transposed: bool,
) -> torch.Tensor:
    weight = _weight(made, "down_proj", case.ids, is_transposed)
    rows = torch.einsum("tkm,tkmn->tkn", gated_formula(both, gate), weight)
    bias = made.get("down_proj_bias")
    if bias is not None:
        rows = rows + bias[case.ids.clamp(min=0)]
    return (rows * (case.weights * (case.ids >= 0))[..., None]).sum(dim=1)


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = float(expected.abs().max())
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-12 * scale)


def _is_gate_of_others(
    module: nn.Module, made: Mapping[str, nn.Parameter | None], gate: GatedVariant, generator: torch.Generator
) -> bool:
    """Whether other implementations of experts, which call a method for the gate, have the same one."""
    method = getattr(_eager_twin(module, made, training=False), "_apply_gate", None)
    if method is None:
        return True
    both = 10.0 * torch.randn(_TOKENS, 2 * _HALF, generator=generator, dtype=torch.float64)
    return _is_same(method(both), gated_formula(both, gate))
