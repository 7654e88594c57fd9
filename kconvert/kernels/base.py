"""The classes a kernel derives from.  Importing this loads no torch.

A kernel is known by an ID and belongs to one device type.  Whether it can run is asked when needed and
answered with a reason, never at import: a checkpoint may be converted on a laptop for an NPU.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from kconvert.errors import KernelUnavailableError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from kconvert.kernels.layout import Layout

__all__ = ["BaseKernel", "DeviceType", "LayoutKernel"]


class DeviceType(StrEnum):
    """Device types as torch names them."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    XPU = "xpu"
    MPS = "mps"


class BaseKernel:
    """A device implementation that can be applied to a model.

    Subclasses set `_kernel_id` and `_device`, and implement `apply`.
    """

    _kernel_id: ClassVar[str]
    _device: ClassVar[DeviceType]
    default: ClassVar[bool] = False
    """Whether `apply_default_kernels(model, "auto")` takes it."""

    @classmethod
    def kernel_id(cls) -> str:
        """The ID under which the kernel is registered."""
        return cls._kernel_id

    @classmethod
    def device(cls) -> DeviceType:
        """The device type the kernel runs on."""
        return cls._device

    @classmethod
    def has_device_code(cls) -> bool:
        """Whether the kernel is more than a name that recipes may use already."""
        return True

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None.

        The base looks at the device alone; override it to ask for libraries as well.
        """
        from kconvert.kernels.device import device_reason

        return device_reason(cls._device)

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Put the kernel into `model=` and return the model."""
        raise KernelUnavailableError(f"kernel {cls.__name__} has no apply()", fix="implement it")


class LayoutKernel(BaseKernel):
    """A kernel that computes the forward of a layout.

    Attributes:
        layout: the layout whose parameters the forward reads.
        has_backward: whether gradients flow through `forward`; if not, it is never used where one is needed.
        can_torch_compile: whether a compiler can trace `forward`; if not, the reference runs in a compiled model.
        dtypes: dtype names (`float32`, `bfloat16`, ...) that the forward takes, None for all.
    """

    layout: ClassVar[type[Layout]]
    default = True
    has_backward: ClassVar[bool] = True
    can_torch_compile: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    @staticmethod
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the layout's forward on `module`.  A kernel without one of its own is not usable."""
        raise KernelUnavailableError("this kernel has no device code yet", fix="use another kernel of the layout")

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Why the kernel cannot stand in for this module's stock forward, or None."""
        return None

    @classmethod
    def has_device_code(cls) -> bool:
        """Whether the kernel has a forward of its own."""
        return cls.forward is not LayoutKernel.forward

    @classmethod
    def check_deps(cls) -> str | None:
        """Why the kernel cannot run on this machine, or None."""
        return super().check_deps() if cls.has_device_code() else "not in this version of kconvert"

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Patch `model=` in place: every module whose structure fits and that is proven equal.

        Raises:
            UsageError: `model` is missing.
            KernelUnavailableError: the kernel cannot run here.
        """
        if kwargs.get("model") is None:
            raise UsageError(f"apply_kernel({cls._kernel_id!r}) needs model=", fix="pass model=your_model")
        from kconvert.kernels.live import apply_layout_kernel

        return apply_layout_kernel(cls, kwargs["model"])
