"""`apply_kernel` and `apply_default_kernels` on live models."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from kconvert.errors import KconvertError
from kconvert.kernels import (
    BaseKernel,
    DeviceType,
    LayoutKernel,
    Registry,
    apply_default_kernels,
    apply_kernel,
    register_kernel,
)
from kconvert.kernels import registry as registry_module
from kconvert.kernels.layout import is_patched
from kconvert.kernels.model import ConvertedModel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.registry import check_deps_reason
from tests.support import read_raw, save_tiny, tiny_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Kernels that a test registers are gone afterwards."""
    Registry.catalog()
    before = dict(Registry._kernels)
    yield
    Registry._kernels.clear()
    Registry._kernels.update(before)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


def _counts(model: Any) -> dict[str, int]:
    return model.kconvert_report.to_dict()["kernels"]  # type: ignore[no-any-return]


def _patched(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if is_patched(module)}


def _check_unchanged(model: Any, twin: Any) -> None:
    """`model` is what its copy from before is: class, modules, names, values."""
    assert type(model) is type(twin)
    assert not isinstance(model, ConvertedModel)
    assert [(path, type(module)) for path, module in model.named_modules()] == [
        (path, type(module)) for path, module in twin.named_modules()
    ]
    state, expected = model.state_dict(), twin.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


# --- errors -----------------------------------------------------------------------------------------


def test_unknown_id_names_near_misses() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'cpu_fused_swigl'.*cpu_fused_swiglu") as caught:
        apply_kernel("cpu_fused_swigl", model=tiny_model("llama"))
    assert isinstance(caught.value, KconvertError)


def test_an_id_like_nothing_points_to_the_list() -> None:
    with pytest.raises(ValueError, match="list-kernels"):
        apply_kernel("xyz", model=tiny_model("llama"))


@pytest.mark.parametrize("kwargs", [{}, {"model": None}])
def test_model_is_wanted(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="model=") as caught:
        apply_kernel("cpu_fused_swiglu", **kwargs)
    assert isinstance(caught.value, KconvertError)


@pytest.mark.parametrize("kernel_id", ["cuda_fused_swiglu", "npu_fused_rmsnorm", "cuda_fused_rmsnorm_swiglu"])
def test_a_kernel_that_cannot_run_says_why_and_changes_nothing(kernel_id: str) -> None:
    model = tiny_model("llama")
    twin = copy.deepcopy(model)
    reason = check_deps_reason(Registry.catalog()[kernel_id])
    if reason is None:
        pytest.skip("it runs here")
    with pytest.raises(RuntimeError, match=f"{kernel_id}.*{re.escape(reason)}") as caught:
        apply_kernel(kernel_id, model=model)
    assert isinstance(caught.value, KconvertError)
    _check_unchanged(model, twin)


def test_a_kernel_of_another_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @register_kernel
    class OnNpu(BaseKernel):
        _kernel_id = "test_npu"
        _device = DeviceType.NPU

        @classmethod
        def check_deps(cls) -> str | None:
            return None

        @classmethod
        def apply(cls, **kwargs: Any) -> Any:
            return "applied"

    monkeypatch.setattr(registry_module, "current_accelerator", lambda: DeviceType.CUDA)
    with pytest.raises(RuntimeError, match="is for npu"):
        apply_kernel("test_npu", model=3)
    monkeypatch.setattr(registry_module, "current_accelerator", lambda: DeviceType.NPU)
    assert apply_kernel("test_npu", model=3) == "applied"


def test_a_kernel_without_layout_gets_the_arguments() -> None:
    @register_kernel
    class Plain(BaseKernel):
        _kernel_id = "test_plain"
        _device = DeviceType.CPU

        @classmethod
        def apply(cls, **kwargs: Any) -> Any:
            return kwargs

    assert apply_kernel("test_plain", model="m", other=1) == {"model": "m", "other": 1}


@pytest.mark.parametrize("value", [3, ["auto"], 1.5])
def test_include_kernels_of_another_type(value: Any) -> None:
    with pytest.raises(ValueError, match="include_kernels"):
        apply_default_kernels(tiny_model("llama"), value)


