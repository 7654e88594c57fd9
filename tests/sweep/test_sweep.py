"""A part of the sweep, chosen to be different, against the committed page; and what the page and its worker promise.

The whole of it is `make sweep`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import transformers

from kconvert.kernels.ops.rms_norm.cpu import CpuFusedRMSNorm
from kconvert.kernels.specs import layout_specs
from tests.sweep.outcome import Outcome, check_type
from tests.sweep.report import COLUMNS, read_rows, row_of, write_report
from tests.sweep.sweep import PAGE, main, run_isolated
from tests.sweep.tiny import NotBuiltError, build_tiny, causal_types

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read_rows(TEXT)
TYPES = {
    "bart": "the decoder of an encoder-decoder type; q, k and v of different inputs",
    "bert": "nothing fits",
    "cohere": "a LayerNorm that has the structure of an RMSNorm",
    "cohere2_moe": "experts, and parallel attention and MLP",
    "deepseek_v3": "q and kv through low ranks; shared experts; a dense first layer",
    "falcon_h1": "mamba and attention side by side; multipliers in the MLP",
    "gemma3": "with images, and names that transformers maps",
    "gemma3n_text": "late layers share keys and values; a sparse activation",
    "gemma4_text": "v_proj on a condition",
    "gpt_neo": "q, k and v without RMSNorm or gated MLP",
    "hrm_text": "stored names that look like packed ones",
    "jamba": "mamba, attention and experts in turn",
    "mllama": "cross attention",
    "olmo2": "norms of the whole q and k",
    "phi3": "packed by its author",
    "qwen2": "biases on q, k and v",
    "qwen3_5_text": "linear attention, gated norms, 1 + weight",
    "qwen3_moe": "experts, one layer dense",
    "recurrent_gemma": "one key head",
    "seed_oss": "a dropout in the MLP",
    "starcoder2": "biases everywhere",
    "zamba2": "layers that share their weights",
}


def test_every_layout_for_one_module_has_a_column() -> None:
    """But for rope, which packs nothing and has no CPU form, so that it is never drafted."""
    drafted = [spec.name for spec in layout_specs().values() if not spec.is_fusion and spec.is_proposed]
    assert list(COLUMNS) == [name for name in drafted if name != "rope"]


def test_every_type_has_a_row() -> None:
    _skip_other_version()
    assert tuple(ROWS) == causal_types()


def test_nothing_in_the_page_is_wrong() -> None:
    assert not [row for row in ROWS.values() if "WRONG" in row or "| refused |" in row]
    assert "| result: **wrong** | 0 |" in TEXT
    for status in ("equal", "nothing fits", "not built"):
        count = sum(f"| {status} |" in row for row in ROWS.values())
        assert f"| result: {status} | {count} |" in TEXT


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_does_what_the_page_says(model_type: str, tmp_path: Path) -> None:
    _skip_other_version()
    assert row_of(check_type(model_type, tmp_path)) == ROWS[model_type]


def _skip_other_version() -> None:
    if f" transformers {transformers.__version__} " not in TEXT:
        pytest.skip("the page was written with another version of transformers")


def test_tiny_models_are_random_and_the_same_every_time() -> None:
    one, two = build_tiny("qwen3"), build_tiny("qwen3")
    other = build_tiny("qwen3", seed=1)
    assert one.config.num_hidden_layers == 2
    for name, tensor in one.state_dict().items():
        assert tensor.std() > 0.01, name
        assert tensor.equal(two.state_dict()[name]), name
        assert not tensor.equal(other.state_dict()[name]), name


def test_a_type_that_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuiltError, match="inputs_embeds and shared_kv_states cannot be None"):
        build_tiny("gemma4_assistant")


def _hang(model_type: str, directory: str) -> None:
    time.sleep(60)


def _crash(model_type: str, directory: str) -> None:
    os._exit(3)


def _answer(model_type: str, directory: str) -> None:
    outcome = Outcome(model_type, status="equal", kernels={"gated_mlp": {"cpu_fused_swiglu": 2}})
    (Path(directory) / "outcome.json").write_text(json.dumps(outcome.to_json()))


def test_a_hang_or_a_crash_is_the_outcome_of_one_type() -> None:
    context = multiprocessing.get_context("fork")
    started = time.monotonic()
    hung = run_isolated(context, "a", 0.2, _hang)
    assert time.monotonic() - started < 30
    assert (hung.status, hung.reason) == ("WRONG", "no result after 0.2 seconds")
    crashed = run_isolated(context, "b", 60.0, _crash)
    assert (crashed.status, crashed.reason) == ("WRONG", "its process ended with code 3 and no result")
    fine = run_isolated(context, "c", 60.0, _answer)
    assert (fine.model_type, fine.status, fine.count("gated_mlp")) == ("c", "equal", 2)


def test_the_exit_code_says_whether_a_type_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"llama": Outcome("llama", "equal"), "qwen3": Outcome("qwen3", "WRONG", reason="off by 1")}
    monkeypatch.setattr("tests.sweep.sweep.run_isolated", lambda context, name, limit: found[name])
    before = PAGE.read_bytes()
    assert main(["llama"]) == 0
    assert main(["llama", "qwen3"]) == 1
    assert "| `qwen3` |  |  |  |  |  |  |  | WRONG | off by 1 |" in capsys.readouterr().out
    assert PAGE.read_bytes() == before  # named types only show their rows


def test_the_page_is_written_from_the_outcomes_alone() -> None:
    packed = {"gated_mlp": {"cpu_fused_swiglu": 1, "reference": 2}, "rms_norm": {"cpu_fused_rmsnorm": 3}}
    outcomes = [
        Outcome("b", "equal", kernels=packed, reference={"gated_mlp": ["odd | forward"]}, names="same"),
        Outcome("a", "nothing fits", left_out={"no": ["self_attn", "*"]}, names="mapped"),
    ]
    text = write_report(outcomes, transformers="1", torch="2+cpu", tolerance=1e-5)
    assert text == write_report(outcomes[::-1], transformers="1", torch="2+cpu", tolerance=1e-5)
    assert list(read_rows(text).values()) == [
        "| `a` |  |  |  |  |  |  | mapped | nothing fits | left out self_attn, \\*: no |",
        "| `b` |  | 1 swiglu, 2 reference |  |  | 3 rmsnorm |  | same | equal | gate/up reference: odd \\| forward |",
    ]
    assert (
        "| gate/up: a kernel in every module that has the layout | 0 |\n| gate/up: the reference in some | 1 |" in text
    )
    assert "with torch 2 on a CPU" in text


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward = CpuFusedRMSNorm.forward
    monkeypatch.setattr(CpuFusedRMSNorm, "forward", staticmethod(lambda *args: forward(*args) * 1.0001))
    outcome = check_type("llama", tmp_path)
    assert outcome.status == "WRONG"
    assert outcome.reason.startswith("the kernels' logits are off by ")
