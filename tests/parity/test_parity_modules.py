"""`kconvert verify` finds what is wrong, says where, and does not call proven what it did not compare."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.ops.gated_mlp.layout import GatedMLPLayout
from kconvert.kernels.ops.rms_norm import cpu as rms_norm_cpu
from kconvert.kernels.ops.topk_router.cpu import CpuFusedRouter
from kconvert.kernels.probe import capture_calls
from kconvert.kernels.registry import Registry
from kconvert.names import PARITY_NAME
from kconvert.parity import loading, logits, modules
from tests.parity.conftest import PATCHES, Pair
from tests.parity.running import Capture, error_line, failing, run
from tests.runtime.pairs import edit_manifest
from tests.support import convert, save_tiny, tiny_model, write_recipe

GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


# --- weights ----------------------------------------------------------------------------------


def flip(position: int, mask: int) -> Any:
    def change(data: bytearray) -> None:
        data[position] ^= mask

    return change


@pytest.mark.parametrize(
    ("tensor", "path"), [(GATE_UP, "model.layers.1.mlp"), (QKV, "model.layers.0.self_attn")], ids=["gate_up", "qkv"]
)
def test_one_flipped_bit_is_found(pair: Pair, tmp_path: Path, capsys: Capture, tensor: str, path: str) -> None:
    # the lowest bit of a float32 weight: the smallest change that there is
    damaged = pair.edited(tmp_path / "out", tensor, flip(4 * 77, 1))
    line = failing(capsys, damaged.converted, "--source", damaged.source)
    assert line.startswith(f"{path}: reference, in ")
    assert "of the largest value, allowed is" in line
    assert "convert again" in line


def test_one_flipped_byte_is_found_in_bfloat16(short_pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    damaged = short_pair.edited(tmp_path / "out", GATE_UP, flip(2 * 40 * 32, 0xFF))
    assert failing(capsys, damaged.converted, "--source", damaged.source).startswith("model.layers.1.mlp: ")


def test_swapped_halves_are_found_at_both_levels(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    def swap(data: bytearray) -> None:
        half = len(data) // 2
        data[:] = data[half:] + data[:half]

    damaged = pair.edited(tmp_path / "out", GATE_UP, swap)
    arguments = (damaged.converted, "--source", damaged.source)
    assert failing(capsys, *arguments).startswith("model.layers.1.mlp: reference, in ")
    assert failing(capsys, *arguments, "--level", "logits").startswith("logits: reference, in ")


def test_swapped_rows_of_q_and_k_are_found(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    row, q_rows = 4 * 32, 4 * 16

    def swap(data: bytearray) -> None:
        k = q_rows * row
        data[:row], data[k : k + row] = data[k : k + row], data[:row]

    damaged = pair.edited(tmp_path / "out", QKV, swap)
    assert failing(capsys, damaged.converted, "--source", damaged.source).startswith("model.layers.0.self_attn: ")


def test_a_changed_norm_weight_is_found(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    damaged = pair.edited(tmp_path / "out", NORM, flip(4 * 3, 1))
    line = failing(capsys, damaged.converted, "--source", damaged.source)
    assert line.startswith("model.layers.1.input_layernorm: ")


def test_a_weight_outside_the_patches_is_found_by_the_logits(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    damaged = pair.edited(tmp_path / "out", "lm_head.weight", flip(4 * 100 + 3, 0x40))
    assert run(capsys, damaged.converted, "--source", damaged.source)[0] == 0
    failing(capsys, damaged.converted, "--source", damaged.source, "--level", "logits")


def test_json_of_a_failure_is_one_value(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    damaged = pair.edited(tmp_path / "out", NORM, flip(4 * 3 + 2, 0x10))
    code, out, err = run(capsys, damaged.converted, "--source", damaged.source, "--json")
    value = json.loads(out)
    assert code == value["exit_code"] == 5
    assert value["error"] == error_line(err)
    assert value["holds"] is False
    assert [item["where"] for item in value["failures"]] == ["model.layers.1.input_layernorm"]
    assert json.loads((damaged.converted / PARITY_NAME).read_bytes())["holds"] is False


def zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


def test_zeros_everywhere_are_no_proof(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    damaged = pair.edited(tmp_path / "out", "model.layers.0.mlp.down_proj.weight", zero)
    line = failing(capsys, damaged.converted)  # both sides are zero, and nothing else vouches for the bytes
    assert line.startswith("model.layers.0.mlp: ")
    assert "zero everywhere, which proves nothing" in line
    assert "--source" in line
    assert "reference, in float32: differs" in failing(capsys, damaged.converted, "--source", damaged.source)


def test_nan_everywhere_is_no_proof(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    def fill(data: bytearray) -> None:
        data[:] = np.full(len(data) // 4, np.nan, np.float32).tobytes()

    damaged = pair.edited(tmp_path / "out", NORM, fill)
    assert "NaN or infinity everywhere, which proves nothing" in failing(capsys, damaged.converted)
    line = failing(capsys, damaged.converted, "--level", "logits")
    assert "every logit is zero, NaN or infinite" in line


def test_a_zero_of_the_source_itself_is_reported_and_is_no_pass(tmp_path: Path, capsys: Capture) -> None:
    model = tiny_model("qwen3")
    model.model.layers[1].mlp.down_proj.weight.data.zero_()  # as in a model that was made deeper by new, idle layers
    model.save_pretrained(tmp_path / "my-model")
    recipe = write_recipe(tmp_path / "my.yaml", PATCHES)
    converted = convert(recipe, tmp_path / "my-model", tmp_path / "out").output
    code, out, err = run(capsys, converted, "--source", tmp_path / "my-model")
    assert code == 0, out + err
    shown = "OK: 5 of 6 patched modules agree; 1 could not be shown in any dtype (model.layers.1.mlp)."
    assert shown in " ".join(out.split())
    assert "no proof: all zero" in out


def test_what_overflows_in_another_dtype_is_not_counted_as_agreeing(tmp_path: Path, capsys: Capture) -> None:
    model = tiny_model("qwen3")
    model.model.layers[1].self_attn.v_proj.weight.data.fill_(1e5)  # infinite in float16, and NaN where summed
    model.save_pretrained(tmp_path / "my-model")
    converted = convert(write_recipe(tmp_path / "my.yaml", PATCHES), tmp_path / "my-model", tmp_path / "out").output
    code, out, err = run(capsys, converted, "--source", tmp_path / "my-model")
    assert code == 0, out + err
    assert "no proof: all zero" in out
    shown = "OK: 5 of 6 patched modules agree; 1 could not be shown in float16 (model.layers.1.self_attn)."
    assert shown in " ".join(out.split())


# --- kernels ----------------------------------------------------------------------------------------


@pytest.fixture
def wrong_kernel() -> Iterator[type[LayoutKernel]]:
    """A registered kernel that is off by a factor of 1.0002, or by what a test makes of it; gone again afterwards."""

    class SlightlyWrong(LayoutKernel):
        _kernel_id = "test_wrong_swiglu"
        _device = DeviceType.CPU
        layout = GatedMLPLayout
        default = False
        factor = 1.0002

        @classmethod
        def check_deps(cls) -> str | None:
            return None

        @staticmethod
        def forward(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = module.reference(hidden_states)  # type: ignore[operator]
            return found * SlightlyWrong.factor

    Registry.catalog()
    Registry.register(SlightlyWrong)
    yield SlightlyWrong
    del Registry._kernels["test_wrong_swiglu"]


@pytest.fixture
def wrong_pair(wrong_kernel: type[LayoutKernel], tmp_path: Path) -> Pair:
    source = save_tiny(tmp_path / "my-model", "qwen3", dtype=torch.bfloat16)
    patch = '  - kernel: [cpu_fused_swiglu]\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    converted = convert(write_recipe(tmp_path / "my.yaml", patch), source, tmp_path / "out").output
    named = (wrong_kernel.kernel_id(),)  # as if the recipe had named it, which wants an installed package
    edit_manifest(converted, lambda old: replace(old, patches=(replace(old.patches[0], kernels=named),)))
    return Pair(source, converted)


def test_a_kernel_that_is_slightly_wrong_is_found(wrong_pair: Pair, capsys: Capture) -> None:
    # 2e-4 is far less than a step of bfloat16, the checkpoint's dtype; in float32 it shows
    line = failing(capsys, wrong_pair.converted, "--source", wrong_pair.source)
    assert (
        "test_wrong_swiglu, in float32: differs by 0.0002 of the largest value, allowed is 1e-05 (and 1 more)" in line
    )
    assert 'kernels="reference"' in line


def test_a_kernel_that_raises_is_found(
    wrong_pair: Pair, wrong_kernel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def broken(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(wrong_kernel, "forward", staticmethod(broken))
    line = failing(capsys, wrong_pair.converted, "--source", wrong_pair.source)
    assert "test_wrong_swiglu, in bfloat16: does not run (RuntimeError: no such instruction)" in line
    line = failing(capsys, wrong_pair.converted, "--source", wrong_pair.source, "--level", "logits")
    assert "the converted model does not run (RuntimeError: no such instruction)" in line


def test_a_wrong_kernel_shows_in_the_logits(
    wrong_pair: Pair, wrong_kernel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(wrong_kernel, "factor", 1.01)
    line = failing(capsys, wrong_pair.converted, "--source", wrong_pair.source, "--level", "logits")
    assert line.startswith("logits: test_wrong_swiglu, in float32: ")


def test_a_kernel_is_chosen_anew_in_each_dtype(
    wrong_pair: Pair, wrong_kernel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # it takes float32 alone: a bfloat16 model that is loaded as it is does not get it, one that is loaded wider does
    monkeypatch.setattr(wrong_kernel, "dtypes", frozenset({"float32"}))
    arguments = (wrong_pair.converted, "--source", wrong_pair.source, "--level", "modules", "--level", "logits")
    code, out, _ = run(capsys, *arguments, "--json")
    levels = json.loads(out)["levels"]
    used = {(item["dtype"], item["kernel"]) for item in levels["modules"]["modules"][0]["results"]}
    assert code == 5
    assert {dtype for dtype, kernel in used if kernel == "test_wrong_swiglu"} == {"float32"}
    assert ("bfloat16", "cpu_fused_swiglu") in used
    kernels = {item["dtype"]: item["kernel"] for item in levels["logits"]["results"] if item["kernels"] == "auto"}
    assert kernels == {"bfloat16": "cpu_fused_swiglu", "float32": "test_wrong_swiglu"}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_in_which_order_the_experts_of_a_token_come_is_left_open(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Weights that go with other experts than stock's are not."""

    def turned(module: nn.Module, hidden_states: torch.Tensor) -> Any:
        logits, weights, index = module.reference(hidden_states)  # type: ignore[operator]
        return logits, weights if is_wrong else weights.flip(-1), index.flip(-1)

    monkeypatch.setattr(CpuFusedRouter, "forward", staticmethod(turned))
    source = save_tiny(tmp_path / "my-model", "qwen3_moe")
    patch = (
        '  - kernel: [cpu_fused_router]\n    replace: {class: Qwen3MoeTopKRouter, path: "model.layers.*.mlp.gate"}\n'
    )
    recipe = write_recipe(tmp_path / "my.yaml", patch, model_type="qwen3_moe")
    converted = convert(recipe, source, tmp_path / "out").output
    arguments = (converted, "--source", source, "--level", "modules")
    if is_wrong:
        assert "cpu_fused_router, in float32: differs by" in failing(capsys, *arguments)
        return
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    results = json.loads(out)["levels"]["modules"]["modules"][0]["results"]
    assert {item["kernel"] for item in results} == {"reference", "cpu_fused_router"}