# --- defaults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [None, "", False])
def test_nothing_asked_nothing_changed(include: Any) -> None:
    model = tiny_model("qwen3")
    twin = copy.deepcopy(model)
    assert apply_default_kernels(model, include) is model
    _check_unchanged(model, twin)


def test_the_argument_may_be_left_out() -> None:
    model = tiny_model("qwen3")
    twin = copy.deepcopy(model)
    assert apply_default_kernels(model) is model
    _check_unchanged(model, twin)


TWO = {"cpu_fused_rmsnorm": 9, "cpu_fused_swiglu": 2}
ALL = {"cpu_fused_qkv": 2, **TWO}


@pytest.mark.parametrize(
    ("include", "counts"),
    [
        ("auto", ALL),
        (True, ALL),
        ("cpu_fused_rmsnorm,cpu_fused_swiglu", TWO),
        (" cpu_fused_swiglu , cpu_fused_rmsnorm,", TWO),
    ],
)
def test_defaults_patch_norms_attentions_and_mlps(include: Any, counts: dict[str, int]) -> None:
    model = tiny_model("qwen3")
    expected = _logits(model)
    assert apply_default_kernels(model, include) is model
    assert _counts(model) == counts
    assert not any(isinstance(module, nn.Identity) for module in model.modules())
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)


def test_one_kernel_only() -> None:
    model = tiny_model("qwen3")
    expected = _logits(model)
    apply_default_kernels(model, "cpu_fused_swiglu")
    assert _counts(model) == {"cpu_fused_swiglu": 2}
    assert "model.layers.0.mlp.gate_up_proj.weight" in model.state_dict()
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("include", "error", "said"),
    [
        ("cpu_fused_swiglu,cpu_fused_rmsnrm", ValueError, "cpu_fused_rmsnorm"),
        ("autom", ValueError, "unknown kernel 'autom'"),
        ("cpu_fused_swiglu,npu_fused_rmsnorm", RuntimeError, "torch_npu is not installed"),
    ],
)
def test_a_wrong_name_in_a_list_changes_nothing(include: str, error: type[Exception], said: str) -> None:
    model = tiny_model("qwen3")
    twin = copy.deepcopy(model)
    with pytest.raises(error, match=said):
        apply_default_kernels(model, include)
    _check_unchanged(model, twin)


@pytest.mark.parametrize("include", ["auto", "cpu_fused_swiglu"])
def test_nothing_that_fits_is_a_warning_and_nothing_changes(include: str) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=1)
    model: Any = AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing is patched"):
        assert apply_default_kernels(model, include) is model
    _check_unchanged(model, twin)


def test_what_fits_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_default_kernels(tiny_model("llama"), "auto")


