"""The gated activation in Triton against its formula in float64: forward, backward, every variant, odd shapes, strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config, GptOssConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kconvert.errors import UsageError
from kconvert.kernels.gated_variant import GatedVariant, gated_formula
from kconvert.kernels.triton import gated_act as module
from kconvert.kernels.triton.gated_act import ACTIVATIONS, gated_act
from tests.triton.norm_checks import TOLERANCES, Poisoned, assert_near

DTYPES = list(TOLERANCES)
SIZES = [1, 7, 100, 1000, 1025]
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
VARIANTS = [
    GatedVariant(activation, limit=limit, is_up_first=up_first, is_interleaved=interleaved)
    for activation, limit, up_first, interleaved in product(ACTIVATIONS, (None, 1.5), (False, True), (False, True))
]
OAI = GatedVariant("swiglu_oai", limit=7.0, is_interleaved=True)

# A step of the narrow type for each time that it is rounded to before the last; the interpreter cuts bfloat16 off.
_ROUNDINGS = {"silu": 2, "gelu": 2, "gelu_tanh": 2, "swiglu_oai": 4}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value", "ignore:divide by zero")


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", Poisoned())


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    values = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _formula(packed: torch.Tensor, variant: GatedVariant) -> torch.Tensor:
    """As the stock models write it."""
    half = packed.shape[-1] // 2
    if variant.is_interleaved:
        gate, up = packed[..., ::2], packed[..., 1::2]
    else:
        gate, up = packed[..., :half], packed[..., half:]
    if variant.is_up_first:
        gate, up = up, gate
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(-variant.limit, variant.limit)
    if variant.activation == "swiglu_oai":
        return (up + 1) * (gate * torch.sigmoid(gate * variant.alpha))
    return PLAIN[variant.activation](gate) * up


def _check(packed: torch.Tensor, variant: GatedVariant) -> None:
    """Forward without and with gradients, and the gradient, against `_formula` in float64."""
    tolerance = TOLERANCES[packed.dtype] * (_ROUNDINGS[variant.activation] if packed.element_size() == 2 else 2)
    wide = packed.detach().double().requires_grad_()
    expected = _formula(wide, variant)
    with torch.no_grad():
        found = gated_act(packed, variant)
    assert found.dtype == packed.dtype
    assert found.is_contiguous()
    assert_near(found, expected, tolerance)
    leaf = packed.detach().requires_grad_()
    tracked = gated_act(leaf, variant)
    assert torch.equal(tracked.nan_to_num(), found.nan_to_num())
    upstream = _random(*found.shape, dtype=packed.dtype, device=str(packed.device), seed=1)
    tracked.backward(upstream)
    expected.backward(upstream.double())
    assert_near(leaf.grad, wide.grad, tolerance)


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "variant"),
    [
        ([1.0, -1.0, 2.0, -2.0], GatedVariant("silu")),
        ([2.0, -2.0, 1.0, -1.0], GatedVariant("silu", is_up_first=True)),
        ([1.0, 2.0, -1.0, -2.0], GatedVariant("silu", is_interleaved=True)),
        ([2.0, 1.0, -2.0, -1.0], GatedVariant("silu", is_interleaved=True, is_up_first=True)),
    ],
    ids=["halves", "up first", "interleaved", "interleaved, up first"],
)
def test_which_elements_are_gate_and_up(device: str, values: list[float], variant: GatedVariant) -> None:
    found = gated_act(torch.tensor([values], device=device), variant).cpu()
    torch.testing.assert_close(found, torch.tensor([[1.4621, 0.5379]]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("activation", "right"),
    [
        ("silu", [1.4621, 0.5379]),
        ("gelu", [1.6827, 0.3173]),
        ("gelu_tanh", [1.6824, 0.3176]),
        # (up + 1) * gate * sigmoid(1.702 * gate)
        ("swiglu_oai", [3 * 0.84580, 0.15420]),
    ],
)
def test_activations_by_value(device: str, activation: str, right: list[float]) -> None:
    found = gated_act(torch.tensor([1.0, -1.0, 2.0, -2.0], device=device), GatedVariant(activation)).cpu()
    torch.testing.assert_close(found, torch.tensor(right), rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_experts_of_gpt_oss_and_deepseek_v4(device: str, dtype: torch.dtype) -> None:
    oss: Any = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    deepseek: Any = DeepseekV4Experts(
        DeepseekV4Config(hidden_size=8, moe_intermediate_size=8, n_routed_experts=2, swiglu_limit=2.0)
    )
    packed = 5 * _random(5, 36, dtype=dtype, device=device)
    for experts, variant in ((oss, OAI), (deepseek, GatedVariant("silu", limit=2.0))):
        assert (experts.limit, getattr(experts, "alpha", 1.702)) == (variant.limit, variant.alpha)
        expected = experts._apply_gate(packed)
        assert not torch.allclose(expected, experts._apply_gate(packed / 2), rtol=1e-2)
        assert_near(gated_act(packed, variant), expected, TOLERANCES[dtype] * 4)


# --- every variant, dtype and size --------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(each) for each in v if each != 1.702))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_variant(device: str, dtype: torch.dtype, variant: GatedVariant) -> None:
    packed = _random(5, 2 * 33, dtype=dtype, device=device)
    _check(packed, variant)
    assert torch.equal(gated_formula(packed, variant), _formula(packed, variant))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(device: str, dtype: torch.dtype, size: int, activation: str) -> None:
    for rows, interleaved in ((1, False), (3, True)):
        packed = _random(rows, 2 * size, dtype=dtype, device=device)
        _check(packed, GatedVariant(activation, is_interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 12288), (2, 4100), (70, 768), (300, 16)])
def test_rows_and_blocks(device: str, rows: int, size: int, interleaved: bool) -> None:
    variant = GatedVariant("silu", is_interleaved=interleaved)
    _check(_random(rows, 2 * size, dtype=torch.float32, device=device), variant)


def test_what_one_program_works_on() -> None:
    tiles = {size: module._tile(size) for size in (1, 100, 768, 1025, 11008, 12288)}
    assert tiles == {
        1: (128, 16),
        100: (16, 128),
        768: (8, 256),
        1025: (8, 256),
        11008: (1, 2048),
        12288: (1, 2048),
    }


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[..., 16:80],
    "odd columns": lambda x: x[..., 3:57],
    "every other row": lambda x: x[:, ::2],
    "transposed": _transposed,
    "transposed columns": lambda x: x.transpose(0, 1)[..., 1:31],
    "reversed axes": lambda x: x.permute(2, 0, 1),
    "expanded": lambda x: x[:1, :1].expand(3, 2, -1),
    "one row": lambda x: x[1, 2],
    "four axes": lambda x: x.view(3, 4, 2, 48).transpose(1, 2),
}


@pytest.mark.parametrize("name", list(STRIDED))
@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_inputs(device: str, name: str, interleaved: bool) -> None:
    base = _random(3, 4, 96, dtype=torch.float32, device=device)
    before = base.clone()
    packed = STRIDED[name](base)
    _check(packed, GatedVariant("silu", is_interleaved=interleaved))
    assert torch.equal(base, before)


def test_a_gradient_of_any_strides(device: str) -> None:
    packed = _random(3, 40, dtype=torch.float32, device=device).requires_grad_()
    gated_act(packed, GatedVariant()).sum().backward()
    wide = packed.detach().double().requires_grad_()
    _formula(wide, GatedVariant()).sum().backward()
    assert_near(packed.grad, wide.grad, 2e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 6), (0,)], ids=str)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    packed = torch.zeros(shape, device=device, requires_grad=True)
    found = gated_act(packed, GatedVariant())
    assert found.shape == (*shape[:-1], shape[-1] // 2)
    found.sum().backward()
    assert packed.grad is not None
    assert packed.grad.shape == shape


# --- NaN and infinity -------------------------------------------------------------------------------

_ODD = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 1e4, -1e4]


@pytest.mark.parametrize("variant", VARIANTS[::4], ids=lambda v: "-".join(str(each) for each in v if each != 1.702))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_come_out_as_torch_gives_them(device: str, dtype: torch.dtype, variant: GatedVariant) -> None:
    pairs = torch.tensor(list(product(_ODD, _ODD)), dtype=torch.float64)
    packed = pairs.T.reshape(1, -1).to(dtype).to(device)
    # in float64: in narrower types torch gives NaN for gelu(inf) on some machines
    wide = packed.to(torch.float64, copy=True).requires_grad_()
    leaf = packed.clone().requires_grad_()
    expected, found = _formula(wide, variant), gated_act(leaf, variant)
    assert_near(found, expected.to(dtype), TOLERANCES[dtype] * 4)
    expected.backward(torch.ones_like(expected))
    found.backward(torch.ones_like(found))
    assert leaf.grad is not None
    assert wide.grad is not None
    # torch adds up two terms of this gradient, which for an infinite `up` may be an infinity and a NaN
    is_apart = pairs[:, 1].isinf().to(device) if variant.activation == "swiglu_oai" and variant.limit is None else False
    gate, up = (grad.chunk(2, dim=-1) for grad in (leaf.grad, wide.grad.to(dtype)))
    for found_half, expected_half, skipped in zip(gate, up, (is_apart, False), strict=True):
        both = [half.masked_fill(torch.as_tensor(skipped, device=device), 0.0) for half in (found_half, expected_half)]
        assert_near(both[0], both[1], TOLERANCES[dtype] * 4)


# --- rounding, gradients, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("variant", [*map(GatedVariant, ACTIVATIONS), OAI], ids=str)
def test_narrow_types_round_where_torch_does(device: str, variant: GatedVariant) -> None:
    # the interpreter does not round to bfloat16, it cuts off
    for dtype in (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,):
        packed = _random(16, 2000, dtype=dtype, device=device)
        found, expected = gated_act(packed, variant), _formula(packed, variant)
        same = (found == expected).double().mean()
        once = (_formula(packed.float(), variant).to(dtype) == expected).double().mean()
        assert once < 0.8
        assert same > 0.97


@pytest.mark.parametrize("variant", VARIANTS[::3], ids=lambda v: "-".join(str(each) for each in v if each != 1.702))
def test_gradcheck(device: str, variant: GatedVariant) -> None:
    packed = _random(1, 6, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gated_act(x, variant), (packed,))


def test_only_the_input_is_kept(device: str) -> None:
    packed = _random(3, 4, 40, dtype=torch.float32, device=device).requires_grad_()
    made = gated_act(packed, GatedVariant())
    (kept,) = made.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert kept.data_ptr() == packed.data_ptr()
    with torch.no_grad():
        assert gated_act(packed, GatedVariant()).grad_fn is None
    assert gated_act(packed.detach(), GatedVariant()).grad_fn is None


def test_no_second_derivative(device: str) -> None:
    packed = _random(2, 8, dtype=torch.float32, device=device).requires_grad_()
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(gated_act(packed, GatedVariant()).sum(), packed, create_graph=True)


def test_more_elements_than_an_int_counts(device: str) -> None:
    if device != "cuda":
        pytest.skip("takes 7 GB of device memory")
    packed = torch.zeros(2**20 + 3, 2048, dtype=torch.bfloat16, device=device)
    packed[-3:] = _random(3, 2048, dtype=torch.bfloat16, device=device)
    found = gated_act(packed, GatedVariant())
    assert_near(found[-3:], _formula(packed[-3:].double(), GatedVariant()), 1.6e-2)
    assert not found[:-3].any()


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "variant", "said"),
    [
        (7, GatedVariant(), "gate and up cannot share a row of 7"),
        (8, GatedVariant("relu"), "no gated activation 'relu'; use one of silu, gelu, gelu_tanh, swiglu_oai"),
        (8, GatedVariant(limit=-1.0), "cannot be limited to -1.0"),
        (8, GatedVariant(limit=float("nan")), "cannot be limited to nan"),
    ],
)
def test_refusals(device: str, width: int, variant: GatedVariant, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        gated_act(torch.zeros(2, width, device=device), variant)