def test_an_eps_that_is_not_that_of_the_module_is_found(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def with_double_eps(hidden: torch.Tensor, weight: torch.Tensor, variant: Any) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 2 * variant.eps)
        return weight * normed.to(hidden.dtype)

    monkeypatch.setattr(rms_norm_cpu, "rms_norm_cpu", with_double_eps)
    line = failing(capsys, pair.copy(tmp_path / "out"), "--source", pair.source)
    assert "cpu_fused_rmsnorm, in float32: differs by 0." in line  # and not by 5e-7, as on values of common size


# --- what a forward does not reach ------------------------------------------------------------------


def test_what_is_not_reached_is_no_pass(pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = capture_calls

    def without_layer_1(model: Any, paths: Any, **kw: Any) -> Any:
        calls, failure = real(model, paths, **kw)
        return {path: call for path, call in calls.items() if ".1." not in path}, failure

    monkeypatch.setattr(modules, "capture_calls", without_layer_1)
    code, out, _ = run(capsys, pair.converted, "--source", pair.source)
    assert code == 0
    assert out.count("not reached") == 3
    assert "OK: 3 of 6 patched modules agree; 3 were not compared.\n" in out

    monkeypatch.setattr(modules, "capture_calls", lambda *args, **kw: ({}, "ValueError: it wants an image"))
    line = failing(capsys, pair.converted, "--source", pair.source)
    assert "nothing was proven of the 6 patched modules: ValueError: it wants an image" in line


@pytest.mark.parametrize("level", ["modules", "logits"])
def test_one_model_is_in_memory_at_a_time(
    pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    module = {"modules": modules, "logits": logits}[level]
    alive: list[weakref.ref[Any]] = []

    def stock(job: Any) -> Any:
        model = loading.load_stock(job)
        alive.append(weakref.ref(model))
        return model

    def packed(job: Any) -> Any:
        assert [reference() for reference in alive] == [None]
        return loading.load_packed(job)

    monkeypatch.setattr(module, "load_stock", stock)
    monkeypatch.setattr(module, "load_packed", packed)
    assert run(capsys, pair.converted, "--source", pair.source, "--level", level)[0] == 0
    assert len(alive) == 1