def test_a_kernel_takes_the_one_input_under_any_name() -> None:
    """Stock MLPs call it `x` or `hidden_states`."""
    model = tiny_model("qwen3")
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    expected = model.model.layers[0].mlp(x=hidden)
    apply_kernel("cpu_fused_swiglu", model=model)
    mlp = model.model.layers[0].mlp
    torch.testing.assert_close(mlp(x=hidden), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(mlp(hidden), expected, rtol=0, atol=1e-5)


def test_twice_is_once(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    apply_default_kernels(model, "auto")
    kernels, names, expected = model.kconvert_report.to_dict(), list(model.state_dict()), _logits(model)
    cls, packings = type(model), model.kconvert_packings
    apply_default_kernels(model, "auto")
    assert model.kconvert_report.to_dict() == kernels
    assert list(model.state_dict()) == names
    assert type(model) is cls
    assert model.kconvert_packings == packings
    assert torch.equal(_logits(model), expected)
    model.save_pretrained(tmp_path)
    assert sorted(read_raw(tmp_path)) == sorted(tiny_model("qwen3").state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3", dtype=dtype)
    expected = _logits(model)
    apply_default_kernels(model, "auto")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert _counts(model) == ALL
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_another_model_of_the_class_is_stock() -> None:
    model, other = tiny_model("qwen3"), tiny_model("qwen3")
    expected = _logits(other)
    apply_default_kernels(model, "auto")
    assert not _patched(other)
    assert type(other.model.norm) is not type(model.model.norm)
    assert torch.equal(_logits(other), expected)
    assert not _patched(tiny_model("qwen3"))
    assert type(model).__name__ == type(other).__name__
    assert isinstance(model, type(other))


def test_a_model_on_meta_is_left_alone() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.warns(UserWarning, match="not in memory"):
        apply_kernel("cpu_fused_swiglu", model=model)
    assert not _patched(model)


def test_a_patched_model_trains() -> None:
    model, plain = tiny_model("llama").train(), tiny_model("llama").train()
    apply_default_kernels(model, "auto")
    assert model.training
    assert all(module.training for module in model.modules())
    for each in (model, plain):
        each(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    found, mlp = model.model.layers[0].mlp.gate_up_proj.weight.grad, plain.model.layers[0].mlp
    expected = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_deepcopy_of_a_patched_model() -> None:
    model = tiny_model("llama")
    apply_default_kernels(model, "auto")
    twin, expected = copy.deepcopy(model), _logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(_logits(twin), expected)
    assert _counts(twin) == _counts(model)


# --- the fusion -------------------------------------------------------------------------------------


def test_live_fusion(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    expected = _logits(model)
    apply_kernel("cpu_fused_rmsnorm_swiglu", model=model)
    assert _counts(model) == {"cpu_fused_rmsnorm_swiglu": 2}
    for layer in model.model.layers:
        assert type(layer.mlp) is nn.Identity
        assert not is_patched(layer.input_layernorm)
    assert "model.layers.0.post_attention_layernorm.mlp.gate_up_proj.weight" in model.state_dict()
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(_logits(stock), expected)


def test_fusion_after_auto_claims_nothing_twice() -> None:
    model = tiny_model("qwen3")
    apply_default_kernels(model, "auto")
    expected, kernels = _logits(model), _counts(model)
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel("cpu_fused_rmsnorm_swiglu", model=model)
    assert _counts(model) == kernels
    assert torch.equal(_logits(model), expected)


def test_auto_after_the_fusion_takes_the_rest() -> None:
    model = tiny_model("qwen3")
    expected = _logits(model)
    apply_kernel("cpu_fused_rmsnorm_swiglu", model=model)
    apply_default_kernels(model, "auto")
    assert _counts(model) == {"cpu_fused_qkv": 2, "cpu_fused_rmsnorm": 7, "cpu_fused_rmsnorm_swiglu": 2}
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)


def test_a_norm_with_a_second_reader_is_not_fused() -> None:
    # as in Cohere and Phi: the norm feeds the MLP, and its output is read once more
    model = tiny_model("llama")
    layer_class = type(model.model.layers[0])

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.post_attention_layernorm(hidden_states)
        return normed + self.mlp(normed)  # type: ignore[no-any-return]

    parallel = type("ParallelLayer", (layer_class,), {"forward": forward})

    class Model(type(model)):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.__class__ = parallel

    model = Model(model.config).eval()
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel("cpu_fused_rmsnorm_swiglu", model=model)
    assert not _patched(model)


# --- saving -----------------------------------------------------------------------------------------


def test_a_live_model_saves_stock_names_and_bytes(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    apply_default_kernels(model, "auto")
    model.save_pretrained(tmp_path / "saved")
    assert read_raw(tmp_path / "saved") == read_raw(source)


def test_a_live_model_cannot_be_saved_packed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    apply_default_kernels(model, "auto")
    with pytest.raises(ValueError, match="kconvert apply"):
        model.save_pretrained(tmp_path / "saved", variant="kconvert")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_live_model_takes_stock_names() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    apply_default_kernels(model, "auto")
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(_logits(model), _logits(other), rtol=0, atol=1e-5)


# --- modules that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "said"),
    [
        ("gelu_pytorch_tanh", "its activation is gelu_tanh, not silu"),
        ("relu", r"its forward is not down\(act\(gate\) \* up\) with silu, gelu or gelu_tanh"),
    ],
)
def test_another_activation_is_left_alone(activation: str, said: str) -> None:
    """Packing alone would change names and gain nothing."""
    model = tiny_model("llama", hidden_act=activation)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"nothing is patched.*{said}"):
        apply_kernel("cpu_fused_swiglu", model=model)
    _check_unchanged(model, twin)


def test_a_kernel_for_another_activation_leaves_a_patched_module_as_it_is() -> None:
    model = tiny_model("llama")
    apply_kernel("cpu_fused_swiglu", model=model)
    before = model.kconvert_report.to_dict()
    with pytest.warns(UserWarning, match="nothing is patched; e.g. model.layers.0.mlp is not for the kernel"):
        apply_kernel("cpu_fused_geglu", model=model)
    assert model.kconvert_report.to_dict() == before


def test_bias() -> None:
    model = tiny_model("llama", mlp_bias=True)
    expected = _logits(model)
    apply_kernel("cpu_fused_swiglu", model=model)
    assert _counts(model) == {"cpu_fused_swiglu": 2}
    assert model.state_dict()["model.layers.0.mlp.gate_up_proj.bias"].shape == (96,)
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Clamped(_MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.silu(self.gate_proj(x)).clamp(max=2.0), self.up_proj(x).clamp(-2.0, 2.0)
        return self.down_proj(gate * up)  # type: ignore[no-any-return]


class _Multiplied(_MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class _Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@pytest.mark.parametrize("cls", [_Clamped, _Multiplied])
def test_a_clamp_or_a_multiplier_stays_in_force(cls: type[_MLP]) -> None:
    torch.manual_seed(0)
    model, hidden = _Holder(plain=_MLP(), other=cls()), 20 * torch.randn(3, 8)
    expected = {name: module(hidden) for name, module in model.named_children()}
    with torch.no_grad():
        assert not torch.allclose(expected["other"], _MLP.forward(model.get_submodule("other"), hidden))  # type: ignore[arg-type]
        apply_kernel("cpu_fused_swiglu", model=model)
        report = {module.path: module for module in model.kconvert_report.modules}  # type: ignore[union-attr]
        assert report["plain"].kernel == "cpu_fused_swiglu"
        assert set(report) == {"plain"}
        assert not is_patched(model.get_submodule("other"))
        assert torch.equal(model.get_submodule("other")(hidden), expected["other"])
        torch.testing.assert_close(model.get_submodule("plain")(hidden), expected["plain"])


def test_gemma_norms_and_activation() -> None:
    config = GemmaConfig(**SMALL, head_dim=8, max_position_embeddings=64)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.25)
    expected = _logits(model)
    apply_default_kernels(model, "auto")
    assert _counts(model) == {"cpu_fused_geglu": 2, "cpu_fused_qkv": 2, "cpu_fused_rmsnorm": 5}  # and no swiglu
    norm = model.model.norm
    assert (norm.variant.offset, norm.variant.cast_first) == (1.0, False)
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


def test_a_gated_norm_is_left_alone() -> None:
    model = _Holder(gated=MambaRMSNormGated(8))
    hidden, gate = torch.randn(2, 8), torch.randn(2, 8)
    expected = model.get_submodule("gated")(hidden, gate)
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel("cpu_fused_rmsnorm", model=model)
    assert not _patched(model)
    assert torch.equal(model.get_submodule("gated")(hidden, gate), expected)


def test_an_mlp_that_is_packed_already_keeps_its_parameters() -> None:
    model = tiny_model("phi3")
    twin, before, expected = copy.deepcopy(model), dict(model.named_parameters()), _logits(model)
    apply_kernel("cpu_fused_swiglu", model=model)
    assert _counts(model) == {"cpu_fused_swiglu": 2}
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == list(twin.state_dict())
    with pytest.raises(AttributeError, match="'Phi3MLP' object has no attribute 'gate_proj'"):
        model.model.layers[0].mlp.gate_proj  # noqa: B018
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)


def test_a_stateful_forward_is_left_alone() -> None:
    class Noisy(_MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(())

    model = _Holder(noisy=Noisy())
    with pytest.warns(UserWarning, match="nothing is patched.*noisy is not for the kernel"):
        apply_kernel("cpu_fused_swiglu", model=model)
    assert not _patched(model)
    assert set(model.state_dict()) == {f"noisy.{name}_proj.weight" for name in ("gate", "up", "down")}


def test_dropout_in_training_is_left_alone() -> None:
    class Dropping(_MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    model = _Holder(mlp=Dropping()).train()
    with pytest.warns(UserWarning, match="nothing is patched"):
        apply_kernel("cpu_fused_swiglu", model=model)
    assert not _patched(model)


# --- dispatch ---------------------------------------------------------------------------------------


class _Counting(LayoutKernel):
    _device = DeviceType.CPU
    layout = GatedMLPLayout

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        return None


def test_a_kernel_without_backward_stands_aside_where_a_gradient_is_needed() -> None:
    calls: list[int] = []

    @register_kernel
    class Forwards(_Counting):
        _kernel_id = "test_forwards"
        has_backward = False

        @staticmethod
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return module.reference(*args, **kwargs)  # type: ignore[operator]

    model = tiny_model("llama")
    apply_kernel("test_forwards", model=model)
    (first, _) = model.kconvert_report.to_dict()["modules"]
    assert (first["kernel"], first["training_kernel"]) == ("test_forwards", "reference")
    mlp, hidden = model.model.layers[0].mlp, torch.randn(1, 2, 32)
    with torch.no_grad():
        mlp(hidden)
    assert len(calls) == 1
    mlp(hidden).sum().backward()
    assert len(calls) == 1
    assert mlp.gate_up_proj.weight.grad is not None
    mlp.requires_grad_(False)
    mlp(hidden)
    assert len(calls) == 2
    mlp(hidden.requires_grad_())
    assert len(calls) == 2


def test_dispatch_is_by_the_device_of_the_input() -> None:
    model = tiny_model("llama")
    apply_kernel("cpu_fused_swiglu", model=model)
    mlp = model.model.layers[0].mlp
    seen: list[str] = []
    kernel = mlp.kconvert_dispatch.kernel_for(mlp, (torch.zeros(1, 32),), {})
    assert kernel is Registry.get("cpu_fused_swiglu")
    assert mlp.kconvert_dispatch.kernel_for(mlp, (), {"hidden_states": torch.zeros(1, 32)}) is kernel
    assert mlp.kconvert_dispatch.kernel_for(mlp, (torch.zeros(1, 32, device="meta"),), {}) is None

    def reference(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.device.type)
        return hidden

    mlp.reference = reference
    mlp(torch.zeros(1, 32, device="meta"))
    assert seen == ["meta"]
    mlp(torch.zeros(1, 32))
    assert seen == ["meta"]


def test_the_later_kernel_comes_first_and_the_earlier_one_stays_in_the_trace() -> None:
    @register_kernel
    class Other(_Counting):
        _kernel_id = "test_other"

        @staticmethod
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return module.reference(*args, **kwargs)  # type: ignore[operator]

    model = tiny_model("llama")
    apply_default_kernels(model, "cpu_fused_swiglu,test_other")
    (first, _) = model.kconvert_report.to_dict()["modules"]
    assert first["kernel"] == "test_other"
    assert [(item["kernel"], item["reason"]) for item in first["trace"]] == [
        ("test_other", "chosen"),
        ("cpu_fused_swiglu", "test_other comes first"),
    ]


def test_a_model_around_a_patched_one_saves_and_loads_stock_names(tmp_path: Path) -> None:
    """`apply_default_kernels` on the base model alone: the causal model around it knows nothing of packing."""
    model: Any = tiny_model("llama")
    before, expected = {name: value.clone() for name, value in model.state_dict().items()}, _logits(model)
    apply_default_kernels(model.model, "auto")
    assert "layers.0.self_attn.qkv_proj.weight" in model.model.state_dict()
    found = model.state_dict()
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(_logits(again), expected, rtol=0, atol=1e-6)
    model.load_state_dict({name: 0.5 * value for name, value in before.items()})
    again.load_state_dict({name: 0.5 * value for name, value in before.items()})
    torch.testing.assert_close(_logits(model), _logits(again), rtol=0, atol=1e-5)
    wrapper = nn.ModuleDict({"inside": copy.deepcopy(model)})
    assert {name.removeprefix("inside.") for name in wrapper.state_dict()} == before.keys()
