"""The rewrite of a forward: what is refused, what is accepted with the stock values, and what it keeps of the stock one.

Every class here lives in a file of its own, because a forward is rewritten from its source.
"""

from __future__ import annotations

import copy
import importlib.util
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.kernels.joined_calls import NotJoinableError, join_calls
from kconvert.kernels.ops.qkv_proj import layout as layout_module
from kconvert.kernels.ops.qkv_proj.cpu import CpuFusedQKV
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout

PARTS = ("q_proj", "k_proj", "v_proj")
HEAD = '''"""A module made for one test."""

import contextlib
import functools
import operator

import torch
from torch import nn

SCALE = 2.0


def rotate(hidden):
    return hidden * SCALE


def scaled_by(factor):
    def decorate(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return tuple(factor * value for value in function(*args, **kwargs))

        return inner

    return decorate


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 16)
        self.k_proj = nn.Linear(8, 8)
        self.v_proj = nn.Linear(8, 8, bias=True)
        self.in_place = nn.ReLU(inplace=True)

    def twice(self, hidden):
        return 2 * hidden


class Attention(Base):
'''
Make = Callable[..., type[Any]]


def write_module(path: Path, text: str) -> ModuleType:
    """A module from source, under the name of its file; it must be imported once only."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(forward)` is a class with this forward, `make(text, head="")` that of a whole module."""
    names: list[str] = []

    def made(forward: str, *, head: str = HEAD) -> type[Any]:
        names.append(f"kconvert_test_joined_{len(names)}")
        body = textwrap.indent(textwrap.dedent(forward).strip("\n"), "    " if head else "")
        cls: type[Any] = write_module(tmp_path / f"{names[-1]}.py", head + body + "\n").Attention
        return cls

    yield made
    for name in names:
        sys.modules.pop(name, None)


def build(cls: type[Any]) -> Any:
    torch.manual_seed(0)
    return cls().double().eval()


def join(cls: type[nn.Module]) -> Callable[..., Any]:
    return join_calls(cls, "qkv_proj", PARTS)


def check_joined(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """The joined forward gives the stock values with one projection; returns the packed module."""
    stock = build(cls)
    packed: Any = QKVProjLayout.patch([copy.deepcopy(stock)])
    assert CpuFusedQKV.supports(packed) is None, CpuFusedQKV.supports(packed)
    calls = []
    packed.qkv_proj.register_forward_hook(lambda *_: calls.append(1))

    def inputs() -> tuple[Any, ...]:
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in args)

    with torch.no_grad():
        expected = stock.forward(*inputs(), **kwargs)
        found = CpuFusedQKV.forward(packed, *inputs(), **kwargs)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    return packed


def check_refused(cls: type[Any], said: str) -> None:
    """Refused with these words, and the module runs its reference, which has the bits of stock."""
    with pytest.raises(NotJoinableError) as caught:
        join(cls)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    packed: Any = QKVProjLayout.patch([build(cls)])
    assert CpuFusedQKV.supports(packed) == str(caught.value)


HIDDEN = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# --- accepted ---------------------------------------------------------------------------------------------

