"""Constructor arguments of replaced modules: every way of passing them, and no trace of the hook afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.runtime.capture import capture_constructors
from tests.packages.helpers import load, logits, replace, run_recipe, stock, write_package


class Norm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6, *extra: Any, scale: float = 2.0, **others: Any) -> None:
        super().__init__()
        self.seen = (size, eps, extra, scale, others)
        size = -1  # what the constructor does with its names afterwards is of no interest


class OuterNorm(Norm):
    def __init__(self, size: int) -> None:
        super().__init__(size + 1, 1e-3, scale=5.0)


class PlainNorm(Norm):
    """Takes its constructor from its parent."""


class ClosureNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.get = lambda: (self, size, eps)


class FailingNorm(nn.Module):
    def __init__(self, size: int) -> None:
        raise ZeroDivisionError(size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(1), Norm(2, 3.0)


NAMES = {cls.__name__ for cls in (Norm, OuterNorm, PlainNorm, ClosureNorm)}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "positional": ((4, 1e-5), {}, (4, 1e-5), {"scale": 2.0}),
    "keyword": ((), {"eps": 1e-5, "size": 4}, (4, 1e-5), {"scale": 2.0}),
    "mixed": ((4,), {"eps": 1e-5}, (4, 1e-5), {"scale": 2.0}),
    "defaults": ((4,), {}, (4, 1e-6), {"scale": 2.0}),
    "varargs": ((4, 1e-5, "a", "b"), {}, (4, 1e-5, "a", "b"), {"scale": 2.0}),
    "keyword only": ((4,), {"scale": 3.0}, (4, 1e-6), {"scale": 3.0}),
    "varkw": ((4,), {"other": 1}, (4, 1e-6), {"scale": 2.0, "other": 1}),
    "everything": ((4, 1e-5, "a"), {"scale": 3.0, "other": 1}, (4, 1e-5, "a"), {"scale": 3.0, "other": 1}),
}


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    profile, trace = sys.getprofile(), sys.gettrace()
    sys.setprofile(None)
    sys.settrace(None)
    yield
    left = (sys.getprofile(), sys.gettrace())
    sys.setprofile(profile)
    sys.settrace(trace)
    assert left == (None, None)


@pytest.mark.parametrize("how", list(CALLS))
def test_arguments_as_they_were_passed(how: str) -> None:
    args, kwargs, positional, keywords = CALLS[how]
    with capture_constructors(NAMES) as calls:
        module = Norm(*args, **kwargs)
    assert calls.arguments(module) == (positional, keywords)
    assert Norm(*positional, **keywords).seen == module.seen


def test_a_subclass_is_recorded_once_with_the_outermost_arguments() -> None:
    with capture_constructors(NAMES) as calls:
        module = OuterNorm(7)
    assert calls.arguments(module) == ((7,), {})
    assert module.seen == (8, 1e-3, (), 5.0, {})


def test_inherited_and_closing_constructors() -> None:
    with capture_constructors(NAMES) as calls:
        plain, closing = PlainNorm(7), ClosureNorm(3)
    assert calls.arguments(plain) == ((7, 1e-6), {"scale": 2.0})
    assert calls.arguments(closing) == ((3, 1e-6), {})


def test_each_instance_has_its_own_arguments() -> None:
    with capture_constructors(NAMES) as calls:
        block = Block()
        for size in range(100):
            Norm(size)  # dies at once; its id must not be taken by the next one
        last = Norm(1000)
    assert calls.arguments(block.first)[0] == (1, 1e-6)
    assert calls.arguments(block.second)[0] == (2, 3.0)
    assert calls.arguments(last)[0] == (1000, 1e-6)


def test_other_classes_and_later_modules_are_not_recorded() -> None:
    with capture_constructors({"Norm"}) as calls:
        other = OuterNorm(1)
    later = Norm(1)
    for module in (other, later):
        with pytest.raises(UsageError, match="were not seen"):
            calls.arguments(module)


def test_another_thread_is_unaffected() -> None:
    made: list[Norm] = []
    hooks: list[Any] = []

    def work() -> None:
        hooks.append((sys.getprofile(), sys.gettrace()))
        made.append(Norm(5))

    with capture_constructors(NAMES) as calls:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert hooks == [(None, None)]
    with pytest.raises(UsageError):
        calls.arguments(made[0])


def test_nothing_is_installed_where_nothing_is_wanted() -> None:
    with capture_constructors(set()):
        assert sys.getprofile() is None
        assert sys.gettrace() is None


def test_the_hook_is_gone_after_an_exception() -> None:
    def fail() -> None:
        with capture_constructors({"FailingNorm"}):
            assert sys.getprofile() is not None
            FailingNorm(1)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sys.getprofile() is None


def test_beside_a_profiler_the_tracer_is_used_and_both_are_as_before() -> None:
    events: list[str] = []

    def profiler(frame: Any, event: str, _: Any) -> None:
        events.append(event)

    sys.setprofile(profiler)
    try:
        with capture_constructors(NAMES) as calls:
            assert sys.getprofile() is profiler
            assert sys.gettrace() is not None
            module = Norm(4)
        assert sys.getprofile() is profiler
        assert sys.gettrace() is None
    finally:
        sys.setprofile(None)
    assert calls.arguments(module) == ((4, 1e-6), {"scale": 2.0})
    assert "call" in events


def test_beside_a_tracer_the_profiler_is_used_and_the_tracer_stays() -> None:
    def tracer(frame: Any, event: str, _: Any) -> None:
        return None

    sys.settrace(tracer)
    try:
        with capture_constructors(NAMES) as calls:
            module = Norm(4)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert calls.arguments(module)[0] == (4, 1e-6)


def test_beside_both_it_is_refused_and_both_stay() -> None:
    def hook(frame: Any, event: str, _: Any) -> None:
        return None

    sys.setprofile(hook)
    sys.settrace(hook)
    try:
        with pytest.raises(UsageError, match="profiler and a tracer"), capture_constructors(NAMES):
            pass
        left = (sys.getprofile(), sys.gettrace())
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    assert left == (hook, hook)


RECORDING = r"""
SEEN = []

class Norm:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale * wide.to(hidden_states.dtype)

class NormLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"(q_norm|input_layernorm)\.weight", r"\1.scale")]

    def __init__(self, *args, **kwargs):
        super().__init__()
        SEEN.append((args, kwargs))
        self.scale = nn.Parameter(torch.ones(args[0]))
        self.eps = args[1]
"""


def test_the_layout_gets_what_the_model_passed(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, RECORDING)
    patches = "".join(
        replace("./package:Norm", f"model.layers.*.{name}") for name in ("self_attn.q_norm", "input_layernorm")
    )
    output = run_recipe(tmp_path, patches, qwen3_dir)
    model = load(output)
    package = sys.modules[
        next(
            cls for cls in type(model.model.layers[0].input_layernorm).__mro__ if cls.__name__ == "NormLayout"
        ).__module__
    ]
    assert {args for args, _ in package.SEEN} == {(32, 1e-6), (16, 1e-6)}
    assert {model.model.layers[0].input_layernorm.scale.shape, model.model.layers[0].self_attn.q_norm.scale.shape} == {
        torch.Size([32]),
        torch.Size([16]),
    }
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_loading_under_a_profiler(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, RECORDING)
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)

    def profiler(frame: Any, event: str, _: Any) -> None:
        return None

    sys.setprofile(profiler)
    try:
        model = load(output)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)
