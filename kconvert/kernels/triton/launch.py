"""Launching a jitted function with little work in Python.

Triton looks at every argument again at each launch, which takes 15 to 30 us; most kernels of a decoding step take less on
the device.  Here a compiled function is found by a key that its caller gives, and launched at once.  That is right only
where the key says everything that Triton would compile for, so:

- pointers are tensors, all aligned to 16 bytes, or the launch goes Triton's own way;
- integers are marked `do_not_specialize` in the function and fit into 32 bits, or the launch goes Triton's own way;
- whatever else differs between two launches is a constexpr and in the key.

What Triton's launcher is given differs from version to version, so only a version on which this was tried is launched so.
Any other goes Triton's own way, and so does `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton

__all__ = ["Launcher", "is_interpreted", "is_known", "num_processors"]

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


class Launcher:
    """A jitted function and what was compiled of it.

    Args:
        function: a `triton.jit` function.  Its parameters are, in this order: tensors (or None, which has to be in the key),
            integers, floats, constexprs.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._is_interpreted = is_interpreted(function)
        self._is_direct = is_known(triton.__version__)
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: Sequence[Any],
        **options: int,
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        Args:
            key: equal only where everything that is compiled in is equal: dtypes, which tensors are None, constants, options.
            grid: the number of programs along each axis; none is launched where one is 0.
            tensors: the pointer arguments, all on one device.
            numbers: the integer and float arguments.
            constants: the constexpr arguments.
            options: `num_warps`, `num_stages`.
        """
        if not all(grid):
            return
        if self._is_interpreted:
            self._function[grid](*tensors, *numbers, *constants)
            return
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(key, grid, tensors, numbers, constants, **options)
            return
        if not self._is_direct:
            self._function[grid](*tensors, *numbers, *constants, **options)
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits % 16 or max(numbers, default=0) > _MAX_INT:
            self._function[grid](*tensors, *numbers, *constants, **options)
            return
        launch = self._compiled.get((device, key))
        if launch is None:
            compiled = self._function[grid](*tensors, *numbers, *constants, **options)
            self._compiled[device, key] = _launch_of(compiled)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        # None stays None: a kernel that was compiled without a tensor takes it as a constant
        given = [address or None for address in addresses]
        launch(*grid, stream, *given, *numbers, *constants)


def _launch_of(compiled: Any) -> Callable[..., None]:
    """(x, y, z, stream, arguments) to a launch of a compiled function.

    Triton's own launcher allocates scratch memory where a kernel wants some; for one that does not, its C function is
    called at once.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    c_launch = getattr(run, "launch", None)
    needs = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    flags = [getattr(run, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    if c_launch is None or needs != [0, 0] or None in flags:

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

        return launch
    cooperative, dependent = flags

    def launch_at_once(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        c_launch(x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments)

    return launch_at_once
