"""Whole models on the NPU kernels beside the stock ones: results, tokens, gradients, and which operators ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kconvert.kernels.ascend import experts as ascend_experts
from kconvert.kernels.npu import npu_ops
from tests.devices.models import assert_close, patched
from tests.support import tiny_model

IDS = torch.arange(1, 15).reshape(2, 7)
_LAYER = ("npu_fused_decoder_layer", "npu_fused_rmsnorm")
_MOE = ("npu_fused_rmsnorm", "npu_fused_qkv", "npu_fused_moe")
KERNELS: dict[Any, tuple[str, ...]] = {
    "qwen3": _LAYER,
    "llama": _LAYER,
    "gemma2": _LAYER,
    "qwen3_moe": _MOE,
    "gpt_oss": _MOE,
}
OPERATORS: dict[str, set[str]] = {
    "qwen3": {"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul"},
    "llama": {"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul"},
    "gemma2": {"npu_gemma_rms_norm", "npu_geglu", "npu_rotary_mul"},
    "qwen3_moe": {
        "npu_rms_norm",
        "npu_swiglu",
        "npu_rotary_mul",
        "npu_grouped_matmul",
        "npu_moe_token_permute",
        "npu_moe_token_unpermute",
    },
    "gpt_oss": {
        "npu_rms_norm",
        "npu_clipped_swiglu",
        "npu_grouped_matmul",
        "npu_moe_token_permute",
        "npu_moe_token_unpermute",
    },
}


# rounded otherwise, a router chooses other experts
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [(kind, torch.float32, 5e-5) for kind in KERNELS]
    + [(kind, torch.bfloat16, 3e-2) for kind in ("qwen3", "llama", "gemma2")],
)
def test_prefill(kind: Any, dtype: torch.dtype, tolerance: float, npu: list[str]) -> None:
    stock = tiny_model(kind, dtype=dtype)
    model = patched(stock, KERNELS[kind])
    with torch.no_grad():
        found, expected = (each(IDS).logits.float() for each in (model, stock))
    assert_close(found, expected, tolerance)
    assert set(npu) == OPERATORS[kind]
    assert all(name.startswith("npu_") for name in model.kconvert_report.to_dict()["kernels"])


@pytest.mark.parametrize("kind", list(KERNELS))
def test_greedy_tokens(kind: Any, npu: list[str]) -> None:
    stock = tiny_model(kind)
    model = patched(stock, KERNELS[kind])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **options), stock.generate(IDS, **options))
    assert npu


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", list(KERNELS))
def test_training(kind: Any, checkpointing: bool, npu: list[str]) -> None:
    """Operators without a gradient are not used; the experts run their reference."""
    stock = tiny_model(kind)
    model = patched(stock, KERNELS[kind])
    for each in (model, stock):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        each(IDS, labels=IDS, use_cache=False).loss.backward()
    theirs = {name: weight.grad for name, weight in stock.named_parameters()}
    compared = 0
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        if name in theirs:
            assert_close(weight.grad, theirs[name], 1e-4)
            compared += 1
    assert compared > len(theirs) // 3
    assert npu
    # checkpointing runs a first time without gradients, and then again with them
    if not checkpointing:
        assert not {"npu_add_rms_norm", "npu_gemma_rms_norm", "npu_grouped_matmul"} & set(npu)


@pytest.mark.parametrize(("kernel", "as_stored"), [("npu_fused_moe", False), ("npu_fused_moe_transposed", True)])
def test_weights_go_as_they_are_stored_where_the_layout_is_for_it(
    kernel: str, as_stored: bool, npu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored transposed, nothing is turned and nothing is copied; else the operator gets a view."""
    model = patched(tiny_model("qwen3_moe"), (kernel,))
    own = {weight.data_ptr() for weight in model.parameters()}
    given: list[torch.Tensor] = []
    ops = npu_ops()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def npu_grouped_matmul(self, x: Any, weight: list[torch.Tensor], **options: Any) -> Any:
            given.extend(weight)
            return ops.npu_grouped_matmul(x, weight, **options)

    monkeypatch.setattr(ascend_experts, "npu_ops", Watched)
    with torch.no_grad():
        model(IDS)
    assert given
    assert {weight.data_ptr() for weight in given} <= own
    assert {weight.is_contiguous() for weight in given} == {as_stored}
    assert "npu_grouped_matmul" in npu
