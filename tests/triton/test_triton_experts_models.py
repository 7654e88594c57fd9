"""The CUDA kernel of experts in real models, on the GPU or interpreted, beside stock with its eager loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kconvert.kernels.dispatch import Dispatch, attach
from kconvert.kernels.ops.experts.cuda import CudaFusedMoE
from kconvert.kernels.ops.experts.layout import ExpertsLayout
from kconvert.kernels.select import Mode, Selection
from tests.support import Kind, tiny_model
from tests.triton.expert_checks import multiply_as_on_devices
from tests.triton.norm_checks import assert_near, round_as_on_devices

IDS = torch.tensor([[3, 9, 27, 17, 51], [2, 4, 8, 16, 6]])
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""Of the largest value, through all layers."""


@pytest.fixture(autouse=True)
def _as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_on_devices(monkeypatch)
    multiply_as_on_devices(monkeypatch)


def put_kernel(model: Any, device: str) -> list[str]:
    """The kernel in every module of experts, whatever the machine; gives their paths."""
    paths = [path for path, _ in model.named_modules() if path.endswith("mlp.experts")]
    for path in paths:
        module: Any = ExpertsLayout.patch([model.get_submodule(path)])
        assert CudaFusedMoE.supports(module) is None
        attach(module, Dispatch())
        module.kconvert_dispatch.strict = True
        for mode in Mode:
            module.kconvert_dispatch.set(device, mode, Selection("cuda_fused_moe", ()), CudaFusedMoE)
    return paths


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_model_is_near_stock_in_inference_and_training(device: str, kind: Kind, dtype: torch.dtype) -> None:
    layers = 1 if kind in ("mixtral", "gpt_oss") else 2
    model = tiny_model(kind, dtype=dtype, num_hidden_layers=layers).to(device)
    model.set_experts_implementation("eager")
    packed = copy.deepcopy(model)
    paths = put_kernel(packed, device)
    assert paths
    ids = IDS.to(device)
    for each in (model, packed):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        found, expected = packed(input_ids=ids).logits, model(input_ids=ids).logits
    assert expected.std() > 0.01
    assert_near(found, expected, TOLERANCES[dtype])
    for path in paths:
        module = packed.get_submodule(path)
        assert module.kconvert_dispatch.has_run == {CudaFusedMoE}
        for name, weight in model.get_submodule(path).named_parameters():
            assert_near(module.get_parameter(name).grad, weight.grad, TOLERANCES[dtype])
