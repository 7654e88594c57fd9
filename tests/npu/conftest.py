"""NPU kernels on a stand-in: `torch_npu` is replaced, and the kernels say that they are for the CPU."""

from __future__ import annotations

import pytest

from kconvert.kernels.base import DeviceType
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.rope import fused
from kconvert.kernels.registry import Registry
from tests.npu import stand_in


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that are called from now on."""
    # not in sys.modules, where other packages would find an NPU
    monkeypatch.setattr("kconvert.kernels.npu.import_module", lambda name: stand_in.stand_in())
    for kernel in Registry.catalog().values():
        if issubclass(kernel, NpuKernel):
            monkeypatch.setattr(kernel, "_device", DeviceType.CPU)
    code = fused._device_code("npu")
    monkeypatch.setattr(fused, "_device_code", lambda device: code)
    stand_in.calls.clear()
    return stand_in.calls
