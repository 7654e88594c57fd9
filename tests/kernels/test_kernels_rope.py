"""Rotary embeddings found in stock forwards: which function is which, what is taken with its norms, what is left, what is refused.

The device code is stood in for by the formula in plain torch; that of its own is in tests/triton.
"""

from __future__ import annotations

import copy
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.glm import modeling_glm
from transformers.models.glm4v import modeling_glm4v
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2Attention
from transformers.models.llama import modeling_llama
from transformers.models.nanochat.modeling_nanochat import NanoChatAttention
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from kconvert import load_converted
from kconvert.kernels.ops.qkv_proj.cuda import CudaFusedQKV
from kconvert.kernels.ops.qkv_proj.layout import QKVProjLayout
from kconvert.kernels.ops.rms_norm.layout import rms_norm_formula
from kconvert.kernels.ops.rope import fused
from kconvert.kernels.ops.rope.cuda import CudaFusedRope
from kconvert.kernels.ops.rope.layout import RopeLayout
from kconvert.kernels.ops.rope.variant import Part, RopeVariant, Table, prove_rope
from kconvert.kernels.rope_calls import NotJoinableError, fuse_rope
from kconvert.kernels.specs import layout_specs
from kconvert.transforms import NOTHING, claims_overlap, is_taken
from tests.kernels.test_kernels_joined_calls import write_module
from tests.support import convert, read_raw, save_tiny, write_recipe

# --- which function is which -------------------------------------------------------------------------------

HALVES = RopeVariant(
    is_interleaved=False, writes_halves=True, part=Part.WHOLE, table=Table.FULL, is_wide=False, keeps_dtype=False
)


def changed(**values: Any) -> RopeVariant:
    return RopeVariant(**{**vars(HALVES), **values})


