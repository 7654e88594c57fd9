"""The rotary embedding in Triton: the bits of transformers' own functions, and with norms the formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.glm import modeling_glm
from transformers.models.glm4v import modeling_glm4v
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter
from transformers.models.phi3 import modeling_phi3

from kconvert.kernels.rotation import HeadNorms, Rotation
from kconvert.kernels.triton import rope as module
from kconvert.kernels.triton.rope import rope
from tests.triton.norm_checks import TOLERANCES, Poisoned, assert_near, round_as_on_devices, rounded

DTYPES = list(TOLERANCES)
EPS = 2.0**-20
"""A launch takes it as float32, which has this value."""

HALVES = Rotation(0)
PAIRS = Rotation(0, is_interleaved=True, writes_halves=False)
STOCK: dict[str, tuple[Any, Rotation]] = {
    "llama": (modeling_llama.apply_rotary_pos_emb, HALVES),
    "olmo2": (modeling_olmo2.apply_rotary_pos_emb, HALVES._replace(keeps_dtype=True)),
    "vision": (modeling_glm4v.apply_rotary_pos_emb_vision, HALVES._replace(is_wide=True, keeps_dtype=True)),
    "cohere": (modeling_cohere.apply_rotary_pos_emb, PAIRS._replace(is_wide=True, keeps_dtype=True)),
    "ernie": (
        modeling_ernie4_5.apply_rotary_pos_emb,
        PAIRS._replace(has_half_table=True, is_wide=True, keeps_dtype=True),
    ),
    "glm": (modeling_glm.apply_rotary_pos_emb, PAIRS._replace(has_half_table=True)),
    "gpt_neox": (modeling_gpt_neox.apply_rotary_pos_emb, HALVES),
    "phi3": (modeling_phi3.apply_rotary_pos_emb, HALVES),
    "deepseek_v3": (
        modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
        Rotation(0, is_interleaved=True, has_half_table=True),
    ),
    "gpt_oss": (modeling_gpt_oss.apply_rotary_pos_emb, HALVES._replace(has_half_table=True)),
    "privacy_filter": (modeling_openai_privacy_filter.apply_rotary_pos_emb, PAIRS._replace(has_half_table=True)),
}
PARTIAL = ("glm", "gpt_neox", "phi3")
HALF_WIDTH = ("gpt_oss", "privacy_filter")


class PoisonedStrides(Poisoned):
    """What has strides of its own is full of NaN too."""

    @staticmethod
    def empty_strided(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.empty_strided`, filled."""
        return torch.empty_strided(*args, **kwargs).fill_(float("nan"))


DTYPE_PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32)]


