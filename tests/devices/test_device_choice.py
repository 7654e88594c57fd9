"""The tensor's device decides, whatever is installed: an NPU beside a model on the CPU, and kernels of several devices in one entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert import load_converted
from kconvert.errors import UnknownKernelError
from kconvert.kernels import apply_default_kernels
from kconvert.kernels.base import DeviceType
from kconvert.kernels.device import current_accelerator
from tests.npu import stand_in
from tests.support import convert, save_tiny, tiny_model, write_recipe

IDS = torch.arange(1, 15).reshape(2, 7)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An NPU that this process could use, and the operators that are called on it."""
    monkeypatch.setattr("kconvert.kernels.npu.import_module", lambda name: stand_in.stand_in())
    reason = {DeviceType.CPU: None, DeviceType.NPU: None}
    for module in ("device", "base"):
        monkeypatch.setattr(
            f"kconvert.kernels.{module}.device_reason", lambda device: reason.get(device, "not here"), raising=False
        )
    stand_in.calls.clear()
    assert current_accelerator() is DeviceType.NPU
    return stand_in.calls


def check_cpu_kernels_run(model: Any, stock: Any, npu: list[str]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=0, atol=2e-5)
    assert npu == []
    modules = model.kconvert_report.to_dict()["modules"]
    assert {module["device"] for module in modules} == {"cpu"}
    ours = {module["kernel"] for module in modules}
    assert {"cpu_fused_rmsnorm", "cpu_fused_qkv", "cpu_fused_swiglu"} <= ours
    assert all(name.startswith("cpu_") or name == "reference" for name in ours)


def test_a_model_on_the_cpu_beside_an_npu(npu: list[str]) -> None:
    """K1: a live model, patched with everything that is usable in the process."""
    stock, model = tiny_model("qwen3"), tiny_model("qwen3")
    apply_default_kernels(model, "auto")
    check_cpu_kernels_run(model, stock, npu)
    traces = [item for module in model.kconvert_report.to_dict()["modules"] for item in module["trace"]]
    away = {item["reason"] for item in traces if item["kernel"].startswith("npu_")}
    assert away == {"runs on npu, the input is on cpu"}


def test_a_converted_model_on_the_cpu_beside_an_npu(npu: list[str], tmp_path: Path) -> None:
    """K1 and K2: kernels of three devices in one entry, each with its reason, and the last device does not win."""
    source = save_tiny(tmp_path / "model", "qwen3")
    model = load_converted(convert("qwen3", source, tmp_path / "out").output)
    check_cpu_kernels_run(model, tiny_model("qwen3"), npu)
    for module in model.kconvert_report.to_dict()["modules"]:
        assert [item["kernel"] for item in module["trace"] if item["accepted"]] == [module["kernel"]]
        others = {item["kernel"]: item["reason"] for item in module["trace"] if not item["accepted"]}
        (cuda,) = [name for name in others if name == module["kernel"].replace("cpu_", "cuda_")]
        assert others[cuda] == "not here"
        assert others[cuda.replace("cuda_", "npu_")] == "runs on npu, the input is on cpu"


def test_a_module_that_is_moved_runs_what_is_for_its_new_device(npu: list[str]) -> None:
    """K1: `model.to()` after the kernels were chosen; on a device without kernels the reference runs."""
    model = tiny_model("qwen3")
    apply_default_kernels(model, "auto")
    model.model.layers[1].to("meta")
    by_layer = {module["path"]: module["kernel"] for module in model.kconvert_report.to_dict()["modules"]}
    assert by_layer["model.layers.0.mlp"] == "cpu_fused_swiglu"
    assert by_layer["model.layers.1.mlp"] == "reference"
    hidden = torch.ones(1, 2, model.config.hidden_size)
    with torch.no_grad():
        assert model.model.layers[0].mlp(hidden).device.type == "cpu"
        assert model.model.layers[1].mlp(hidden.to("meta")).is_meta
    assert npu == []


def test_an_unknown_kernel_is_an_error_at_conversion(tmp_path: Path) -> None:
    """K2."""
    entry = '  - kernel: [npu_fused_swiglu, cuda_fused_swigluu]\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", entry)
    with pytest.raises(
        UnknownKernelError, match=r"unknown kernel 'cuda_fused_swigluu'.*did you mean cuda_fused_swiglu"
    ):
        convert(recipe, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