ACCEPTED = {
    "plain": """
        def forward(self, x):
            q = self.q_proj(x)
            k = self.k_proj(x)
            v = self.v_proj(x)
            return q, k, v
        """,
    "any order": """
        def forward(self, x):
            v = self.v_proj(x)
            q = self.q_proj(x)
            k = self.k_proj(x)
            return q, k, v
        """,
    "in method chains": """
        def forward(self, x):
            shape = (*x.shape[:-1], -1, 4)
            query = rotate(self.q_proj(x).view(shape).transpose(1, 2))
            key = self.twice(self.k_proj(x).view(x.size(0), x.shape[1], -1, 4)).to(x.dtype)
            value = self.v_proj(x).view(shape).transpose(1, 2)
            return query, key, value
        """,
    "one statement": """
        def forward(self, x):
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        """,
    "starred and f-string": """
        def forward(self, x):
            q, k, v = (*[self.q_proj(x)], self.k_proj(x), self.v_proj(x))
            assert f"{q.shape}{k.shape}"
            return q, k, v
        """,
    "the last statement binds the input anew": """
        def forward(self, x):
            q = self.q_proj(x)
            k = self.k_proj(x)
            x = self.v_proj(x)
            return q, k, x
        """,
    "a swap in the last statement": """
        def forward(self, x):
            q, (k, x) = self.q_proj(x), (self.k_proj(x), self.v_proj(x))
            return q, k, x
        """,
    "inside with and if": """
        def forward(self, x, flag=True):
            with torch.autocast("cpu", enabled=False):
                if flag:
                    x = x + 1
                    q = self.q_proj(x)
                    k: torch.Tensor = self.k_proj(x)
                    v = self.v_proj(x)
                else:
                    q = k = v = x
            return q, k, v
        """,
    "inside try and finally": """
        def forward(self, x):
            try:
                q = self.q_proj(x)
                k = self.k_proj(x)
                v = self.v_proj(x)
                return q, k, v
            finally:
                x = None
        """,
    "other reads of the projections": """
        def forward(self, x):
            x = x.to(self.q_proj.weight.dtype)
            q = self.q_proj(x)
            rows = self.k_proj.out_features
            k = self.k_proj(x)[..., :rows] + 0 * self.v_proj.bias.sum()
            v = self.v_proj(x)
            return q, k, v + self.q_proj.weight.sum() - self.q_proj.in_features
        """,
    "changes before and after": """
        def forward(self, x):
            x = x.clone()
            x += 1
            x[0] = 0
            q = self.q_proj(x)
            k = self.k_proj(x)
            v = self.v_proj(x)
            x.mul_(2)
            q *= 3
            k.clamp_(min=0.1)
            return q + x.sum(), k, v
        """,
    "a nested loop that binds the input at its end": """
        def forward(self, x):
            found = []
            for shift in range(2):
                for _ in range(2):
                    q = self.q_proj(x)
                    k = self.k_proj(x)
                    v = self.v_proj(x)
                    found += [q, k, v]
                    x = x + k + shift
            return tuple(found)
        """,
    "an inner function that reads the input": """
        def forward(self, x):
            def late(scale):
                return x * scale

            q = self.q_proj(x)
            k = self.k_proj(x)
            v = self.v_proj(x)
            return q, k + late(2), v
        """,
    "annotations that cannot be evaluated": """
        def forward(self, x: "nothing.at.all", *args: "no", flag: "such" = 1, **kwargs: "type") -> "is":
            q: "here" = self.q_proj(x)
            k = self.k_proj(x)
            v = self.v_proj(x)
            return q * flag, k, v
        """,
    "self by another name": """
        def forward(this, x):
            return this.q_proj(x), this.k_proj(x), this.v_proj(x)
        """,
}


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_an_accepted_forward_has_the_stock_values_with_one_projection(make: Make, name: str) -> None:
    cls = make(ACCEPTED[name])
    if name == "a nested loop that binds the input at its end":
        stock = build(cls)
        packed: Any = QKVProjLayout.patch([copy.deepcopy(stock)])
        with torch.no_grad():
            found, expected = CpuFusedQKV.forward(packed, HIDDEN), stock(HIDDEN)
        assert len(found) == 12
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    else:
        check_joined(cls, HIDDEN)


def test_default_values_are_those_of_the_class(make: Make) -> None:
    """A name in the scope of the class hides the global one, and a mutable value is one object."""
    cls = make("""
        SCALE = 5.0

        def forward(self, x, scale=SCALE, seen=[], *, bias=SCALE + 1):
            seen.append(scale)
            return self.q_proj(x) * scale + bias, self.k_proj(x), self.v_proj(x), tuple(seen)
        """)
    assert join(cls).__defaults__ is cls.forward.__defaults__
    stock, packed = build(cls), QKVProjLayout.patch([build(cls)])
    found = CpuFusedQKV.forward(packed, HIDDEN)
    torch.testing.assert_close(found[0], stock.q_proj(HIDDEN) * 5 + 6)
    assert [found[3], CpuFusedQKV.forward(packed, HIDDEN)[3], stock(HIDDEN)[3]] == [(5.0,), (5.0,) * 2, (5.0,) * 3]


