"""Which build variant of a kernel package this machine uses: `build/torch-cuda/`, `build/torch-cpu/`, ...

The `kernels` library decides where it is installed.  Without it only pure-Python variants (`torch-DEVICE` and
`torch-universal`) are known.  Where none is for this machine, a pure-Python one still gives the layout, so that a
checkpoint can be converted on a laptop; its kernel then does not run, and the reason is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kconvert.kernels.base import DeviceType
from kconvert.kernels.device import current_accelerator
from kconvert.kernels.select import ANY_DEVICE

__all__ = ["Variant", "choose_variant", "has_kernels_library", "is_pure_python", "runs_here"]

# <framework>-<backend> for pure Python, else a framework version, a backend version, a CPU and an OS
_PURE = re.compile(r"torch-[a-z]+")
_DEVICE = {"rocm": "cuda", "cann": "npu", "metal": "mps", "universal": ANY_DEVICE}


@dataclass(frozen=True)
class Variant:
    """The chosen variant: its folder's name, the device type of its kernels, and why they cannot run here."""

    name: str
    device: str
    unavailable: str | None = None


def has_kernels_library() -> bool:
    """Whether the `kernels` library is installed."""
    return find_spec("kernels") is not None


def is_pure_python(name: str) -> bool:
    """Whether a variant holds no compiled code: it says no framework version and no platform."""
    return _PURE.fullmatch(name) is not None


def choose_variant(names: Iterable[str]) -> Variant | None:
    """The variant for this machine among folder names, else a pure-Python one that cannot run here, else None."""
    return _choose(sorted(names), _accepted_here(sorted(names)), current_accelerator())


def runs_here(names: Iterable[str]) -> str | None:
    """The name of the best variant whose kernels run on this machine."""
    return next(iter(_accepted_here(sorted(names))), None)


def _choose(names: Sequence[str], accepted: Sequence[str], accelerator: DeviceType) -> Variant | None:
    if accepted:
        return Variant(accepted[0], _device(accepted[0]))
    pure = [name for name in names if is_pure_python(name)]
    if not pure:
        return None
    reason = f"its build variants are {', '.join(names)}, and none is for {accelerator}"
    return Variant(pure[0], _device(pure[0]), reason)


def _device(name: str) -> str:
    """`cuda` for `torch-cuda` and for `torch213-cxx11-cu130-x86_64-linux`."""
    if is_pure_python(name):
        backend = name.partition("-")[2]
    else:
        found: Any = _parse(name)
        backend = found.arch.backend.name if found is not None else ANY_DEVICE
    return _DEVICE.get(backend, backend)


def _accepted_here(names: Sequence[str]) -> list[str]:
    """The variants that run here, best first: those of the accelerator, then those of the CPU."""
    accelerator = current_accelerator()
    if not has_kernels_library():
        wanted = (f"torch-{accelerator.value}", "torch-cpu", "torch-universal")
        return [name for name in dict.fromkeys(wanted) if name in names]
    from kernels.variants import resolve_variants

    parsed = [variant for name in names if (variant := _parse(name)) is not None]
    accepted: list[str] = []
    # a torch that is built for an accelerator which this machine has not runs on the CPU
    for backend in (None, "cpu") if accelerator is not DeviceType.CPU else ("cpu",):
        accepted += [variant.variant_str for variant in resolve_variants(parsed, backend)[0]]
    return list(dict.fromkeys(accepted))


def _parse(name: str) -> Any:
    if not has_kernels_library():
        return None
    from kernels.variants import parse_variant

    try:
        return parse_variant(name)
    except (ValueError, IndexError):  # a folder that is no variant
        return None
