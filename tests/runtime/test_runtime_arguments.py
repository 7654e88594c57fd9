"""The arguments of `load_converted`: honoured, or refused with the way out."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, Qwen3Config

from kconvert.errors import KernelUnavailableError, UnknownKernelError, UsageError
from kconvert.kernels.layout import is_patched
from tests.runtime.pairs import Pair, logits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_plan", "auto"),
        ("tp_size", 2),
        ("device_mesh", object()),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", BitsAndBytesConfig(load_in_8bit=False)),
        ("variant", "kconvert"),
        ("state_dict", {}),
        ("ignore_mismatched_sizes", True),
        ("key_mapping", {"a": "b"}),
        ("subfolder", "sub"),
        ("gguf_file", "x.gguf"),
        ("config", Qwen3Config()),
        ("use_safetensors", False),
        ("load_in_8bit", True),
        ("load_in_4bit", True),
    ],
)
def test_what_cannot_be_honoured_is_refused(qwen3: Pair, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"load_converted does not take {name}(=False)?; ") as caught:
        qwen3.load(**{name: value})
    assert isinstance(caught.value, UsageError)


def test_an_argument_that_nobody_knows(qwen3: Pair) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        qwen3.load(no_such_argument=1)


@pytest.mark.parametrize("argument", [{"local_files_only": True}, {"use_safetensors": True}])
def test_what_is_so_anyway_may_be_said(qwen3: Pair, argument: dict[str, Any]) -> None:
    assert torch.equal(logits(qwen3.load(kernels="reference", **argument)), logits(qwen3.stock()))


@pytest.mark.parametrize("kernels", ["fast", "cpu_fused_swiglu", "", None, 5])
def test_an_unknown_choice_of_kernels(qwen3: Pair, kernels: str) -> None:
    with pytest.raises(UsageError, match='"auto", "reference" or a list'):
        qwen3.load(kernels=kernels)


def test_an_unknown_kernel_with_a_near_miss(qwen3: Pair) -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'cpu_fused_swiglo'; did you mean cpu_fused_swiglu") as caught:
        qwen3.load(kernels=["cpu_fused_swiglo"])
    assert isinstance(caught.value, UnknownKernelError)
    for bad in ([3], [None]):
        with pytest.raises(UsageError, match="a kernel ID is a string"):
            qwen3.load(kernels=bad)


def test_a_package_kernel_that_the_directory_does_not_have(qwen3: Pair) -> None:
    with pytest.raises(UnknownKernelError, match="no/such:Kernel"):
        qwen3.load(kernels=["cpu_fused_swiglu", "no/such:Kernel"])


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path, qwen3: Pair) -> None:
    mine = qwen3.copy(tmp_path / "mine")
    (mine.converted / "kconvert_manifest.json").unlink()
    with pytest.raises(UsageError):
        mine.load(kernels="fast")


def test_strict_raises_where_the_reference_would_run(pair: Pair) -> None:
    with pytest.raises(
        KernelUnavailableError, match=r"(13|11|9) modules would run their reference, e\.g\. model\."
    ) as caught:
        pair.load(kernels=["cuda_fused_swiglu"], strict=True)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(KernelUnavailableError, match="npu_fused_rmsnorm: torch_npu is not installed"):
        pair.load(kernels=["npu_fused_rmsnorm", "cpu_fused_swiglu", "cpu_fused_rmsnorm_swiglu"], strict=True)
    with pytest.raises(KernelUnavailableError, match="no kernel was asked for"):
        pair.load(kernels="reference", strict=True)


def test_strict_passes_where_every_module_has_a_kernel(pair: Pair) -> None:
    counts = pair.load(strict=True).kconvert_report.to_dict()["kernels"]
    assert "reference" not in counts
    assert counts


UNUSABLE = [["npu_fused_swiglu"], ["npu_fused_swiglu", "npu_fused_rmsnorm", "npu_fused_rmsnorm_swiglu"], []]


@pytest.mark.parametrize("kernels", UNUSABLE)
def test_a_list_of_kernels_of_which_none_runs_is_said_once(pair: Pair, kernels: list[str]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = pair.load(kernels=kernels)
    assert set(model.kconvert_report.to_dict()["kernels"]) == {"reference"}
    (message,) = [str(each.message) for each in seen if issubclass(each.category, UserWarning)]
    assert message.startswith(f"{len(model.kconvert_report.modules)} modules run their reference, e.g. model.layers.0.")


@pytest.mark.parametrize(
    "kernels",
    ["reference", ["cpu_fused_swiglu", "cpu_fused_rmsnorm_swiglu"], ["npu_fused_swiglu", "cpu_fused_rmsnorm"]],
)
def test_what_runs_or_was_asked_for_is_not_warned_of(pair: Pair, kernels: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = pair.load(kernels=kernels)
    assert (set(model.kconvert_report.to_dict()["kernels"]) == {"reference"}) == (kernels == "reference")


def test_a_list_of_kernels_limits_what_runs(qwen3: Pair) -> None:
    model = qwen3.load(kernels=["cpu_fused_swiglu"])
    kernels = {item.path: item.kernel for item in model.kconvert_report.modules}
    assert {path for path, kernel in kernels.items() if kernel != "reference"} == {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    }
    with pytest.warns(UserWarning, match="13 modules run their reference"):
        none = qwen3.load(kernels=[])
    assert none.kconvert_report.to_dict()["kernels"] == {"reference": 13}
    stock = logits(qwen3.stock())
    assert torch.equal(logits(none), stock)
    torch.testing.assert_close(logits(model), stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_dtype(pair: Pair, dtype: Any) -> None:
    model = pair.load(dtype=dtype, kernels="reference")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert torch.equal(logits(model), logits(pair.stock(dtype=wanted)))
    assert pair.load(torch_dtype=wanted).dtype is wanted


def test_dtype_is_that_of_the_checkpoint_unless_given(make_pair: Any) -> None:
    pair = make_pair("qwen3", dtype=torch.bfloat16)
    assert pair.load().dtype is torch.bfloat16
    assert pair.load(dtype=torch.float32).dtype is torch.float32


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_map(pair: Pair, device_map: Any) -> None:
    model = pair.load(device_map=device_map, kernels="reference")
    assert torch.equal(logits(model), logits(pair.stock()))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_layer_offloaded_to_disk(pair: Pair, tmp_path: Path, kernels: str) -> None:
    """K1: accelerate brings the weights when the module is called, so views must not read them before."""
    on_cpu = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(on_cpu, "cpu"), "model.layers.1": "disk"}
    model = pair.load(device_map=device_map, offload_folder=str(tmp_path / "offload"), kernels=kernels)
    mlp = model.get_submodule(pair.mlp(1))
    assert mlp.gate_up_proj.weight.is_meta
    assert model.model.layers[1].self_attn.qkv_proj.weight.is_meta
    assert not model.get_submodule(pair.mlp(0)).gate_up_proj.weight.is_meta
    expected = logits(pair.stock())
    for _ in range(2):
        found = logits(model)
        assert torch.equal(found, expected) or kernels == "auto"
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert mlp.gate_up_proj.weight.is_meta
    counts = model.kconvert_report.to_dict()["kernels"]
    assert ("reference" in counts) == (kernels == "reference")
    assert {item.device for item in model.kconvert_report.modules} == {"cpu"}
    model.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert torch.equal(logits(type(pair.stock()).from_pretrained(tmp_path / "stock")), expected)


def test_offloading_after_loading(qwen3: Pair) -> None:
    """accelerate's own call on a loaded model hooks every child."""
    expected = logits(qwen3.stock())
    for kernels in ("auto", "reference"):
        model = import_module("accelerate").cpu_offload(
            qwen3.load(kernels=kernels), execution_device=torch.device("cpu")
        )
        assert model.model.layers[0].mlp.gate_up_proj.weight.is_meta
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_loading_info_is_returned_on_request(qwen3: Pair) -> None:
    model, info = qwen3.load(output_loading_info=True)
    assert any(is_patched(module) for module in model.modules())
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(qwen3.load(output_loading_info=False)) is type(model)


def test_config_values_reach_the_config(qwen3: Pair) -> None:
    assert qwen3.load().config.use_cache is True
    model = qwen3.load(use_cache=False, rms_norm_eps=1e-3)
    assert model.config.use_cache is False
    assert model.model.norm.variance_epsilon == 1e-3
    torch.testing.assert_close(logits(model), logits(qwen3.stock(rms_norm_eps=1e-3)), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(model), logits(qwen3.stock()), rtol=0, atol=1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementation(qwen3: Pair, attention: str) -> None:
    model = qwen3.load(attn_implementation=attention, kernels="reference")
    assert model.config._attn_implementation == attention
    assert torch.equal(logits(model), logits(qwen3.stock(attn_implementation=attention)))


def test_a_path_as_text(qwen3: Pair) -> None:
    from kconvert.runtime import load_converted

    assert torch.equal(logits(load_converted(str(qwen3.converted))), logits(qwen3.load()))