def test_default_values_that_were_changed_while_the_program_ran(make: Make) -> None:
    cls = make("""
        def forward(self, x, scale=1.0, *, bias=0.0):
            return self.q_proj(x) * scale + bias, self.k_proj(x), self.v_proj(x)
        """)
    cls.forward.__defaults__, cls.forward.__kwdefaults__ = (3.0,), {"bias": 7.0}
    packed = check_joined(cls, HIDDEN)
    torch.testing.assert_close(CpuFusedQKV.forward(packed, HIDDEN)[0], packed.q_proj(HIDDEN) * 3 + 7)


DECORATED = """
    SCALE = 5.0

    @scaled_by(SCALE)
    @scaled_by(10.0)
    @torch.no_grad()
    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)
    """


def test_decorators_are_kept_with_their_arguments(make: Make) -> None:
    """They may be made of names in the scope of the class, where a global of the same name is another value."""
    packed = check_joined(make(DECORATED), HIDDEN)
    found = CpuFusedQKV.forward(packed, HIDDEN)
    torch.testing.assert_close(found[1], 50 * packed.k_proj(HIDDEN))
    assert not any(value.requires_grad for value in found)


def test_a_forward_that_was_wrapped_while_the_program_ran_stays_wrapped(make: Make) -> None:
    cls = make(DECORATED)
    inner = cls.forward

    @wraps(inner)
    def forward(self: Any, x: torch.Tensor) -> Any:
        return inner(self, x + 1)

    cls.forward = forward
    packed = check_joined(cls, HIDDEN)
    torch.testing.assert_close(CpuFusedQKV.forward(packed, HIDDEN)[0], 50 * packed.q_proj(HIDDEN + 1))


def test_a_wrapper_that_does_not_hold_what_it_wraps_is_refused(make: Make) -> None:
    """It may run something else."""
    cls = make(ACCEPTED["plain"])

    @wraps(cls.forward)
    def forward(self: Any, x: torch.Tensor) -> Any:
        return x

    cls.forward = forward
    check_refused(cls, "a decorator that cannot be copied")


def test_a_decorator_that_is_no_function_is_refused(make: Make) -> None:
    cls = make(
        HEAD.replace(
            "class Attention(Base):\n",
            """class Held:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

class Attention(Base):
    @Held
    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)
""",
        ),
        head="",
    )
    with pytest.raises(NotJoinableError, match="a decorator that cannot be copied"):
        join(cls)