WIDE: dict[str, Any] = {"is_wide": True, "keeps_dtype": True}
PAIRS: dict[str, Any] = {"is_interleaved": True, "writes_halves": False}
FUNCTIONS: dict[str, tuple[Any, RopeVariant]] = {
    "llama": (modeling_llama.apply_rotary_pos_emb, HALVES),
    "olmo2": (modeling_olmo2.apply_rotary_pos_emb, changed(keeps_dtype=True)),
    "gpt_neox": (modeling_gpt_neox.apply_rotary_pos_emb, changed(part=Part.FIRST)),
    "cohere": (modeling_cohere.apply_rotary_pos_emb, changed(**PAIRS, **WIDE)),
    "ernie": (modeling_ernie4_5.apply_rotary_pos_emb, changed(**PAIRS, **WIDE, table=Table.FIRST_HALF)),
    "glm": (modeling_glm.apply_rotary_pos_emb, changed(**PAIRS, part=Part.FIRST, table=Table.FIRST_HALF)),
    "deepseek": (
        modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
        changed(is_interleaved=True, table=Table.FIRST_HALF),
    ),
    "gpt_oss": (modeling_gpt_oss.apply_rotary_pos_emb, changed(table=Table.HALF)),
    "vision": (modeling_glm4v.apply_rotary_pos_emb_vision, changed(**WIDE, axis=-2, default_axis=-2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_transformers(name: str) -> None:
    function, variant = FUNCTIONS[name]
    assert prove_rope(function) == variant


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def last_part(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 2) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    start = q.shape[-1] - cos.shape[-1]
    turned = [x[..., start:] * cos + rotate_half(x[..., start:]) * sin for x in (q, k)]
    return tuple(torch.cat([x[..., :start], part], dim=-1) for x, part in zip((q, k), turned, strict=True))


def test_the_last_part_of_a_head() -> None:
    assert prove_rope(last_part) == changed(part=Part.LAST, default_axis=2)


def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def q_alone(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[0], k


def swapped(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[::-1]


def rounded_once(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    wide = (x.double() for x in (q, k, cos, sin))
    turned = modeling_llama.apply_rotary_pos_emb(*wide, unsqueeze_dim)
    return tuple(x.to(q.dtype) for x in turned)


def scaled_for_long_inputs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    scale = 2.0 if q.shape[0] > 1 else 1.0
    turned = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return scale * turned[0], turned[1]


def fails(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    raise ValueError("never")


def other_names(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    return modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)


def with_positions(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


def no_number(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: Any = None) -> Any:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("function", [backwards, q_alone, swapped, rounded_once, scaled_for_long_inputs, fails])
def test_functions_that_are_no_rotary_embedding(function: Callable[..., Any]) -> None:
    assert prove_rope(function) == "is no known rotary embedding"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (other_names, "is not a function of q, k, cos and sin"),
        (with_positions, "is not a function of q, k, cos and sin"),
        (no_number, "has None for unsqueeze_dim"),
        (print, "is not a function of q, k, cos and sin"),
        (nn.ModuleList([]).__iter__, "is not a function of q, k, cos and sin"),
    ],
)
def test_other_signatures(function: Any, said: str) -> None:
    assert prove_rope(function) == said


class Function(nn.Module):
    """As the `kernels` library makes of a function, so that its forward can be replaced."""

    def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def test_a_module_in_place_of_a_function() -> None:
    made = Function()
    assert prove_rope(made) == HALVES
    made.forward = backwards  # type: ignore[method-assign]
    assert prove_rope(made) == "has a forward that somebody has replaced"
    hooked = Function()
    hooked.register_forward_hook(lambda *_: None)
    assert prove_rope(hooked) == "has a forward that somebody has replaced"


# --- what is taken in classes of transformers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stock", "num_norms"),
    [
        (modeling_llama.LlamaAttention, 0),
        (Phi3Attention, 0),
        (modeling_deepseek_v3.DeepseekV3Attention, 0),
        (modeling_gpt_oss.GptOssAttention, 0),
        (Qwen3Attention, 2),  # q_norm(...).transpose(1, 2)
        (Gemma3Attention, 2),  # q = q_norm(q), heads before tokens
        (Lfm2Attention, 2),  # other names
        (Qwen3NextAttention, 2),  # q is one half of a projection
        (modeling_olmo2.Olmo2Attention, 0),  # over all heads
        (modeling_cohere.CohereAttention, 0),  # on a condition
        (Exaone4Attention, 0),  # the rotation on a condition
        (AfmoeAttention, 0),
    ],
)
def test_classes_of_transformers(stock: type[nn.Module], num_norms: int) -> None:
    made = fuse_rope(stock)
    assert made.num_norms == num_norms
    assert len(made.variants) == (2 if stock is modeling_deepseek_v3.DeepseekV3Attention else 1)
    assert made.forward is not stock.forward
    assert made.forward.__qualname__ == stock.forward.__qualname__


@pytest.mark.parametrize(
    ("stock", "said"),
    [
        (GPTJAttention, "its forward calls no rotary embedding of q and k"),
        (NanoChatAttention, "calls no rotary embedding of q and k: apply_rotary_pos_emb is no known rotary embedding"),
        (modeling_llama.LlamaMLP, "its forward calls no rotary embedding of q and k"),
    ],
)
def test_classes_without(stock: type[nn.Module], said: str) -> None:
    with pytest.raises(NotJoinableError, match=said):
        fuse_rope(stock)
    packed = stock.__new__(stock)
    assert said in str(RopeLayout.unfit([packed]))


# --- forms ------------------------------------------------------------------------------------------------

HEAD = '''"""A module made for one test."""

import torch
from torch import nn


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(q, k, cos, sin, unsqueeze_dim=1, *, scale=1.0):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return scale * (q * cos + rotate_half(q) * sin), scale * (k * cos + rotate_half(k) * sin)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.q_norm, self.k_norm = Norm(4), Norm(4)
        self.q_all, self.k_all = Norm(16), Norm(8)
        self.is_normed = True

    def twice(self, x):
        return 2 * x

    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], -1, 4)
'''
Make = Callable[[str], type[Any]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(body)` is an attention class with these lines in its forward."""
    names: list[str] = []

    def made(body: str) -> type[Any]:
        names.append(f"kconvert_test_rope_{len(names)}")
        text = HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n"
        cls: type[Any] = write_module(tmp_path / f"{names[-1]}.py", text).Attention
        return cls

    yield made
    for name in names:
        sys.modules.pop(name, None)


class Formula:
    """In the place of the device code: the same arguments, plain torch."""

    def __init__(self) -> None:
        self.norms: list[Any] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        rotation: Any,
        heads_axis: int,
        norms: Any = None,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
    ) -> Any:
        self.norms.append(norms)
        assert rotation.size == q.shape[-1]
        if norms is not None:
            q, k = (rms_norm_formula(x, w, **norms._asdict()) for x, w in ((q, q_weight), (k, k_weight)))
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, heads_axis)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Formula:
    made = Formula()
    monkeypatch.setattr(fused, "_device_code", lambda device: fused.DeviceCode(made))
    return made


def run_both(cls: type[Any], formula: Formula) -> None:
    """The kernel's forward gives the stock values, with projections packed and with projections apart."""
    torch.manual_seed(0)
    stock = cls().eval()
    x, cos, sin = torch.randn(2, 5, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    with torch.no_grad():
        expected = stock(x, cos, sin)
        for layout, kernel in ((QKVProjLayout, CudaFusedQKV), (RopeLayout, CudaFusedRope)):
            packed = layout.patch([copy.deepcopy(stock)])
            assert kernel.supports(packed) is None
            count = len(formula.norms)
            torch.testing.assert_close(kernel.forward(packed, x, cos, sin), expected, rtol=0, atol=1e-5)
            assert len(formula.norms) == count + 1


TAKEN = {
    "in one line": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "heads first": """
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = rotate(q, k, cos, sin, unsqueeze_dim=1)
        return q, k, v
    """,
    "in three steps": """
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        v = self.v_proj(x)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        a, b = cos, sin
        q, k = rotate(q, k, a, sin=b)
        return q, k, v
    """,
    "heads last": """
        q = self.q_norm(self.q_proj(x).view(shape))
        k = self.k_norm(self.k_proj(x).view(shape))
        v = self.v_proj(x)
        q, k = rotate(q, k, cos=cos, sin=sin, unsqueeze_dim=2)
        return q, k, v
    """,
}
APART = {
    "a view behind the norm": """
        q = self.q_all(self.q_proj(x))
        k = self.k_all(self.k_proj(x))
        v = self.v_proj(x)
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "read in between": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        gate = q.sum(-1)
        q, k = rotate(q, k, cos, sin)
        return q, k, v, gate
    """,
    "read afterwards": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q_turned, k_turned = rotate(q, k, cos, sin)
        return q_turned, k_turned, v, q, k
    """,
    "one of them read by the other": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape) + q.mean()).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "read by an argument": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos + q.mean(), sin)
        return q, k, v
    """,
    "read by an inner function": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return (lambda: q)(), k, v
    """,
    "another place for the result": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        k, q = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "changed in place": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        k.mul_(2)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "what is normed is changed in place": """
        base = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        v = self.v_proj(x)
        q = self.q_norm(base).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        other = base.mul_(3)
        q, k = rotate(q, k, cos, sin)
        return q, k, v, other
    """,
    "normed on a condition": """
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x)
        if self.is_normed:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "rotated on a condition": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        if self.is_normed:
            q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "one of them only": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "in different steps": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape).transpose(1, 2))
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "scaled": """
        q = 2 * self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "no norm": """
        q = self.twice(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.twice(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k, v
    """,
    "not assigned": """
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x)
        return rotate(q, k, cos, sin), v
    """,
}


@pytest.mark.parametrize("name", TAKEN)
def test_norms_that_are_taken(name: str, make: Make, formula: Formula) -> None:
    cls = make(TAKEN[name])
    assert fuse_rope(cls).num_norms == 2
    run_both(cls, formula)
    assert [norms.eps for norms in formula.norms] == [1e-6, 1e-6]


@pytest.mark.parametrize("name", APART)
def test_norms_that_stay_calls(name: str, make: Make, formula: Formula) -> None:
    cls = make(APART[name])
    num_norms = 2 if name == "no norm" else 0  # which is seen where it runs
    assert fuse_rope(cls).num_norms == num_norms
    run_both(cls, formula)
    assert formula.norms == [None, None]


def test_other_calls_in_the_same_forward_are_left(make: Make, formula: Formula) -> None:
    cls = make(
        """
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x)
        first = rotate(q, k, cos, sin, scale=2.0)
        second = rotate(*(q, k), cos, sin)
        third = rotate(q, k, cos, sin)
        turned = (lambda: rotate(q, k, cos, sin))()
        return first, second, third, turned, v
        """
    )
    run_both(cls, formula)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [rotate(x, x, cos, sin) for _ in range(2)]", "rotate is called in an inner function"),
        ("rotate = self.twice\nreturn rotate(x)", "calls no rotary embedding of q and k"),
        ("return rotate(x, x, cos, sin, 1)", "calls no rotary embedding of q and k"),
        ("return rotate(x, x, cos, sin, scale=2.0)", "calls no rotary embedding of q and k"),
        ("return super().forward(rotate(x, x, cos, sin))", "a closure over __class__"),
    ],
)
def test_forwards_that_are_refused(body: str, said: str, make: Make) -> None:
    with pytest.raises(NotJoinableError, match=said):
        fuse_rope(make(body))


def test_a_packed_projection_without_a_known_rotation_is_joined_all_the_same(make: Make) -> None:
    cls = make(
        """
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v
        """
    )
    packed: Any = QKVProjLayout.patch([cls().eval()])
    assert packed.kconvert_not_fused == "its forward calls no rotary embedding of q and k"
    assert CudaFusedQKV.supports(packed) is None
    x, table = torch.randn(2, 5, 8), torch.randn(1, 5, 4)
    calls: list[int] = []
    packed.qkv_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        found, expected = CudaFusedQKV.forward(packed, x, table, table), packed.reference(x, table, table)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    assert len(calls) > 0


def test_a_forward_that_somebody_replaces_is_followed(make: Make, formula: Formula) -> None:
    cls = make(TAKEN["in one line"])
    stock = cls().eval()
    packed = RopeLayout.patch([copy.deepcopy(stock)])
    x, cos, sin = torch.randn(2, 5, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    real = cls.forward
    cls.forward = lambda self, *args: real(self, *args)[:1]
    with torch.no_grad():
        assert len(CudaFusedRope.forward(packed, x, cos, sin)) == 1
    assert formula.norms == []
    assert RopeLayout.unfit([stock]) == "its forward is no plain method"
    cls.forward = real
    assert RopeLayout.unfit([stock]) is None


# --- a layout that takes none of a module's tensors ------------------------------------------------------------


def test_a_claim_on_the_forward_alone() -> None:
    assert layout_specs()["rope"].takes == NOTHING
    assert not layout_specs()["rope"].changes_parameters
    assert not is_taken("a.q_proj.weight", "a", NOTHING)
    assert not claims_overlap("a", NOTHING, "a.q_norm", frozenset())
    assert claims_overlap("a", NOTHING, "a", frozenset({"q_proj"}))


def test_a_recipe_changes_no_tensor(tmp_path: Path) -> None:
    """The norms inside may have an entry of their own, and a machine without the device runs the stock forward."""
    source = save_tiny(tmp_path / "source", "qwen3")
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        """  - kernel: [cuda_fused_rope, npu_fused_rope]
    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}
  - kernel: [cpu_fused_rmsnorm]
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.self_attn.q_norm"}
""",
    )
    convert(recipe, source, tmp_path / "out")
    assert read_raw(tmp_path / "out") == read_raw(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that modules run their reference, on most machines
        model = load_converted(str(tmp_path / "out"))
    modules = {item.path: item for item in model.kconvert_report.modules}
    attention = model.get_submodule("model.layers.0.self_attn")
    assert attention.kconvert_layout == "rope"
    assert modules["model.layers.0.self_attn.q_norm"].kernel == "cpu_fused_rmsnorm"
    assert modules["model.layers.0.self_attn"].kernel in (None, "reference", "cuda_fused_rope")
