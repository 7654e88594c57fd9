"""Launching a jitted function with little work in Python.

Triton looks at every argument again at each launch, which takes 15 to 30 us; most kernels of a decoding step take less on
the device.  Here what was compiled once is launched again at once.  That is right only where everything that Triton would
compile for is the same, so:

- pointers are tensors, all aligned to 16 bytes, or the launch goes Triton's own way;
- integers are marked `do_not_specialize` in the function and fit into 32 bits, or the launch goes Triton's own way;
- launches that differ in anything else have a `Kernel` each.

What Triton's launcher is given differs from version to version, so only a version on which this was tried is launched so.
Any other goes Triton's own way, and so does `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["Kernel", "Launch", "is_interpreted", "is_known", "num_processors"]

_MAX_INT = 2**31 - 1
_KNOWN_VERSIONS = ("3.6",)


def is_known(version: str) -> bool:
    """Whether the launcher of a Triton version is called here as it wants to be."""
    return ".".join(version.split(".")[:2]) in _KNOWN_VERSIONS


def is_interpreted(function: Any) -> bool:
    """Whether Triton runs a jitted function in Python, on tensors of any device."""
    return not isinstance(function, triton.runtime.JITFunction)


def num_processors(device: torch.device) -> int:
    """How many programs of a kernel run at once at least: the device's multiprocessors."""
    if device.type != "cuda":
        return 2  # interpreted: enough for what programs share to show
    return _processors(device.index if device.index is not None else torch.cuda.current_device())


_PROCESSORS: dict[int, int] = {}


def _processors(index: int) -> int:
    if index not in _PROCESSORS:
        _PROCESSORS[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _PROCESSORS[index]


class Kernel:
    """A jitted function with all that is compiled in, and what was compiled of it for each device.

    All launches of it agree in that: in the dtype of every tensor and in which of them are None, too.  So it is made in a cached
    function, among whose arguments is all that tells these.

    Args:
        function: a `triton.jit` function.  Its parameters are, in this order: tensors (or None), integers, floats, constexprs.
        constants: the constexpr arguments.
        options: `num_warps` and the like.
    """

    def __init__(self, function: Any, constants: tuple[Any, ...], **options: int) -> None:
        self.function, self.constants = function, constants
        self.is_interpreted = is_interpreted(function)
        self.is_direct = not self.is_interpreted and is_known(triton.__version__)
        self.options = {} if self.is_interpreted else options
        self.compiled: dict[int, _Compiled] = {}


class Launch:
    """A kernel over a grid, with its numbers.

    Args:
        kernel: what is launched.
        grid: the number of programs along each axis; none is launched where one is 0.
        numbers: the integer and float arguments.
    """

    def __init__(self, kernel: Kernel, grid: tuple[int, int, int], numbers: tuple[int | float, ...]) -> None:
        self._kernel, self._grid = kernel, grid
        self._values = (*numbers, *kernel.constants)
        self._is_direct = kernel.is_direct and all(grid) and (not numbers or max(numbers) <= _MAX_INT)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream of the device of the tensors; the first of these is not None."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if not self._is_direct or device != torch._C._cuda_getDevice():
            self._launch_otherwise(tensors, device)
            return
        bits = 0
        pointers: list[int | None] = []
        for tensor in tensors:
            if tensor is None:  # stays None: a kernel that was compiled without a tensor takes it as a constant
                pointers.append(None)
            else:
                address = tensor.data_ptr()
                bits |= address
                pointers.append(address or None)
        compiled = self._kernel.compiled.get(device)
        if compiled is None or bits % 16:
            made = self._launch_by_triton(tensors)
            if not bits % 16:
                self._kernel.compiled[device] = _compiled_of(made)
            return
        run, state = compiled
        run(*self._grid, torch._C._cuda_getCurrentRawStream(device), *state, *pointers, *self._values)

    def _launch_otherwise(self, tensors: tuple[torch.Tensor | None, ...], device: int) -> None:
        """Launch by Triton, or with another device as the current one, or nothing."""
        if not all(self._grid):
            return
        if self._kernel.is_interpreted or device == torch._C._cuda_getDevice():
            self._launch_by_triton(tensors)
            return
        with torch.cuda.device(device):
            self(*tensors)

    def _launch_by_triton(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        return self._kernel.function[self._grid](*tensors, *self._values, **self._kernel.options)


class _Compiled(NamedTuple):
    """A compiled function: what is called with grid, stream, `state` and arguments to launch it."""

    run: Callable[..., None]
    state: tuple[Any, ...]


def _compiled_of(made: Any) -> _Compiled:
    """What a launch by Triton gives, to be launched again.

    Triton's own launcher allocates scratch memory where a kernel wants some; for one that does not, its C function is
    called at once.
    """
    run, function, metadata = made.run, made.function, made.packed_metadata
    c_launch = getattr(run, "launch", None)
    needs = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    flags = [getattr(run, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    if c_launch is None or needs != [0, 0] or None in flags:
        return _Compiled(run, (function, metadata, None, None, None))
    return _Compiled(c_launch, (function, *flags, None, None, metadata, None, None, None))
