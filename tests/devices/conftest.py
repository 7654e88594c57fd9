"""The kernels of every device on this machine: CUDA's in Triton's interpreter or on a GPU, NPU's on a stand-in for `torch_npu`."""

from __future__ import annotations

import pytest
import torch

from tests.npu import stand_in
from tests.triton.expert_checks import multiply_as_on_devices
from tests.triton.norm_checks import round_as_on_devices

pytest.importorskip("triton")


@pytest.fixture(params=["cuda", "npu", "cpu"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels are looked at."""
    if request.param == "npu":
        # not in sys.modules, where other packages would find an NPU
        monkeypatch.setattr("kconvert.kernels.npu.import_module", lambda name: stand_in.stand_in())
    if request.param == "cuda":
        round_as_on_devices(monkeypatch)
        multiply_as_on_devices(monkeypatch)
    return str(request.param)


@pytest.fixture
def device(family: str) -> str:
    """Where its tensors are."""
    return "cuda" if family == "cuda" and torch.cuda.is_available() else "cpu"