def mixed(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination on a GPU; interpreted, where that takes long, every pair of the first two and one of the last."""
    if torch.cuda.is_available():
        return list(product(*choices))
    (first, second), rest = (list(choice) for choice in choices[:2]), [list(choice) for choice in choices[2:]]
    pairs = [(one, two, i + j) for i, one in enumerate(first) for j, two in enumerate(second)]
    return [(one, two, *(choice[number % len(choice)] for choice in rest)) for one, two, number in pairs]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", PoisonedStrides())
    round_as_on_devices(monkeypatch)


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _heads(
    device: str,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    tokens: int = 3,
    heads: tuple[int, int] = (3, 2),
    dim: int = 10,
    axis: int = 1,
    packed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k: views of one packed projection, as attention has them, or tensors of their own."""
    made = []
    both = _random(batch, tokens, (sum(heads) + 1) * dim, dtype=dtype, device=device)
    for number, count in enumerate(heads):
        part = both[..., number * heads[0] * dim :][..., : count * dim] if packed else both[..., : count * dim].clone()
        x = part.view(batch, tokens, count, dim)
        made.append(x.transpose(1, 2) if axis == 1 else x)
    return made[0], made[1]


def _tables(
    device: str, dtype: torch.dtype, width: int, *, batch: int = 1, tokens: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of no angles: every element counts."""
    cos, sin = (_random(batch, tokens, width, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    return cos, sin


def _same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        assert torch.equal(one.isnan(), two.isnan())
        assert torch.equal(one.nan_to_num(0.0), two.nan_to_num(0.0))


@pytest.mark.parametrize(("name", "dtypes"), mixed(STOCK, DTYPE_PAIRS), ids=str)
def test_the_bits_of_stock(name: str, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    function, rotation = STOCK[name]
    if rotation.is_wide and torch.float64 in dtypes:
        pytest.skip("stock computes in float32 there")
    axis = 2 if name == "vision" else 1
    for dim, size, tokens in [(10, 10, 2), (16, 6, 2)] if name in PARTIAL else [(10, 10, 2), (2, 2, 1), (16, 16, 1)]:
        q, k = _heads(device, dtypes[0], dim=dim, axis=axis, tokens=tokens)
        cos, sin = _tables(device, dtypes[1], size // 2 if name in HALF_WIDTH else size, tokens=tokens)
        expected = function(q, k, cos[0], sin[0]) if name == "vision" else function(q, k, cos, sin)
        found = rope(q, k, cos, sin, rotation=rotation._replace(size=size), heads_axis=axis)
        _same(found, expected)
        if name == "llama" and tokens > 1:  # what caches and attention get is laid out as they know it
            assert found[0].stride() == expected[0].stride()
            assert found[1].is_contiguous()


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize(
    ("heads", "dim", "axis"),
    [
        ((1, 1), 64, 1),
        ((4, 1), 80, 2),
        ((5, 3), 96, 1),
        ((17, 2), 128, 2),
        ((2, 2), 256, 1),
        ((3, 1), 6, 2),
        ((70, 40), 126, 1),
    ],
    ids=str,
)
def test_heads(heads: tuple[int, int], dim: int, axis: int, packed: bool, device: str) -> None:
    q, k = _heads(device, torch.bfloat16, batch=1, tokens=2, heads=heads, dim=dim, axis=axis, packed=packed)
    cos, sin = _tables(device, torch.bfloat16, dim, tokens=2)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=axis)
    _same(rope(q, k, cos, sin, rotation=Rotation(dim), heads_axis=axis), expected)


def test_more_tokens_than_a_few(device: str) -> None:
    """Programs then have more heads each, and the heads beyond the last are many."""
    q, k = _heads(device, torch.float32, batch=1, tokens=33, heads=(9, 1), dim=128)
    cos, sin = _tables(device, torch.float32, 128, tokens=33)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    _same(rope(q, k, cos, sin, rotation=Rotation(128), heads_axis=1), expected)


def _strided(name: str, device: str) -> tuple[torch.Tensor, ...]:
    dtype = torch.float32
    q, k = _heads(device, dtype, dim=16, heads=(2, 1))
    cos, sin = _tables(device, dtype, 16)
    if name == "one sequence each":
        cos, sin = _tables(device, dtype, 16, batch=2)
    elif name == "one token for all":
        cos, sin = _tables(device, dtype, 16, tokens=1)
    elif name == "expanded":
        cos, sin = cos.expand(2, -1, -1), sin.expand(2, -1, -1)
    elif name == "tables in other strides":
        cos, sin = cos.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([sin, sin], dim=-1)[..., 0]
    elif name == "every second element":
        q, k = q.repeat_interleave(2, dim=-1)[..., ::2], k.repeat_interleave(2, dim=-1)[..., ::2]
    elif name == "heads before tokens":
        q, k = q.contiguous(), k.contiguous()
    elif name == "odd offset":
        q, k = (torch.cat([x[..., :1], x, x], dim=-1)[..., 1:17] for x in (q, k))
    elif name == "one token":
        q, k, cos, sin = q[:, :, :1], k[:, :, :1], cos[:, :1], sin[:, :1]
    elif name == "no tokens":
        q, k, cos, sin = q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]
    elif name == "not finite":
        q = q.clone()
        q[0, 0, 0, 3], q[0, 1, 1, 5], q[1, 1, 2, 7] = float("nan"), float("inf"), -float("inf")
    return q, k, cos, sin


@pytest.mark.parametrize(
    "name",
    [
        "one sequence each",
        "one token for all",
        "expanded",
        "tables in other strides",
        "every second element",
        "heads before tokens",
        "odd offset",
        "one token",
        "no tokens",
        "not finite",
    ],
)
def test_strides_and_shapes(name: str, device: str) -> None:
    q, k, cos, sin = _strided(name, device)
    _same(
        rope(q, k, cos, sin, rotation=Rotation(16), heads_axis=1), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    )
    rotation = Rotation(8, start=8, is_interleaved=True, writes_halves=False)
    half = cos[..., :8], sin[..., :8]
    turned: Any = modeling_glm.apply_rotary_pos_emb  # first half of the table, first part of the head
    expected = [x.roll(8, dims=-1) for x in turned(q.roll(8, dims=-1), k.roll(8, dims=-1), *half)]
    _same(rope(q, k, *half, rotation=rotation._replace(has_half_table=True), heads_axis=1), tuple(expected))


def _norm_oracle(
    x: torch.Tensor, weight: torch.Tensor, norms: HeadNorms, dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norms.eps)
    if norms.cast_first:
        scale = rounded(weight + norms.offset, dtypes[1]) if norms.offset else weight
        return rounded(scale * rounded(normed, dtypes[0]), torch.promote_types(*dtypes))
    return rounded(normed * (weight + norms.offset), dtypes[0])


def _turn_oracle(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, dtype: torch.dtype
) -> torch.Tensor:
    """In float64 for heads before tokens, rounded where stock rounds to `dtype`."""
    index = torch.arange(rotation.size)
    half = rotation.size // 2
    first, second = (index[0::2], index[1::2]) if rotation.is_interleaved else (index[:half], index[half:])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x[..., rotation.start + first], x[..., rotation.start + second]
    y1 = rounded(rounded(x1 * cos[..., first], dtype) - rounded(x2 * sin[..., first], dtype), dtype)
    y2 = rounded(rounded(x2 * cos[..., second], dtype) + rounded(x1 * sin[..., second], dtype), dtype)
    turned = torch.cat([y1, y2], dim=-1)[..., torch.cat([first, second]).argsort()]
    return torch.cat([x[..., : rotation.start], turned, x[..., rotation.start + rotation.size :]], dim=-1)


NORMS = {
    "none": None,
    "llama": HeadNorms(EPS, 0.0, cast_first=True),
    "gemma": HeadNorms(EPS, 1.0, cast_first=False),
    "offset cast first": HeadNorms(EPS, 1.0, cast_first=True),
    "cast last": HeadNorms(EPS, 0.0, cast_first=False),
}
ROTATIONS = {
    "halves": (12, Rotation(12)),
    "pairs": (12, PAIRS._replace(size=12)),
    "first halves": (20, Rotation(6)),
    "last pairs": (20, PAIRS._replace(size=6, start=14)),
}


@pytest.mark.parametrize(("dtypes", "rotated", "normed"), mixed(DTYPE_PAIRS, ROTATIONS, NORMS), ids=str)
def test_values_and_gradients(dtypes: tuple[torch.dtype, torch.dtype], rotated: str, normed: str, device: str) -> None:
    """Against float64, forward without and with gradients, and the gradients of q, k and the norms' weights."""
    norms, (dim, rotation) = NORMS[normed], ROTATIONS[rotated]
    dtype, w_dtype = dtypes
    tokens = 3 if device == "cpu" else 1000
    given = _heads(device, dtype, dim=dim, tokens=tokens, batch=1 if device == "cpu" else 2)
    cos, sin = _tables(device, dtype, rotation.size, tokens=tokens)
    weights = [_random(dim, dtype=w_dtype, device=device, seed=seed) for seed in (5, 6)]
    wide = [x.detach().double().cpu().requires_grad_() for x in (*given, *weights)]
    x_dtype = dtype if norms is None or not norms.cast_first else torch.promote_types(dtype, w_dtype)
    expected = []
    for x, weight in zip(wide[:2], wide[2:], strict=True):
        x_normed = x if norms is None else _norm_oracle(x, weight, norms, dtypes)
        expected.append(_turn_oracle(x_normed, cos.double().cpu(), sin.double().cpu(), rotation, x_dtype))

    def run(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = {} if norms is None else {"norms": norms, "q_weight": weights[0], "k_weight": weights[1]}
        return rope(q, k, cos, sin, rotation=rotation, heads_axis=1, **named)  # type: ignore[arg-type]

    tolerance = 2 * TOLERANCES[dtype]
    with torch.no_grad():
        found = run(*given, *weights)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == x_dtype
        assert_near(one.cpu(), two, tolerance)
    leaves = [x.detach().requires_grad_() for x in (*given, *weights)]
    again = run(*leaves)
    _same(tuple(x.detach() for x in again), found)
    upstream = [_random(*x.shape, dtype=x_dtype, device=device, seed=7 + n) for n, x in enumerate(found)]
    torch.autograd.backward(again, upstream)
    torch.autograd.backward(expected, [x.double().cpu() for x in upstream])
    for leaf, one in zip(leaves, wide, strict=True):
        if norms is None and leaf.dim() == 1:
            assert leaf.grad is None
            continue
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        scale = 0.0 if norms is None else 4.0  # of a row: a difference of numbers of this size
        assert_near(leaf.grad.cpu(), one.grad, 2 * max(tolerance, TOLERANCES[leaf.dtype]), scale=scale)


@pytest.mark.parametrize(
    ("normed", "rotated"), [("none", "halves"), ("gemma", "first halves"), ("gemma", "last pairs")]
)
def test_gradcheck(normed: str, rotated: str, device: str) -> None:
    norms, (dim, rotation) = NORMS[normed], ROTATIONS[rotated]
    q, k = (
        x.detach().requires_grad_() for x in _heads(device, torch.float64, batch=1, tokens=2, heads=(1, 1), dim=dim)
    )
    cos, sin = _tables(device, torch.float64, rotation.size, tokens=2)
    weights = [_random(dim, dtype=torch.float64, device=device, seed=seed).requires_grad_() for seed in (5, 6)]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, *named = tensors
        given = {"norms": norms, "q_weight": named[0], "k_weight": named[1]} if named else {}
        return rope(q, k, cos, sin, rotation=rotation, heads_axis=1, **given)  # type: ignore[arg-type]

    inputs = (q, k, *weights) if norms is not None else (q, k)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["llama", "cohere", "glm", "deepseek_v3", "gpt_oss"])
def test_gradients_are_those_of_stock(name: str, device: str) -> None:
    """In bfloat16, where stock's gradients are rounded as they are here."""
    function, rotation = STOCK[name]
    run: list[Callable[..., Any]] = [
        function,
        lambda *args: rope(*args, rotation=rotation._replace(size=10), heads_axis=1),
    ]
    cos, sin = _tables(device, torch.bfloat16, 5 if name in HALF_WIDTH else 10)
    gradients = []
    for each in run:
        leaves = [x.detach().requires_grad_() for x in _heads(device, torch.bfloat16)]
        out = each(*leaves, cos, sin)
        torch.autograd.backward(out, [_random(*x.shape, dtype=x.dtype, device=device, seed=9) for x in out])
        gradients.append(tuple(leaf.grad for leaf in leaves if leaf.grad is not None))
    _same(gradients[1], gradients[0])


def test_only_one_of_q_and_k_needs_a_gradient(device: str) -> None:
    q, k = _heads(device, torch.float32)
    cos, sin = _tables(device, torch.float32, 10)
    q = q.detach().requires_grad_()
    found = rope(q, k, cos, sin, rotation=Rotation(10), heads_axis=1)
    found[0].sum().backward()  # nothing comes back through k
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0].sum()
    assert q.grad is not None
    torch.testing.assert_close(q.grad, torch.autograd.grad(expected, q)[0])


def test_a_second_derivative_is_refused(device: str) -> None:
    """Not silently taken for zero."""
    q, k = (x.detach().requires_grad_() for x in _heads(device, torch.float64))
    cos, sin = _tables(device, torch.float64, 10)
    out = rope(q, k, cos, sin, rotation=Rotation(10), heads_axis=1)
    (gradient,) = torch.autograd.grad(out[0].pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