def test_globals_are_those_of_the_stock_module(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces a function of that module later is seen."""
    cls = make(ACCEPTED["in method chains"])
    packed = check_joined(cls, HIDDEN)
    before = CpuFusedQKV.forward(packed, HIDDEN)[0]
    module = sys.modules[cls.__module__]
    assert join(cls).__globals__ is module.__dict__
    monkeypatch.setattr(module, "SCALE", 20.0)
    torch.testing.assert_close(CpuFusedQKV.forward(packed, HIDDEN)[0], 10 * before)
    monkeypatch.setattr(module, "rotate", lambda hidden: hidden * 0)
    assert not CpuFusedQKV.forward(packed, HIDDEN)[0].any()


@pytest.mark.parametrize("at", ["before", "between", "after"])
def test_a_traceback_shows_the_stock_lines(make: Make, at: str) -> None:
    lines = ["q = self.q_proj(x)", "k = self.k_proj(x)", "v = self.v_proj(x)", "return q, k, v"]
    lines.insert({"before": 0, "between": 1, "after": 3}[at], "y = self.no_such_thing")
    body = "\n".join(f"    {line}" for line in lines)
    cls = make(f"@scaled_by(1.0)\ndef forward(\n    self,\n    x,\n):\n{body}")
    frames = []
    for run in (build(cls).forward, lambda x: CpuFusedQKV.forward(QKVProjLayout.patch([build(cls)]), x)):
        with pytest.raises(AttributeError, match="no_such_thing") as caught:
            run(HIDDEN)
        inside = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.name == "forward"]
        frames.append(
            [(frame.filename, frame.lineno, frame.line) for frame in inside if "joined" in frame.filename][-1]
        )
    assert frames[0] == frames[1]
    assert frames[0][2] == "y = self.no_such_thing"


def test_an_error_in_the_projection_points_at_the_first_of_them(make: Make) -> None:
    packed = check_joined(make(ACCEPTED["plain"]), HIDDEN)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        CpuFusedQKV.forward(packed, HIDDEN[..., :7])
    assert "q = self.q_proj(x)" in [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_the_forward_is_made_once_per_class(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type[Any]] = []

    def counted(stock: type[Any], *args: Any) -> Any:
        made.append(stock)
        return join_calls(stock, *args)

    monkeypatch.setattr(layout_module, "join_calls", counted)
    cls, other = make(ACCEPTED["plain"]), make(ACCEPTED["any order"])
    modules: list[Any] = [QKVProjLayout.patch([build(each)]) for each in (cls, cls, other, cls)]
    assert made == [cls, other]
    assert len({type(module) for module in modules}) == 2
    assert type(modules[0]).kconvert_joined_forward is type(modules[3]).kconvert_joined_forward


def test_the_stock_class_is_not_changed(make: Make) -> None:
    cls = make(ACCEPTED["plain"])
    before, code = dict(vars(cls)), cls.forward.__code__
    check_joined(cls, HIDDEN)
    assert dict(vars(cls)) == before
    assert cls.forward.__code__ is code


def test_an_inherited_forward(make: Make) -> None:
    cls = make(ACCEPTED["in method chains"])
    heir = type("Heir", (cls,), {"twice": lambda self, hidden: 3 * hidden})
    packed = check_joined(heir, HIDDEN)
    torch.testing.assert_close(CpuFusedQKV.forward(packed, HIDDEN)[1].flatten(2), 3 * packed.k_proj(HIDDEN))


# --- refused: where and how the projections are called ------------------------------------------------------------

CALLS = {
    "k_proj 0 times": "q, k, v = self.q_proj(x), x, self.v_proj(x)",
    "k_proj 2 times": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nk = self.k_proj(x)",
    "different inputs: x, y": "y = x\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(y)",
    "gives q_proj something else than one variable": "q, k, v = self.q_proj(x + 0), self.k_proj(x), self.v_proj(x)",
    "gives k_proj something else than one variable": "q, k, v = self.q_proj(x), self.k_proj(input=x), self.v_proj(x)",
    "gives v_proj something else than one variable": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(*x[:1])",
    "v_proj on a condition": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x) if len(x) else x",
    "q_proj on a condition": "q = len(x) > 9 or self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)",
    "k_proj on a condition": "q, k, v = self.q_proj(x), [self.k_proj(x) for _ in (1, 2)][1], self.v_proj(x)",
    "k_proj on a condition ": "q, k, v = self.q_proj(x), {1: self.k_proj(x) for _ in (1, 2)}[1], self.v_proj(x)",
    "k_proj on a condition  ": "q, k, v = self.q_proj(x), {self.k_proj(x) for _ in (1,)}.pop(), self.v_proj(x)",
    "k_proj on a condition   ": "q, k, v = self.q_proj(x), next(self.k_proj(x) for _ in (1, 2)), self.v_proj(x)",
    "k_proj on a condition    ": "q, k, v = self.q_proj(x), (lambda: self.k_proj(x))(), self.v_proj(x)",
    "k_proj in an inner function": (
        "def late():\n    return self.k_proj(x)\n\nq, k, v = self.q_proj(x), late(), self.v_proj(x)"
    ),
    "k_proj in an inner function ": (
        "def late(y=self.k_proj(x)):\n    return y\n\nq, k, v = self.q_proj(x), late(), self.v_proj(x)"
    ),
    "k_proj in an inner function  ": (
        "class Late:\n    found = self.k_proj(x)\n\nq, k, v = self.q_proj(x), Late.found, self.v_proj(x)"
    ),
    "q_proj in the head of a statement": (
        "q = k = v = x\nif self.q_proj(x).sum() < 99:\n    q, k, v = x, self.k_proj(x), self.v_proj(x)"
    ),
    "q_proj in the head of a statement ": (
        "while self.q_proj(x).sum() > 99:\n    pass\nq, k, v = x, self.k_proj(x), self.v_proj(x)"
    ),
    "q_proj in the head of a statement  ": (
        "for q in self.q_proj(x):\n    pass\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "q_proj in the head of a statement   ": (
        "with contextlib.nullcontext(self.q_proj(x)) as q:\n    pass\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "q_proj in the head of a statement    ": (
        "match self.q_proj(x):\n    case q:\n        k, v = self.k_proj(x), self.v_proj(x)"
    ),
    "q_proj in the head of a statement     ": (
        "match x:\n    case _ if self.q_proj(x) is None:\n        pass\nq, k, v = x, self.k_proj(x), self.v_proj(x)"
    ),
    "not in one run of statements": (
        "if len(x):\n    q = self.q_proj(x)\nelse:\n    q = x\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "not in one run of statements ": (
        "with torch.no_grad():\n    q = self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "not in one run of statements  ": (
        "try:\n    q = self.q_proj(x)\nexcept ValueError:\n    q = x\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "not in one run of statements   ": (
        "match x:\n    case None:\n        q = x\n    case _:\n        q = self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "not in one run of statements    ": (
        "if len(x) > 9:\n    q = self.q_proj(x)\nelse:\n    q, k, v = x, self.k_proj(x), self.v_proj(x)"
    ),
    "calls q_proj 0 times": "take = self.q_proj\nq, k, v = take(x), self.k_proj(x), self.v_proj(x)",
    "uses a name of ours": "_kconvert_q_proj = x\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq += len(_kconvert_q_proj)",
    "binds self": "self = self\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
    "uses locals": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq = q * len(locals())",
    "uses vars": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq = q * len(vars())",
    "uses dir": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq = q * len(dir())",
    "uses eval": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq = eval('x')",
    "uses exec": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nexec('pass')",
    "a closure over __class__": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(super().twice(x))",
    "the private name __hidden": "self.__hidden = x\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
    "the private name __y": "__y = x\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x) + len(__y)",
    "the private name __z": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq = dict(__z=q)",
    "shares x with other functions": (
        "def change():\n    nonlocal x\n    x = x + 1\n    return 0\n\n"
        "q = self.q_proj(x)\nq = q + change()\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "shares SHARED with other functions": (
        "global SHARED\nSHARED = x\nq, k, v = self.q_proj(SHARED), self.k_proj(SHARED), self.v_proj(SHARED)"
    ),
    "shares GIVEN with other functions": "q, k, v = self.q_proj(GIVEN), self.k_proj(GIVEN), self.v_proj(GIVEN)",
}


def in_forward(lines: str) -> str:
    return "def forward(self, x):\n" + textwrap.indent(lines, "    ") + "\n    return q, k, v"


@pytest.mark.parametrize("said", list(CALLS))
def test_a_call_of_another_kind_is_refused(make: Make, said: str) -> None:
    check_refused(make(in_forward(CALLS[said])), said.strip())


# --- refused: what happens from the first projection to the last ----------------------------------------------------

CHANGED = "changes a tensor in place between the projections"
MORE = "has more than assignments between the projections"
BETWEEN = {
    # bound anew
    "x = x + 1": "binds x",
    "y, (x, z) = 1, (x, 2)": "binds x",
    "y = (x := x + 1)": "binds x",
    "y = [x := x + i for i in range(2)]": "binds x",
    "y = [x for x in range(2)]": "x between the projections",
    "x: torch.Tensor = x + 1": "binds x",
    "x += 1": MORE,
    "del x": MORE,
    "for x in (x + 1,):\n    pass": MORE,
    "with contextlib.nullcontext(x + 1) as x:\n    pass": MORE,
    "match x + 1:\n    case x:\n        pass": MORE,
    "match [x + 1, 2]:\n    case [x, *z]:\n        pass": MORE,
    "match [2, x + 1]:\n    case [z, *x]:\n        x = x[0]": MORE,
    "match {1: x + 1}:\n    case {1: _, **x}:\n        x = HIDDEN": MORE,
    "try:\n    raise ValueError\nexcept ValueError as x:\n    pass": MORE,
    "import math as x": MORE,
    "def x():\n    pass": MORE,
    "class x:\n    pass": MORE,
    "if len(x):\n    x = x + 1": MORE,
    # changed, under its own name or another
    "y = x.add_(1)": CHANGED,
    "y = alias.add_(1)": CHANGED,
    "y = torch.add(x, 1, out=x)": "between the projections",
    "y = torch.add(alias, 1, out=alias)": CHANGED,
    "y = torch.relu_(alias)": CHANGED,
    "y = torch.nn.functional.relu(alias, inplace=True)": CHANGED,
    "y = operator.iadd(alias, 1)": CHANGED,
    "y = alias.__iadd__(1)": CHANGED,
    "y = alias.__setitem__(0, 1.0)": CHANGED,
    "y = setattr(alias, 'data', 0 * alias)": CHANGED,
    "y = self.in_place(x)": "uses x between the projections",
    "y = x.data.copy_(2 * x)": "between the projections",
    "x[0] = 1": "between the projections",
    "x[..., 0], y = 1, 2": "between the projections",
    "alias[0] = 1": "between the projections",
    "x.data = x + 1": "between the projections",
    "alias.data = x + 1": "between the projections",
    "alias += 1": MORE,
    "alias @= torch.eye(8, dtype=x.dtype)": MORE,
    "x.add_(1)": MORE,
    "torch._foreach_add_([alias], 1)": MORE,
    "self.in_place(alias)": MORE,
    "y = x": "uses x between the projections",
    # anything else that a projection may depend on
    "self.k_proj.weight.data = 2 * self.k_proj.weight.data": "assigns to more than variables",
    "self.k_proj = self.twice": "assigns to more than variables",
    "y = self.k_proj.weight.data.mul_(2)": CHANGED,
    "torch.set_grad_enabled(False)": MORE,
    "y = yield": "is left between the projections",
    "if y is None:\n    return q, q, q": MORE,
    "pass": MORE,
}


@pytest.mark.parametrize("line", list(BETWEEN))
def test_anything_but_plain_assignments_between_the_projections_is_refused(make: Make, line: str) -> None:
    middle = f"y, alias = None, x.view(x.shape)\nq = self.q_proj(x)\n{line}\nk = self.k_proj(x)\nv = self.v_proj(x)"
    check_refused(make(in_forward(middle)), BETWEEN[line])


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("q = [alias.add_(1), self.q_proj(x)][1]", CHANGED),
        ("q = self.in_place(x) + self.q_proj(x)[..., :8]", "uses x between"),
        ("q = (x := x + 1) + self.q_proj(x)[..., :8]", "binds x between"),
        ("q = self.q_proj(x).view(x.sum().long(), -1)", "uses x between"),
    ],
)
def test_what_comes_before_the_projection_in_its_own_statement_counts(make: Make, first: str, said: str) -> None:
    lines = f"alias = x.view(x.shape)\n{first}\nk = self.k_proj(x)\nv = self.v_proj(x)"
    check_refused(make(in_forward(lines)), said)


def test_the_cases_above_would_differ(make: Make) -> None:
    """An input that is changed through another name gives other keys: hoisting the projection is not the same."""
    plain = in_forward("alias = x.view(x.shape)\nq = self.q_proj(x)\n{}k = self.k_proj(x)\nv = self.v_proj(x)")
    cls, other = make(plain.format("y = alias.add_(1)\n    ")), make(plain.format(""))
    with torch.no_grad():
        found, expected = build(cls)(HIDDEN.clone()), build(other)(HIDDEN.clone())
        assert torch.equal(found[0], expected[0])
        assert not torch.allclose(found[1], expected[1])
        packed: Any = QKVProjLayout.patch([build(cls)])
        assert torch.equal(packed.reference(HIDDEN.clone())[1], found[1])


# --- refused: the source --------------------------------------------------------------------------------------------


def test_a_forward_without_a_file_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec(HEAD + textwrap.indent(textwrap.dedent(ACCEPTED["plain"]), "    "), namespace)
    check_refused(namespace["Attention"], "the source of its forward is not")


@pytest.mark.parametrize("forward", [len, property(lambda self: 3), None, nn.Identity()])
def test_a_forward_that_is_no_function_is_refused(make: Make, forward: Any) -> None:
    cls = make(ACCEPTED["plain"])
    cls.forward = forward
    with pytest.raises(NotJoinableError, match="no Python function"):
        join(cls)


@pytest.mark.parametrize(
    "forward",
    [
        "forward = lambda self, x: (self.q_proj(x), self.k_proj(x), self.v_proj(x))",
        "async def forward(self, x):\n    return self.q_proj(x), self.k_proj(x), self.v_proj(x)",
        "def forward(*args):\n    return args[0].q_proj(args[1]), args[0].k_proj(args[1]), args[0].v_proj(args[1])",
        "def forward(self, /, x):\n    return self.q_proj(x), self.k_proj(x), self.v_proj(x)",
    ],
)
def test_a_forward_that_is_no_plain_method_is_refused(make: Make, forward: str) -> None:
    with pytest.raises(NotJoinableError):
        join(make(forward))


def test_a_closure_is_refused(make: Make) -> None:
    text = HEAD.replace("class Attention(Base):\n", "") + textwrap.dedent("""
        def made(factor):
            class Attention(Base):
                def forward(self, x):
                    return self.q_proj(x) * factor, self.k_proj(x), self.v_proj(x)

            return Attention


        Attention = made(3.0)
        """)
    check_refused(make(text, head=""), "a closure over factor")


WITH_CONSTANTS = """
    def forward(self, x, flag=True):
        return self.q_proj(x) * 0.0, self.k_proj(x) + 1, (lambda y: y * 3)(self.v_proj(x)), (1, 2)
    """


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 1", "+ 2"),
        ("+ 1", "+ True"),
        ("* 0.0", "* -0.0"),
        ("(1, 2)", "(1.0, 2)"),
        ("y * 3", "y * 4"),
        ("lambda y: y * 3", "lambda y, *z: y * 3"),
        ("self.k_proj(x) + 1", "self.k_proj(x) - 1"),
        ("x, flag=True", "x, *, flag=True"),
        ("def forward", "\n    def forward"),
        ("def forward", "async def forward"),
    ],
)
def test_a_file_that_has_changed_since_the_import_is_refused(make: Make, old: str, new: str) -> None:
    """A package that is updated while the program runs."""
    cls = make(WITH_CONSTANTS)
    assert join(cls) is not None
    path = Path(str(sys.modules[cls.__module__].__file__))
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new) + "# of another size, so that the change is seen\n", encoding="utf-8")
    with pytest.raises(NotJoinableError, match=r"source of its forward is not|no plain method"):
        join(cls)


@pytest.mark.parametrize("text", ["", "def (:", "x = 1\n", "\0"])
def test_a_file_of_something_else_is_refused(make: Make, text: str) -> None:
    cls = make(ACCEPTED["plain"])
    Path(str(sys.modules[cls.__module__].__file__)).write_text(text, encoding="utf-8")
    check_refused(cls, "source of its forward is not")


def test_a_function_from_elsewhere_is_looked_up_where_it_was_written(make: Make) -> None:
    cls, other = make(ACCEPTED["plain"]), make(ACCEPTED["any order"])
    cls.forward = other.forward
    check_joined(cls, HIDDEN)
    other.forward.__code__ = other.forward.__code__.replace(co_filename=str(sys.modules[cls.__module__].__file__))
    with pytest.raises(NotJoinableError, match="is not that of the function"):
        join(cls)


def test_lines_that_were_put_into_the_line_cache_do_not_stand_for_the_file(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = make(ACCEPTED["plain"])
    file = str(sys.modules[cls.__module__].__file__)
    lines = [line.replace("self.k_proj(x)", "self.k_proj(x) * 2") for line in linecache.getlines(file)]
    monkeypatch.setitem(linecache.cache, file, (sum(map(len, lines)), None, lines, file))
    with pytest.raises(NotJoinableError, match="is not that of the function"):
        join(cls)


def test_a_source_file_with_a_future_import(make: Make) -> None:
    """The compiler's flags are those of the file, not of this one."""
    check_joined(
        make("from __future__ import annotations\n" + HEAD.partition('"""\n')[2] + in_class("plain"), head=""), HIDDEN
    )


def in_class(name: str) -> str:
    return textwrap.indent(textwrap.dedent(ACCEPTED[name]).strip("\n"), "    ")
