"""RMSNorm in Triton against its formula in float64: forward, backward, every variant, odd shapes, strided inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.imagegpt.modeling_imagegpt import ImageGPTLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kconvert.kernels.ops.rms_norm import cuda
from kconvert.kernels.ops.rms_norm.cuda import CudaFusedRMSNorm
from kconvert.kernels.ops.rms_norm.layout import RMSNormLayout, rms_norm_formula
from kconvert.kernels.triton import rms_norm as module
from kconvert.kernels.triton.rms_norm import add_rms_norm, rms_norm, stages_of
from tests.triton.norm_checks import TOLERANCES, Poisoned, assert_near, round_as_on_devices, rounded

DTYPES = list(TOLERANCES)
VARIANTS = list(product((0.0, 1.0), (True, False)))
PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
]
EPS = 2.0**-20
"""A launch takes it as float32, which has this value."""


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", Poisoned())
    round_as_on_devices(monkeypatch)


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _oracle(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    offset: float,
    cast_first: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`y` and `h` in float64 of float64 tensors that hold values of `dtypes`, rounded where `rms_norm_formula` rounds."""
    x_dtype, w_dtype = dtypes
    total = x if residual is None else rounded(x + residual, x_dtype)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return rounded(normed, x_dtype), total
    if cast_first:
        scale = weight if offset == 0.0 else rounded(weight + offset, w_dtype)
        return rounded(scale * rounded(normed, x_dtype), torch.promote_types(x_dtype, w_dtype)), total
    return rounded(normed * (weight + offset), x_dtype), total


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    offset: float = 0.0,
    cast_first: bool = True,
    residual: torch.Tensor | None = None,
    eps: float = EPS,
) -> None:
    """Forward without and with gradients, and every gradient, against `_oracle`."""
    dtypes = (x.dtype, x.dtype if weight is None else weight.dtype)
    options: dict[str, Any] = {"eps": eps, "offset": offset, "cast_first": cast_first}
    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, residual, weight)]
    assert wide[0] is not None
    expected, expected_total = _oracle(wide[0], wide[1], wide[2], offset, cast_first, dtypes, eps)
    tolerance = TOLERANCES[x.dtype]
    out_dtype = torch.promote_types(*dtypes) if cast_first else x.dtype
    with torch.no_grad():
        if residual is None:
            found, total = rms_norm(x, weight, **options), x
        else:
            found, total = add_rms_norm(x, residual, weight, **options)
    assert found.dtype == out_dtype
    assert found.is_contiguous()
    assert_near(found, expected, tolerance)
    assert_near(total, expected_total, tolerance)

    # leaves keep the strides of what was given, and the same values
    leaves = [None if each is None else each.detach().requires_grad_() for each in (x, residual, weight)]
    assert leaves[0] is not None
    upstream = _random(*x.shape, dtype=out_dtype, device=str(x.device), seed=7)
    if residual is None:
        again = rms_norm(leaves[0], leaves[2], **options)
        again.backward(upstream)
        expected.backward(upstream.double())
    else:
        assert leaves[1] is not None
        upstream_total = _random(*x.shape, dtype=x.dtype, device=str(x.device), seed=8)
        again, total = add_rms_norm(leaves[0], leaves[1], leaves[2], **options)
        torch.autograd.backward([again, total], [upstream, upstream_total])
        torch.autograd.backward([expected, expected_total], [upstream.double(), upstream_total.double()])
    assert torch.equal(again.detach().nan_to_num(), found.nan_to_num())
    # the gradient of a row is a difference of numbers of this size
    rstd = torch.rsqrt(expected_total.detach().pow(2).mean(-1) + eps).nan_to_num(posinf=0.0)
    scale = float(rstd.max()) * (1.0 if weight is None else float((weight.double() + offset).abs().nan_to_num().max()))
    for leaf, one in zip(leaves, wide, strict=True):
        if leaf is not None and one is not None:
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            assert_near(leaf.grad, one.grad, max(tolerance, TOLERANCES[leaf.dtype]), scale=scale)


