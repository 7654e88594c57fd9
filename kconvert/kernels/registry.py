"""The registry: every kernel that is known, whatever the device, and how kernels are discovered.

A new file below `kernels/ops`, or a module that an installed package publishes under the entry point
group `kconvert.kernels`, is a new kernel: there is no list to edit.  A file that fails to import is
reported by name and takes nothing else down.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import ClassVar, TypeVar

from kconvert.errors import KernelUnavailableError, RegistrationError, UnknownKernelError, UsageError, one_line
from kconvert.kernels.base import BaseKernel, DeviceType
from kconvert.kernels.device import current_accelerator
from kconvert.names import near_misses

__all__ = [
    "ENTRY_POINT_GROUP",
    "Registry",
    "ScanFailure",
    "check_deps_reason",
    "get_known_kernel",
    "kernel_entry_points",
    "register_kernel",
    "scan_all_kernels",
    "unknown_kernel",
]

ENTRY_POINT_GROUP = "kconvert.kernels"
_KernelClass = TypeVar("_KernelClass", bound=type[BaseKernel])
_LOCK = RLock()


@dataclass(frozen=True)
class ScanFailure:
    """A module that could not be imported, and the first line of why."""

    module: str
    reason: str


class Registry:
    """Kernel ID to kernel class."""

    _kernels: ClassVar[dict[str, type[BaseKernel]]] = {}
    _scanned: ClassVar[set[str]] = set()
    _torch_failure: ClassVar[str | None] = None
    _was_scanned: ClassVar[bool] = False

    @classmethod
    def register(cls, kernel: type[BaseKernel]) -> None:
        """Add a kernel.

        Raises:
            RegistrationError: (a `TypeError` and a `ValueError`) not a subclass of `BaseKernel`, `_kernel_id` or
                `_device` is missing or malformed, or the ID is taken.
        """
        if not (isinstance(kernel, type) and issubclass(kernel, BaseKernel)):
            raise RegistrationError(f"{kernel!r} is not a subclass of BaseKernel", fix="derive it from BaseKernel")
        kernel_id, device = getattr(kernel, "_kernel_id", None), getattr(kernel, "_device", None)
        if not isinstance(kernel_id, str) or not kernel_id:
            raise RegistrationError(f"kernel {kernel.__name__} has no _kernel_id", fix="set it to a string")
        if not isinstance(device, DeviceType):
            raise RegistrationError(f"kernel {kernel_id!r} has _device {device!r}", fix="set it to a DeviceType")
        with _LOCK:
            if kernel_id in cls._kernels:
                taken = cls._kernels[kernel_id]
                raise RegistrationError(
                    f"kernel ID {kernel_id!r} is taken by {taken.__module__}.{taken.__qualname__}",
                    fix="choose another ID",
                )
            cls._kernels[kernel_id] = kernel

    @classmethod
    def get(cls, kernel_id: str) -> type[BaseKernel] | None:
        """The kernel, where its device is the accelerator of this process or the CPU; else None."""
        kernel = cls.catalog().get(kernel_id)
        if kernel is None or kernel.device() not in (DeviceType.CPU, current_accelerator()):
            return None
        return kernel

    @classmethod
    def catalog(cls) -> dict[str, type[BaseKernel]]:
        """Every known kernel by ID, sorted, whatever the device.

        The first call in a process scans; call `scan_all_kernels` to look again.
        """
        if not cls._was_scanned:
            scan_all_kernels()
        return dict(sorted(cls._kernels.items()))


def register_kernel(kernel: _KernelClass) -> _KernelClass:
    """Class decorator: `Registry.register` and return the class."""
    Registry.register(kernel)
    return kernel


def kernel_entry_points() -> tuple[EntryPoint, ...]:
    """What installed packages publish, sorted by name."""
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)))


def _module_names() -> Iterator[str]:
    from kconvert.kernels import ops

    # it imports folders to look into them; one that fails is reported by the scan, which was given its name before
    for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.", onerror=lambda _: None):
        yield found.name
    for point in kernel_entry_points():
        yield point.module


def _check_torch() -> None:
    """Import torch once, before any kernel file does: a second try after a failed one can crash the interpreter.

    Raises:
        KernelUnavailableError: torch does not import.
    """
    if "torch" in sys.modules:
        return
    if Registry._torch_failure is None:
        try:
            import_module("torch")
            return
        except Exception as error:  # noqa: BLE001 - a broken backend that torch loads raises what it likes
            Registry._torch_failure = one_line(error)
    raise KernelUnavailableError(
        f"torch does not import ({Registry._torch_failure})",
        fix="where a backend such as torch_npu is to blame, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall it",
    )


def scan_all_kernels() -> tuple[ScanFailure, ...]:
    """Import every kernel module there is; already imported ones cost nothing.

    Returns:
        The modules that failed, which are also warned of.  What such a module had registered is taken back.
    """
    failures = []
    _check_torch()
    with _LOCK:
        for name in _module_names():
            if name in Registry._scanned:
                continue
            before = set(Registry._kernels)
            try:
                import_module(name)
                Registry._scanned.add(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - one broken file must not take the others down
                # a module that the broken one imported, and that is whole, is not imported again: its kernels stay
                for kernel_id in Registry._kernels.keys() - before:
                    if Registry._kernels[kernel_id].__module__ not in sys.modules:
                        del Registry._kernels[kernel_id]
                failures.append(ScanFailure(name, one_line(error)))
                warnings.warn(f"kernel module {name} does not import ({failures[-1].reason})", stacklevel=2)
        Registry._was_scanned = True
    return tuple(failures)


def check_deps_reason(kernel: type[BaseKernel]) -> str | None:
    """`check_deps` as a reason or None; a kernel written for LLaMA-Factory answers with a bool."""
    try:
        answer: object = kernel.check_deps()
    except Exception as error:  # noqa: BLE001 - one broken kernel must not take the others down
        return f"its check_deps() fails ({one_line(error)})"
    if answer is None or answer is True:
        return None
    return answer if isinstance(answer, str) else "its check_deps() says no"


def unknown_kernel(kernel_id: str, known: dict[str, type[BaseKernel]] | list[str]) -> UnknownKernelError:
    """The error for an ID that nothing has."""
    near = near_misses(kernel_id, known)
    fix = f"did you mean {' or '.join(near)}?" if near else "`kconvert list-kernels` shows what there is"
    return UnknownKernelError(f"unknown kernel {kernel_id!r}", fix=fix)


def get_known_kernel(kernel_id: str) -> type[BaseKernel]:
    """The kernel of that ID, whatever the device.

    Raises:
        UnknownKernelError: with near misses.
        UsageError: the ID is no string.
    """
    if not isinstance(kernel_id, str):
        raise UsageError(f"a kernel ID is a string, not {kernel_id!r}")
    catalog = Registry.catalog()
    if kernel_id not in catalog:
        raise unknown_kernel(kernel_id, catalog)
    return catalog[kernel_id]
