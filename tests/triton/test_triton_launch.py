"""How a jitted function is launched: the ways round Triton's own are taken only where they are known to be right."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kconvert.kernels.triton import launch
from kconvert.kernels.triton.launch import Kernel, Launch, is_known

_STREAM = 7000
_METADATA = (4, 1, 0)


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.6.1+git1", True), ("3.60.0", False), ("3.7.1", False), ("3.9.0", False)]
)
def test_versions_whose_launcher_was_tried(version: str, known: bool) -> None:
    assert is_known(version) is known


class Tensor:
    """In the place of a tensor on a GPU."""

    dtype = torch.float32

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device = address, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


class Run:
    """In the place of Triton's launcher of a compiled function: notes what it is called with, and its C function."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.c_calls: list[tuple[Any, ...]] = []
        self.launch = lambda *arguments: self.c_calls.append(arguments)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Function:
    """In the place of a jitted function: notes what it is launched with, and gives a compiled one each time."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.runs: list[Run] = []
        self._attributes = attributes

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: int) -> Any:
            self.calls.append((grid, arguments, options))
            self.runs.append(Run(**self._attributes))
            return SimpleNamespace(run=self.runs[-1], function=f"function {len(self.runs)}", packed_metadata=_METADATA)

        return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Functions are compiled, by a version that is known, and two devices are there: `current` is the one in use."""
    state = SimpleNamespace(current=0)

    class Current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, state.current = state.current, self.index

        def __exit__(self, *error: object) -> None:
            state.current = self.before

    monkeypatch.setattr(launch, "is_interpreted", lambda function: False)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: _STREAM + device, raising=False)
    return state


def _launch(
    kernel: Kernel, *tensors: Any, grid: tuple[int, int, int] = (2, 3, 1), numbers: tuple[float, ...] = (5, 0.5)
) -> None:
    Launch(kernel, grid, numbers)(*tensors)


def test_an_interpreted_function_gets_its_arguments_in_order() -> None:
    function = Function()
    one, two = torch.zeros(3), torch.ones(2)
    _launch(Kernel(function, (True, 16), num_warps=4), one, None, two)
    ((grid, arguments, options),) = function.calls
    assert (grid, options) == ((2, 3, 1), {})
    assert arguments[0] is one
    assert arguments[1:2] == (None,)
    assert arguments[2] is two
    assert arguments[3:] == (5, 0.5, True, 16)


def test_no_programs_are_no_launch() -> None:
    function = Function()
    _launch(Kernel(function, ()), torch.zeros(0), grid=(0, 1, 1), numbers=())
    assert function.calls == []


@pytest.mark.parametrize("device", [0, 1])
def test_no_programs_are_no_launch_on_a_gpu(device: int, gpu: SimpleNamespace) -> None:
    function = Function()
    kernel = Kernel(function, ())
    _launch(kernel, Tensor(64, device))
    _launch(kernel, Tensor(64, device), grid=(1, 0, 1))
    assert len(function.calls) == 1
    assert function.runs[0].c_calls == []


@pytest.mark.parametrize("device", [0, 1])
def test_another_version_goes_tritons_own_way(
    device: int, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any device too, however often."""
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    function = Function()
    kernel = Kernel(function, (16,), num_warps=2)
    one = Tensor(64, device)
    for _ in range(3):
        _launch(kernel, one, None)
    assert function.calls == [((2, 3, 1), (one, None, 5, 0.5, 16), {"num_warps": 2})] * 3
    assert kernel.compiled == {}


def test_what_was_compiled_is_launched_at_once(gpu: SimpleNamespace) -> None:
    """By Triton the first time, and then by the C function of its launcher, with all arguments in their order."""
    function = Function()
    kernel = Kernel(function, (True, 16, "silu", None), num_warps=4, num_stages=3)
    one, two, empty = Tensor(64), Tensor(4096), Tensor(0)
    for _ in range(3):
        _launch(kernel, one, None, two, empty)
    first = (one, None, two, empty, 5, 0.5, True, 16, "silu", None)
    assert function.calls == [((2, 3, 1), first, {"num_warps": 4, "num_stages": 3})]
    state = ("function 1", False, True, None, None, _METADATA, None, None, None)
    expected = (2, 3, 1, _STREAM, *state, 64, None, 4096, None, 5, 0.5, True, 16, "silu", None)
    (run,) = function.runs
    assert run.c_calls == [expected] * 2
    assert [type(value) for value in run.c_calls[0]] == [type(value) for value in expected]
    assert run.calls == []


@pytest.mark.parametrize(
    "attributes",
    [
        {"launch": None},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"profile_scratch_size": None},
        {"launch_cooperative_grid": None},
        {"launch_pdl": None},
    ],
    ids=str,
)
def test_a_kernel_with_needs_of_its_own_is_launched_by_tritons_launcher(
    attributes: dict[str, Any], gpu: SimpleNamespace
) -> None:
    function = Function(**attributes)
    kernel = Kernel(function, (16,), num_warps=4)
    for _ in range(2):
        _launch(kernel, Tensor(64), None)
    (run,) = function.runs
    assert run.calls == [(2, 3, 1, _STREAM, "function 1", _METADATA, None, None, None, 64, None, 5, 0.5, 16)]
    assert run.c_calls == []


UNFIT: dict[str, tuple[Tensor, tuple[float, ...]]] = {
    "unaligned": (Tensor(64 + 8), (5, 0.5)),
    "a large number": (Tensor(64), (2**31, 0.5)),
}


@pytest.mark.parametrize("name", list(UNFIT))
def test_what_would_be_compiled_otherwise_goes_tritons_own_way(name: str, gpu: SimpleNamespace) -> None:
    """Before and after something was compiled, which is neither replaced nor used."""
    odd, numbers = UNFIT[name]
    function = Function()
    kernel = Kernel(function, (16,), num_warps=4)
    for _ in range(2):
        _launch(kernel, Tensor(64), odd, numbers=numbers)
    assert kernel.compiled == {}
    for _ in range(2):
        _launch(kernel, Tensor(64), Tensor(32), numbers=(2**31 - 1, 0.5))
    _launch(kernel, Tensor(64), odd, numbers=numbers)
    _launch(kernel, Tensor(64), Tensor(32))
    assert len(function.calls) == 4
    assert [len(run.c_calls) for run in function.runs] == [0, 0, 2, 0]


def test_each_device_has_what_was_compiled_for_it(gpu: SimpleNamespace) -> None:
    function = Function()
    kernel = Kernel(function, (), num_warps=4)
    for device in (0, 1, 1, 0):
        _launch(kernel, Tensor(64, device))
        assert gpu.current == 0
    assert len(function.calls) == 2
    called = [call for run in function.runs for call in run.c_calls]
    assert [call[3:5] for call in called] == [(_STREAM, "function 1"), (_STREAM + 1, "function 2")]


def test_each_kernel_is_compiled_once_whatever_its_grid_and_numbers(gpu: SimpleNamespace) -> None:
    function = Function()
    for constant in (16, 32):
        kernel = Kernel(function, (constant,), num_warps=4)
        for size in (1, 2, 3):
            _launch(kernel, Tensor(64 * size), grid=(size, 1, 1), numbers=(size,))
    assert [arguments[-1] for _, arguments, _ in function.calls] == [16, 32]
    for run, constant in zip(function.runs, (16, 32), strict=True):
        found = [(*call[:3], *call[-3:]) for call in run.c_calls]
        assert found == [(2, 1, 1, 128, 2, constant), (3, 1, 1, 192, 3, constant)]
