"""RMSNorm with a gate in Triton against its formula in float64: forward, backward, every variant, strided inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from kconvert.kernels.ops.gated_rms_norm import cuda
from kconvert.kernels.ops.gated_rms_norm.cuda import CudaFusedGatedRMSNorm
from kconvert.kernels.ops.gated_rms_norm.layout import (
    GatedRMSNormLayout,
    GatedRMSNormVariant,
    gated_rms_norm_formula,
)
from kconvert.kernels.triton import gated_rms_norm as module
from kconvert.kernels.triton.gated_rms_norm import gated_rms_norm
from tests.triton.norm_checks import TOLERANCES, Poisoned, assert_near, round_as_on_devices, rounded

DTYPES = list(TOLERANCES)
EPS = 2.0**-20
"""A launch takes it as float32, which has this value."""
VARIANTS: list[dict[str, Any]] = [
    {"is_silu": is_silu, "gate_first": gate_first, "cast_first": cast_first}
    for is_silu, gate_first, cast_first in product((True, False), repeat=3)
]
MAMBA: dict[str, Any] = {"is_silu": True, "gate_first": True, "cast_first": True}
QWEN: dict[str, Any] = {"is_silu": True, "gate_first": False, "cast_first": True}
KIMI: dict[str, Any] = {"is_silu": False, "gate_first": False, "cast_first": False}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", Poisoned())
    round_as_on_devices(monkeypatch)


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _oracle(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    is_silu: bool,
    gate_first: bool,
    cast_first: bool,
    num_groups: int = 1,
    eps: float = EPS,
) -> torch.Tensor:
    """`y` in float64 of float64 tensors that hold values of `dtypes`, rounded where the formula rounds."""
    x_dtype, w_dtype = dtypes
    scaled_dtype = torch.promote_types(x_dtype, w_dtype)
    act = None
    if gate is not None:
        act = gate * torch.sigmoid(gate) if is_silu else torch.sigmoid(gate)
    hidden = x * act if act is not None and gate_first else x
    groups = hidden.reshape(*hidden.shape[:-1], num_groups, -1)
    normed = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).reshape(hidden.shape)
    if cast_first:
        scaled = rounded(weight * rounded(normed, x_dtype), scaled_dtype)
    else:
        scaled = weight * normed
    if act is not None and not gate_first:
        return rounded(scaled * act, x_dtype)
    return scaled if cast_first else rounded(scaled, x_dtype)


def _check(x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, **options: Any) -> None:
    """Forward without and with gradients, and every gradient, against `_oracle`."""
    options = {"num_groups": 1, "eps": EPS, **options}
    dtypes = (x.dtype, weight.dtype)
    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, gate, weight)]
    assert wide[0] is not None
    assert wide[2] is not None
    expected = _oracle(wide[0], wide[1], wide[2], dtypes, **options)
    is_promoted = options["cast_first"] and (options["gate_first"] or gate is None)
    out_dtype = torch.promote_types(*dtypes) if is_promoted else x.dtype
    with torch.no_grad():
        found = gated_rms_norm(x, gate, weight, **options)
    assert found.dtype == out_dtype
    assert found.is_contiguous()
    tolerance = max(TOLERANCES[x.dtype], TOLERANCES[found.dtype])
    assert_near(found, expected, tolerance)

    leaves = [None if each is None else each.detach().requires_grad_() for each in (x, gate, weight)]
    assert leaves[0] is not None
    assert leaves[2] is not None
    upstream = _random(*x.shape, dtype=out_dtype, device=str(x.device), seed=7)
    again = gated_rms_norm(leaves[0], leaves[1], leaves[2], **options)
    assert torch.equal(again.detach().nan_to_num(), found.nan_to_num())
    again.backward(upstream)
    expected.backward(upstream.double())
    for leaf, one in zip(leaves, wide, strict=True):
        if leaf is not None and one is not None:
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            # of a group of one, what the norm takes away is all there is
            scale = 1e3 if x.shape[-1] == options["num_groups"] else 0.0
            assert_near(leaf.grad, one.grad, max(tolerance, TOLERANCES[leaf.dtype]), scale=scale)


@pytest.mark.parametrize("columns", [1, 7, 100, 1000, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant_and_size(dtype: torch.dtype, columns: int, device: str) -> None:
    x, gate = (_random(3, columns, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    weight = _random(columns, dtype=dtype, device=device, seed=1)
    for variant in VARIANTS if dtype in (torch.float64, torch.bfloat16) else (MAMBA, QWEN, KIMI):
        _check(x, gate, weight, **variant)
    _check(x, None, weight, **MAMBA)
    _check(x, None, weight, **KIMI)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_places_of_the_casts(dtype: torch.dtype, variant: dict[str, Any], device: str) -> None:
    """In narrow types nearly every value is that of its own formula to the bit, and many are not those of another."""
    x, gate = (_random(20, 100, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    weight = _random(100, dtype=dtype, device=device, seed=1)
    own = GatedRMSNormVariant(
        EPS, 1, "silu" if variant["is_silu"] else "sigmoid", variant["gate_first"], variant["cast_first"]
    )
    other = replace(own, cast_first=not own.cast_first)
    with torch.no_grad():
        found = gated_rms_norm(x, gate, weight, eps=EPS, num_groups=1, **variant)
    assert float((found != gated_rms_norm_formula(x, gate, weight, own)).double().mean()) < 0.005
    assert float((found != gated_rms_norm_formula(x, gate, weight, other)).double().mean()) > 0.1


@pytest.mark.parametrize(("columns", "num_groups"), [(24, 2), (21, 3), (100, 4), (6, 6), (2100, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_groups(dtype: torch.dtype, columns: int, num_groups: int, device: str) -> None:
    x, gate = (_random(5, columns, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    weight = _random(columns, dtype=dtype, device=device, seed=1)
    for variant in (MAMBA, QWEN, KIMI):
        _check(x, gate, weight, num_groups=num_groups, **variant)
    _check(x, None, weight, num_groups=num_groups, **MAMBA)


@pytest.mark.parametrize(
    ("x_dtype", "gate_dtype", "w_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_other_dtypes(x_dtype: torch.dtype, gate_dtype: torch.dtype, w_dtype: torch.dtype, device: str) -> None:
    x, gate = _random(4, 33, dtype=x_dtype, device=device), _random(4, 33, dtype=gate_dtype, device=device, seed=2)
    for variant in (MAMBA, QWEN, KIMI, {**QWEN, "gate_first": True, "cast_first": False}):
        _check(x, gate, _random(33, dtype=w_dtype, device=device, seed=1), **variant)


@pytest.mark.parametrize("shape", [(1, 16), (300, 16), (2, 3, 16), (2, 1, 16), (2, 3, 5, 16), (700, 4)], ids=str)
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    x, gate = (_random(*shape, dtype=torch.float32, device=device, seed=seed) for seed in (0, 2))
    weight = _random(shape[-1], dtype=torch.float32, device=device, seed=1)
    _check(x, gate, weight, **MAMBA)
    _check(x, gate, weight, num_groups=2, **QWEN)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "part of a projection": lambda packed: packed[..., 24:],
    "heads of a projection": lambda packed: packed[..., :24].unflatten(-1, (3, 8)),
    "heads, moved": lambda packed: packed[..., 24:].unflatten(-1, (3, 8)).transpose(1, 2),
    "one row of each": lambda packed: packed[:, 1],
    "every other column": lambda packed: packed[..., ::2],
    "repeated": lambda packed: packed[:, :1].expand(2, 4, 48),
}


@pytest.mark.parametrize("name", list(STRIDED))
@pytest.mark.parametrize("which", ["x", "gate", "both"])
def test_strided_inputs(name: str, which: str, device: str) -> None:
    x, gate = (STRIDED[name](_random(2, 5, 48, dtype=torch.float32, device=device, seed=seed)) for seed in (0, 2))
    x = x.contiguous() if which == "gate" else x
    gate = gate.contiguous() if which == "x" else gate
    weight = _random(2 * x.shape[-1], dtype=torch.float32, device=device, seed=1)[::2]
    _check(x, gate, weight, **MAMBA)
    _check(x, gate, weight, num_groups=2, **QWEN)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x, gate = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, device=device, requires_grad=True)
    found = gated_rms_norm(x, gate, weight, eps=EPS, num_groups=2, **MAMBA)
    assert found.shape == shape
    found.sum().backward()
    for leaf in (x, gate):
        assert leaf.grad is not None
        assert leaf.grad.shape == shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("variant", [MAMBA, QWEN, KIMI], ids=str)
@pytest.mark.parametrize("eps", [2.0**-17, 2.0**-40])
def test_rows_so_small_that_eps_decides(variant: dict[str, Any], eps: float, device: str) -> None:
    x = _random(4, 40, dtype=torch.float32, device=device, scale=eps**0.5)
    x[0] = 0.0
    x[2] *= 1e-3
    gate = _random(4, 40, dtype=torch.float32, device=device, seed=2)
    _check(x, gate, _random(40, dtype=torch.float32, device=device, seed=1), eps=eps, **variant)
    gate[:] = 0.0
    with torch.no_grad():
        found = gated_rms_norm(x, gate, torch.ones(40, device=device), eps=eps, num_groups=1, **variant)
    assert found.any() != variant["is_silu"]  # silu(0) is 0, sigmoid(0) is 1/2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_stay_in_their_groups(dtype: torch.dtype, device: str) -> None:
    x, gate = (_random(6, 40, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    x[1, 3], x[2, 25] = float("nan"), float("inf")
    gate[4, 0] = float("nan")
    weight = _random(40, dtype=dtype, device=device, seed=1)
    for variant in VARIANTS:
        with torch.no_grad():
            found = gated_rms_norm(x, gate, weight, eps=EPS, num_groups=2, **variant)
        expected = _oracle(x.double(), gate.double(), weight.double(), (dtype, dtype), num_groups=2, **variant)
        assert_near(found, expected, TOLERANCES[dtype])
        broken = found.isnan().unflatten(-1, (2, 20)).any(-1).nonzero().tolist()
        assert broken == [[1, 0], [2, 1], [4, 0]]


def test_large_gates_are_open_or_shut(device: str) -> None:
    x = torch.ones(1, 4, device=device)
    gate = torch.tensor([[200.0, -200.0, 1e30, -1e30]], device=device)
    with torch.no_grad():
        found = gated_rms_norm(x, gate, torch.ones(4, device=device), eps=0.0, num_groups=1, **KIMI)
    assert_near(found, torch.tensor([[1.0, 0.0, 1.0, 0.0]], device=device), 1e-6)
    _check(x, gate.clamp(-200, 200), torch.ones(4, device=device), **QWEN)


@pytest.mark.parametrize("needing", list(product((True, False), repeat=3))[:-1], ids=str)
def test_gradients_where_only_some_inputs_need_one(needing: tuple[bool, bool, bool], device: str) -> None:
    shapes = ((3, 20), (3, 20), (20,))
    values = [_random(*shape, dtype=torch.float64, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    for variant in (MAMBA, KIMI):
        leaves = [value.clone().requires_grad_(needs) for value, needs in zip(values, needing, strict=True)]
        gated_rms_norm(*leaves, eps=EPS, num_groups=2, **variant).sum().backward()
        wide = [value.clone().requires_grad_() for value in values]
        expected = _oracle(wide[0], wide[1], wide[2], (torch.float64, torch.float64), num_groups=2, **variant)
        expected.sum().backward()
        for leaf, one, needs in zip(leaves, wide, needing, strict=True):
            assert (leaf.grad is not None) == needs
            if needs:
                assert_near(leaf.grad, one.grad, 1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradcheck(variant: dict[str, Any], device: str) -> None:
    x, gate, weight = (
        _random(*shape, dtype=torch.float64, device=device, seed=seed).requires_grad_()
        for seed, shape in enumerate(((1, 4), (1, 4), (4,)))
    )

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(*inputs, eps=EPS, num_groups=2, **variant)

    assert torch.autograd.gradcheck(run, (x, gate, weight))


def test_a_second_derivative_is_refused_instead_of_left_out(device: str) -> None:
    x, gate = (_random(2, 5, dtype=torch.float64, device=device, seed=seed).requires_grad_() for seed in (0, 2))
    y = gated_rms_norm(x, gate, torch.ones_like(x[0]), eps=EPS, num_groups=1, **MAMBA)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_inputs_are_left_as_they_are(device: str) -> None:
    given = [_random(*shape, dtype=torch.bfloat16, device=device) for shape in ((3, 20), (3, 20), (20,))]
    before = [each.clone() for each in given]
    with torch.no_grad():
        gated_rms_norm(*given, eps=EPS, num_groups=1, **QWEN)
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))


# --- the kernel of the layout -----------------------------------------------------------------------

NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "mamba2": lambda: MambaRMSNormGated(40),
    "zamba2": lambda: Zamba2RMSNormGated(40, 10),
    "qwen3_next": lambda: Qwen3NextRMSNormGated(40),
    "kimi_linear": lambda: KimiLinearRMSNormGated(40),
    "falcon_h1": lambda: FalconH1RMSNormGated(40, n_groups=2, norm_before_gate=False),
}


def _patched(name: str, dtype: torch.dtype, device: str) -> Any:
    norm = NORMS[name]().to(device=device, dtype=dtype)
    with torch.no_grad():
        norm.get_parameter("weight").copy_(_random(40, dtype=dtype, device=device, seed=9))
    packed = GatedRMSNormLayout.patch([norm])
    assert CudaFusedGatedRMSNorm.supports(packed) is None
    return packed


@pytest.mark.parametrize("name", list(NORMS))
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_the_kernel_against_the_stock_forward(
    name: str, x_dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    norm = _patched(name, w_dtype, device)
    for shape in ((6, 40), (2, 3, 40), (3, 1, 40)):
        x, gate = (_random(*shape, dtype=x_dtype, device=device, seed=seed).requires_grad_() for seed in (0, 2))
        expected, found = norm.reference(x, gate), CudaFusedGatedRMSNorm.forward(norm, x, gate)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        upstream = _random(*found.shape, dtype=found.dtype, device=device, seed=4)
        inputs = [x, gate, *norm.parameters()]
        pairs = [(found, expected)]
        pairs += zip(
            torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
        )
        for one, two in pairs:
            assert one.dtype == two.dtype
            # the stock backward rounds on the way
            assert_near(one, two, 2 * max(TOLERANCES[x_dtype], TOLERANCES[w_dtype]))
        with torch.no_grad():
            assert torch.equal(CudaFusedGatedRMSNorm.forward(norm, x, gate), found)


@pytest.mark.parametrize("name", list(NORMS))
def test_a_compiler_sees_the_formula_without_a_break(name: str) -> None:
    torch._dynamo.reset()  # which counts how often it compiles a function
    norm = _patched(name, torch.bfloat16, "cpu")
    x, gate = (_random(2, 5, 40, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (0, 2))
    compiled = torch.compile(partial(CudaFusedGatedRMSNorm.forward, norm), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, gate), norm.reference(x, gate))


def test_no_gate_and_a_gate_of_another_shape(device: str) -> None:
    norm = _patched("mamba2", torch.float32, device)
    x, gate = _random(2, 3, 40, dtype=torch.float32, device=device), torch.ones(2, 1, 40, device=device)
    with torch.no_grad():
        assert_near(CudaFusedGatedRMSNorm.forward(norm, x), norm.reference(x), 2e-6)
        assert torch.equal(CudaFusedGatedRMSNorm.forward(norm, x, gate), norm.reference(x, gate))
    with pytest.raises(AttributeError):  # as the stock class does
        CudaFusedGatedRMSNorm.forward(_patched("qwen3_next", torch.float32, device), x)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MOST_COLUMNS", 32)
    assert CudaFusedGatedRMSNorm.supports(GatedRMSNormLayout.patch([Zamba2RMSNormGated(40, 20)])) is None
    long = CudaFusedGatedRMSNorm.supports(GatedRMSNormLayout.patch([MambaRMSNormGated(40)]))
    assert long == "its groups of 40 are longer than 32"
    other = GatedRMSNormLayout.patch([FalconH1RMSNormGated(40, norm_before_gate=True)])
    assert CudaFusedGatedRMSNorm.supports(other) == "its forward is no known gated RMSNorm variant"
