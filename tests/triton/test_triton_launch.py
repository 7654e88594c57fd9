"""How a jitted function is launched: the ways round Triton's own are taken only where they are known to be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from kconvert.kernels.triton import launch
from kconvert.kernels.triton.launch import Launcher, is_known


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.6.1+git1", True), ("3.60.0", False), ("3.7.1", False), ("3.9.0", False)]
)
def test_versions_whose_launcher_was_tried(version: str, known: bool) -> None:
    assert is_known(version) is known


class Function:
    """In the place of a jitted function: notes what it is launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **options: int) -> None:
            self.calls.append((grid, arguments, options))

        return run


def test_an_interpreted_function_gets_its_arguments_in_order() -> None:
    function = Function()
    one, two = torch.zeros(3), torch.ones(2)
    Launcher(function)("key", (2, 1, 1), (one, None, two), (4, 0.5), (True, 16), num_warps=4)
    ((grid, arguments, options),) = function.calls
    assert (grid, options) == ((2, 1, 1), {})
    assert arguments[0] is one
    assert arguments[1:2] == (None,)
    assert arguments[2] is two
    assert arguments[3:] == (4, 0.5, True, 16)


def test_no_programs_are_no_launch() -> None:
    function = Function()
    Launcher(function)("key", (0, 1, 1), (torch.zeros(0),), (), ())
    assert function.calls == []


def test_another_version_goes_tritons_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device too, whatever was compiled before."""
    monkeypatch.setattr(launch, "is_interpreted", lambda function: False)
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    function = Function()
    launcher = Launcher(function)
    for _ in range(2):
        launcher("key", (1, 1, 1), (torch.zeros(4),), (1,), (), num_warps=2)
    assert [options for _, _, options in function.calls] == [{"num_warps": 2}] * 2