@pytest.mark.parametrize("columns", [1, 7, 100, 1000, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant_and_size(dtype: torch.dtype, columns: int, device: str) -> None:
    x = _random(3, columns, dtype=dtype, device=device)
    weight = _random(columns, dtype=dtype, device=device, seed=1)
    residual = _random(3, columns, dtype=dtype, device=device, seed=2)
    for offset, cast_first in VARIANTS:
        _check(x, weight, offset=offset, cast_first=cast_first)
    _check(x, weight, offset=1.0, cast_first=False, residual=residual)
    _check(x, weight, residual=residual)
    _check(x, None)
    _check(x, None, cast_first=False, residual=residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("offset", "cast_first"), VARIANTS)
def test_the_place_of_the_cast(dtype: torch.dtype, offset: float, cast_first: bool, device: str) -> None:
    """In narrow types nearly every value is that of its own formula to the bit, and many are not those of the other."""
    x, weight = _random(20, 100, dtype=dtype, device=device), _random(100, dtype=dtype, device=device, seed=1)
    options: dict[str, Any] = {"eps": EPS, "offset": offset}
    with torch.no_grad():
        found = rms_norm(x, weight, cast_first=cast_first, **options)
        own, other = (
            rms_norm_formula(x, weight, cast_first=first, **options) for first in (cast_first, not cast_first)
        )
    assert float((found != own).double().mean()) < 0.005
    assert float((found != other).double().mean()) > 0.1


@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("offset", "cast_first"), VARIANTS)
def test_a_weight_of_another_dtype(
    x_dtype: torch.dtype, w_dtype: torch.dtype, offset: float, cast_first: bool, device: str
) -> None:
    x, weight = _random(4, 33, dtype=x_dtype, device=device), _random(33, dtype=w_dtype, device=device, seed=1)
    _check(x, weight, offset=offset, cast_first=cast_first)
    _check(x, weight, offset=offset, cast_first=cast_first, residual=_random(4, 33, dtype=x_dtype, device=device))


def test_launches_of_one_shape_that_differ_only_in_a_dtype(device: str) -> None:
    """What is compiled for one residual is not taken for the next."""
    x, weight = _random(4, 64, dtype=torch.float32, device=device), _random(64, dtype=torch.float32, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        residual = _random(4, 64, dtype=dtype, device=device, seed=3)
        _check(x, weight, residual=residual)


@pytest.mark.parametrize("shape", [(1, 16), (300, 16), (2, 3, 16), (2, 3, 5, 16), (700, 3), (40, 1)], ids=str)
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    x, weight = (
        _random(*shape, dtype=torch.float32, device=device),
        _random(shape[-1], dtype=torch.float32, device=device),
    )
    _check(x, weight, offset=1.0, cast_first=False)
    _check(x, weight, residual=_random(*shape, dtype=torch.float32, device=device, seed=5))


def _heads(packed: Any) -> Any:
    return packed[..., :24].unflatten(-1, (3, 8))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "query heads": _heads,
    "query heads, moved": lambda packed: _heads(packed).transpose(1, 2),
    "key heads": lambda packed: packed[..., 24:].unflatten(-1, (3, 8)),
    "every other row": lambda packed: packed[:, ::2],
    "one row of each": lambda packed: packed[:, 1],
    "every other column": lambda packed: packed[..., ::2],
    "columns first": lambda packed: packed.transpose(1, 2),
    "repeated": lambda packed: packed[:, :1].expand(2, 4, 48),
    "upside down": lambda packed: packed.flip(0).transpose(0, 1),
}


@pytest.mark.parametrize("name", list(STRIDED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(name: str, dtype: torch.dtype, device: str) -> None:
    x = STRIDED[name](_random(2, 5, 48, dtype=dtype, device=device))
    weight = _random(x.shape[-1], dtype=dtype, device=device, seed=1)
    _check(x, weight)
    _check(x, weight, residual=_random(*x.shape, dtype=dtype, device=device, seed=2))


def test_a_strided_weight_residual_and_upstream(device: str) -> None:
    x = _random(3, 8, dtype=torch.float32, device=device)
    residual = _random(8, 3, dtype=torch.float32, device=device, seed=3).T
    _check(x, _random(16, dtype=torch.float32, device=device)[::2], residual=residual)
    leaf = x.requires_grad_()
    upstream = _random(8, 3, dtype=torch.float32, device=device, seed=4).T
    (found,) = torch.autograd.grad(rms_norm(leaf, None, eps=EPS, offset=0.0, cast_first=True), leaf, upstream)
    other = rms_norm(leaf, None, eps=EPS, offset=0.0, cast_first=True)
    assert torch.equal(found, torch.autograd.grad(other, leaf, upstream.contiguous())[0])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 4, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x = torch.zeros(shape, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    found = rms_norm(x, weight, eps=EPS, offset=0.0, cast_first=True)
    assert found.shape == shape
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 8
    with torch.no_grad():
        normed, total = add_rms_norm(x, x, weight, eps=EPS, offset=0.0, cast_first=True)
    assert normed.shape == total.shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [2.0**-17, 2.0**-20, 2.0**-40])
def test_rows_so_small_that_eps_decides(dtype: torch.dtype, eps: float, device: str) -> None:
    x = _random(4, 40, dtype=dtype, device=device, scale=eps**0.5)
    x[0] = 0.0
    x[2] *= 1e-3
    _check(x, _random(40, dtype=dtype, device=device, seed=1), eps=eps)
    with torch.no_grad():
        assert not rms_norm(x[:1], None, eps=eps, offset=0.0, cast_first=True).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, device: str) -> None:
    x = _random(6, 40, dtype=dtype, device=device)
    x[1, 3], x[2, 5], x[4, 0] = float("nan"), float("inf"), float("-inf")
    weight = _random(40, dtype=dtype, device=device, seed=1)
    for offset, cast_first in VARIANTS:
        _check(x, weight, offset=offset, cast_first=cast_first)
    with torch.no_grad():
        found = rms_norm(x, weight, eps=EPS, offset=0.0, cast_first=True)
    assert found.isnan().any(-1).tolist() == [False, True, True, False, True, False]
    weight[7] = float("nan")
    with torch.no_grad():
        found = rms_norm(x[:1], weight, eps=EPS, offset=0.0, cast_first=True)
    assert found.isnan().nonzero().tolist() == [[0, 7]]


def test_large_values_overflow_as_the_formula_does(device: str) -> None:
    x = _random(2, 40, dtype=torch.float32, device=device, scale=1e20)
    with torch.no_grad():
        found = rms_norm(x, None, eps=EPS, offset=0.0, cast_first=True)
    assert found.tolist() == (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).tolist()
    assert not found.any()  # the mean square is infinite
    half = _random(2, 40, dtype=torch.float16, device=device, scale=1e4)
    _check(half.clamp(-6e4, 6e4), None)  # its squares do not fit into float16


@pytest.mark.parametrize("needing", list(product((True, False), repeat=3))[:-1], ids=str)
def test_gradients_where_only_some_inputs_need_one(needing: tuple[bool, bool, bool], device: str) -> None:
    shapes = ((3, 20), (3, 20), (20,))
    values = [_random(*shape, dtype=torch.float64, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    leaves = [value.clone().requires_grad_(needs) for value, needs in zip(values, needing, strict=True)]
    y, _ = add_rms_norm(*leaves, eps=EPS, offset=1.0, cast_first=False)
    assert y.requires_grad
    y.sum().backward()
    wide = [value.clone().requires_grad_() for value in values]
    _oracle(wide[0], wide[1], wide[2], 1.0, False, (torch.float64, torch.float64))[0].sum().backward()
    for leaf, one, needs in zip(leaves, wide, needing, strict=True):
        assert (leaf.grad is not None) == needs
        if needs:
            assert_near(leaf.grad, one.grad, 1e-12)


def test_only_the_sum_is_used_further(device: str) -> None:
    x = _random(3, 20, dtype=torch.float64, device=device).requires_grad_()
    residual = _random(3, 20, dtype=torch.float64, device=device, seed=1).requires_grad_()
    _, total = add_rms_norm(x, residual, None, eps=EPS, offset=0.0, cast_first=True)
    total.sum().backward()
    for leaf in (x, residual):
        assert leaf.grad is not None
        assert leaf.grad.eq(1.0).all()


@pytest.mark.parametrize(("offset", "cast_first"), VARIANTS)
def test_gradcheck(offset: float, cast_first: bool, device: str) -> None:
    x, residual, weight = (
        _random(*shape, dtype=torch.float64, device=device, seed=seed).requires_grad_()
        for seed, shape in enumerate(((2, 3), (2, 3), (3,)))
    )

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=EPS, offset=offset, cast_first=cast_first)

    def added(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(*inputs, eps=EPS, offset=offset, cast_first=cast_first)

    assert torch.autograd.gradcheck(plain, (x, weight))
    assert torch.autograd.gradcheck(added, (x, residual, weight))


def test_a_second_derivative_is_refused_instead_of_left_out(device: str) -> None:
    x = _random(2, 5, dtype=torch.float64, device=device).requires_grad_()
    normed = rms_norm(x, None, eps=EPS, offset=0.0, cast_first=True)
    (grad,) = torch.autograd.grad(normed.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (grad.sum() + x.sum()).backward()


def test_inputs_are_left_as_they_are(device: str) -> None:
    x, weight = _random(3, 20, dtype=torch.bfloat16, device=device), _random(20, dtype=torch.bfloat16, device=device)
    before = x.clone(), weight.clone()
    with torch.no_grad():
        add_rms_norm(x, x, weight, eps=EPS, offset=1.0, cast_first=True)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


# --- the kernel of the layout -----------------------------------------------------------------------

NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(40),
    "gemma": lambda: Gemma3RMSNorm(40),
    "olmo2": lambda: Olmo2RMSNorm(40, eps=1e-5),
    "t5": lambda: T5LayerNorm(40),
    "weightless": Llama4TextL2Norm,
    "without scale": lambda: Gemma4RMSNorm(40, with_scale=False),
}


def _patched(name: str, dtype: torch.dtype, device: str) -> Any:
    norm = NORMS[name]().to(device=device, dtype=dtype)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.copy_(_random(*weight.shape, dtype=dtype, device=device, seed=9))
    packed = RMSNormLayout.patch([norm])
    assert CudaFusedRMSNorm.supports(packed) is None
    return packed


@pytest.mark.parametrize("name", list(NORMS))
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_the_kernel_against_the_stock_forward(
    name: str, x_dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    norm = _patched(name, w_dtype, device)
    x = _random(2, 5, 40, dtype=x_dtype, device=device).requires_grad_()
    expected, found = norm.reference(x), CudaFusedRMSNorm.forward(norm, x)
    assert found.dtype == expected.dtype
    upstream = _random(2, 5, 40, dtype=found.dtype, device=device, seed=4)
    inputs = [x, *norm.parameters()]
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    )
    for one, two in pairs:
        assert one.dtype == two.dtype
        # the stock backward rounds on the way
        assert_near(one, two, 2 * max(TOLERANCES[x_dtype], TOLERANCES[w_dtype]))
    with torch.no_grad():
        assert torch.equal(CudaFusedRMSNorm.forward(norm, x), found)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_weight_that_a_wrapper_took_from_the_parameters(name: str, device: str) -> None:
    norm = _patched(name, torch.float32, device)
    x = _random(3, 40, dtype=torch.float32, device=device)
    with torch.no_grad():
        expected = CudaFusedRMSNorm.forward(norm, x)
        weight = norm.weight.detach()
        del norm.weight
        norm.weight = weight
        assert torch.equal(CudaFusedRMSNorm.forward(norm, x), expected)


@pytest.mark.parametrize("name", list(NORMS))
def test_a_compiler_sees_the_formula_without_a_break(name: str) -> None:
    torch._dynamo.reset()  # which counts how often it compiles a function
    norm = _patched(name, torch.bfloat16, "cpu")
    x = _random(2, 5, 40, dtype=torch.bfloat16, device="cpu").requires_grad_()
    compiled = torch.compile(partial(CudaFusedRMSNorm.forward, norm), fullgraph=True, backend="aot_eager")
    found, expected = compiled(x), norm.reference(x)
    assert torch.equal(found, expected)
    inputs = [x, *norm.parameters()]
    for one, two in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        assert_near(one, two, TOLERANCES[torch.bfloat16])


def test_rows_that_no_program_can_hold_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MOST_COLUMNS", 32)
    long = RMSNormLayout.patch([LlamaRMSNorm(33)])
    assert CudaFusedRMSNorm.supports(long) == "its rows of 33 are longer than 32"
    norm: Any = RMSNormLayout.patch([Llama4TextL2Norm()])
    assert CudaFusedRMSNorm.supports(norm) is None
    x = torch.ones(1, 33, device=device)
    with torch.no_grad():
        assert torch.equal(CudaFusedRMSNorm.forward(norm, x), norm.reference(x))


def test_what_is_no_known_norm_is_refused() -> None:
    reason = CudaFusedRMSNorm.supports(RMSNormLayout.patch([ImageGPTLayerNorm((40,))]))
    assert reason == "its forward is no known RMSNorm variant"


@pytest.mark.parametrize(
    ("columns", "dtypes", "stages"),
    [
        (8192, [torch.bfloat16, torch.bfloat16, None], 3),
        (8192, [torch.bfloat16, torch.bfloat16, torch.bfloat16], 3),
        (16384, [torch.bfloat16, torch.bfloat16, None], 2),
        (8192, [torch.float32, torch.float32, None], 2),
        (65536, [torch.float32, torch.float32, torch.float32], 1),
    ],
)
def test_what_is_read_ahead_fits_into_shared_memory(
    columns: int, dtypes: list[torch.dtype | None], stages: int
) -> None:
    assert stages_of(columns, *dtypes) == stages
