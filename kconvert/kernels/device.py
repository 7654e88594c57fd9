"""The probe: what this machine has.  Asked when needed, never at import, and answered with a reason."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kconvert.backends import BROKEN
from kconvert.errors import one_line
from kconvert.kernels.base import DeviceType

__all__ = ["current_accelerator", "device_reason"]


def device_reason(device: DeviceType) -> str | None:
    """Why `device` cannot be used in this process, or None."""
    if device is DeviceType.CPU:
        return None
    import torch

    if device is DeviceType.CUDA:
        if torch.version.cuda is None:
            return "this torch is built without CUDA"
        return None if torch.cuda.is_available() else "no CUDA device, or no driver for it"
    if device is DeviceType.NPU:
        if "torch_npu" in BROKEN:
            return f"torch_npu does not import ({BROKEN['torch_npu']}); are the CANN libraries installed?"
        if find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            import_module("torch_npu")
        except Exception as error:  # noqa: BLE001 - a wheel without the CANN libraries fails in several ways
            return f"torch_npu does not import ({one_line(error)}); are the CANN libraries installed?"
        npu: Any = vars(torch).get("npu")  # torch has it once torch_npu is imported
        return None if npu is not None and npu.is_available() else "torch_npu is installed, but there is no NPU"
    if device is DeviceType.XPU:
        return None if torch.xpu.is_available() else "no XPU device"
    return None if torch.backends.mps.is_available() else "no MPS device"


def current_accelerator() -> DeviceType:
    """The accelerator of this process: the first of NPU, CUDA, XPU and MPS that is usable, else the CPU."""
    for device in (DeviceType.NPU, DeviceType.CUDA, DeviceType.XPU, DeviceType.MPS):
        if device_reason(device) is None:
            return device
    return DeviceType.CPU
