"""Faults that NPU integrations really had: rotations that the operator does not do, and formats of the device on the disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

import kconvert
from kconvert.kernels.ascend.rope import takes
from kconvert.kernels.rotation import Rotation
from tests.devices.models import assert_close, patched

IDS = torch.arange(1, 15).reshape(2, 7)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(("config", "model"), [(GlmConfig, GlmForCausalLM), (Glm4Config, Glm4ForCausalLM)])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_partial_and_interleaved_rotations_are_those_of_stock(
    config: Any, model: Any, factor: float, npu: list[str]
) -> None:
    """K4: GLM turns neighbours, and half of a head."""
    torch.manual_seed(0)
    stock = model(config(**SIZES, partial_rotary_factor=factor)).eval()
    ours = patched(stock, ("npu_fused_rope",))
    with torch.no_grad():
        found, expected = ours(IDS).logits, stock(IDS).logits
    assert_close(found, expected)
    assert not torch.isnan(found).any()
    # GLM writes the halves of what it turned, which the operator does not
    assert npu == []
    assert "npu_fused_rope" in ours.kconvert_report.to_dict()["kernels"]


@pytest.mark.parametrize("rank", [3, 5])
def test_heads_of_another_rank_are_not_given_to_the_operator(rank: int) -> None:
    """K4."""
    shape = (1,) * (rank - 2) + (5, 16)
    q, k, cos = torch.ones(shape), torch.ones(shape), torch.ones(1, 5, 16)
    assert not takes(q, k, cos, Rotation(16), 1, None)


def test_nothing_is_stored_or_cast_in_a_format_of_the_device() -> None:
    """K5: what is on the disk is row-major, and no code turns weights into a private format; see also `--device npu`."""
    sources = Path(kconvert.__file__).parent.rglob("*.py")
    found = [
        path.name for path in sources if re.search(r"format_cast|FRACTAL|\bNZ\b", path.read_text(encoding="utf-8"))
    ]
    assert found == []
