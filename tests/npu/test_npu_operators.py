"""The operators of `torch_npu` that are called: all in the released schemas, and what they are not given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.kernels import ascend
from kconvert.kernels.ascend.gated_act import gated_act
from kconvert.kernels.ascend.rms_norm import rms_norm
from kconvert.kernels.ascend.rope import rope, takes
from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.ops.gated_mlp.npu import NpuFusedSwiGLU
from kconvert.kernels.registry import Registry, check_deps_reason
from kconvert.kernels.rotation import HeadNorms, Rotation
from tests.npu import stand_in
from tests.npu.extract_schemas import OPERATORS, SCHEMAS


def kernels() -> list[type[NpuKernel]]:
    return [kernel for kernel in Registry.catalog().values() if issubclass(kernel, NpuKernel)]


def test_every_operator_that_is_named_has_a_schema() -> None:
    schemas = json.loads(SCHEMAS.read_text())["schemas"]
    sources = Path(ascend.__file__).parent.glob("*.py")
    called = {
        name
        for source in sources
        for name in re.findall(r"\bnpu_ops\(\)\.(npu_\w+)|\bops\.(npu_\w+)", source.read_text())
    }
    named = {name for pair in called for name in pair if name}
    assert named == set(OPERATORS) == schemas.keys()
    assert kernels()
    for kernel in kernels():
        assert kernel.operators
        assert set(kernel.operators) <= named


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("npu_swiglu", (), {"axis": -1}),
        ("npu_swiglu", (1.5,), {}),
        ("npu_rms_norm", (), {"gamma": torch.ones(4), "eps": 1e-6}),
        ("npu_rotary_mul", (torch.ones(1, 1, 2, 4),), {}),
        ("npu_grouped_matmul", ([torch.ones(1, 4, 4)], torch.ones(1)), {}),
        ("npu_geglu", (), {"approximate": "tanh"}),
    ],
)
def test_a_call_that_the_schema_does_not_allow_raises(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        getattr(stand_in.stand_in(), name)(torch.ones(1, 1, 2, 4), *args, **kwargs)


def test_an_operator_that_a_release_lacks_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_deps_reason(NpuFusedSwiGLU) is None
    monkeypatch.delattr(stand_in.stand_in(), "npu_swiglu")
    assert check_deps_reason(NpuFusedSwiGLU) == "this torch_npu has no npu_swiglu"


def test_gates_without_an_operator_are_plain_torch(npu: list[str]) -> None:
    packed = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    for variant in (
        GatedVariant("silu", is_interleaved=True),
        GatedVariant("silu", is_up_first=True),
        GatedVariant("silu", limit=1.0),
        GatedVariant("swiglu_oai"),
    ):
        assert torch.equal(gated_act(packed, variant), gated_formula(packed, variant))
    assert npu == []
    gated_act(packed.requires_grad_(), GatedVariant("swiglu_oai", limit=7.0)).sum().backward()
    assert npu == []


def test_one_plus_weight_is_added_in_float32(npu: list[str]) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16)  # lost where it is added in bfloat16
    wide = x.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
    for each in (weight, weight.clone().requires_grad_()):
        found = rms_norm(x, each, eps=1e-6, offset=1.0).detach()
        assert float((found.double() - expected).abs().max()) <= 2.0**-8 * float(expected.abs().max())
        assert not torch.equal(found, (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))
    assert npu == ["npu_gemma_rms_norm", "npu_rms_norm"]


HEADS = (torch.ones(1, 4, 5, 16), torch.ones(1, 2, 5, 16), torch.ones(1, 5, 16))


@pytest.mark.parametrize(
    ("rotation", "tensors"),
    [
        (Rotation(8), HEADS),
        (Rotation(16, start=8), HEADS),
        (Rotation(16, has_half_table=True), HEADS),
        (Rotation(16, is_interleaved=True), HEADS),
        (Rotation(16, is_wide=True), tuple(each.bfloat16() for each in HEADS)),
        (Rotation(16), (*HEADS[:2], HEADS[2].bfloat16())),
        (Rotation(16), tuple(each.double() for each in HEADS)),
        (Rotation(16), (HEADS[0][:, :, :0], HEADS[1][:, :, :0], HEADS[2][:, :0])),
        (Rotation(16), (torch.ones(1, 1000, 1, 16), torch.ones(1, 2, 1, 16), torch.ones(1, 1, 16))),
        (Rotation(900), (torch.ones(1, 1, 1, 900), torch.ones(1, 1, 1, 900), torch.ones(1, 1, 900))),
    ],
    ids=[
        "partial",
        "last part",
        "half table",
        "halves written",
        "wide",
        "another dtype",
        "float64",
        "empty",
        "heads",
        "dim",
    ],
)
def test_rotations_that_the_operator_is_not_given(rotation: Rotation, tensors: tuple[torch.Tensor, ...]) -> None:
    assert takes(*HEADS, Rotation(16), 1, None)
    q, k, cos = tensors
    assert not takes(q, k, cos, rotation, 1, None)


def test_norms_with_weights_of_another_dtype_are_not_given() -> None:
    norms = HeadNorms(1e-6, 0.0, True)
    assert takes(*HEADS, Rotation(16), 1, (norms, torch.ones(16), torch.ones(16)))
    assert not takes(*HEADS, Rotation(16), 1, (norms, torch.ones(16).bfloat16(), torch.ones(16).bfloat16()))


def test_neighbours_are_turned_where_they_lie(npu: list[str]) -> None:
    rotation = Rotation(16, is_interleaved=True, writes_halves=False)
    assert takes(*HEADS, rotation, 1, None)
    q = torch.randn(1, 4, 5, 16, generator=torch.Generator().manual_seed(0))
    angles = torch.rand(1, 5, 8, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, -1)
    found, _ = rope(q, q[:, :2], angles.cos(), angles.sin(), rotation=rotation, heads_axis=1)
    pairs = torch.view_as_complex(q.unflatten(-1, (8, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(()), angles[:, None, :, ::2])).flatten(-2)
    torch.testing.assert_close(found, turned)
    assert npu == ["npu_rotary_mul", "npu_rotary_mul"]
