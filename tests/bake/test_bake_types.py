"""Baking a class of every kind of rule against transformers' own module form; and what the page and its sweep promise.

The whole of it is `make sweep-bake`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kconvert import runtime
from tests.bake import outcome as bake_outcome
from tests.bake.forms import difference, forms_of, save_source, state_of
from tests.bake.mapped import Subject, has_mapping, may_have_mapping
from tests.bake.outcome import Outcome, check_form, check_subject
from tests.bake.report import is_shown, read_rows, row_of, update_page, write_table
from tests.bake.sweep import PAGE, main
from tests.bake.tiny import build_tiny_subject
from tests.support import RawTensor, read_raw
from tests.sweep.tiny import NotBuiltError

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read_rows(TEXT)
ROPE = "PermuteForRope(subconfig_key=vision_config"

SUBJECTS = {
    "qwen3_moe:Qwen3MoeForCausalLM": ("MergeModulelist(dim=0)", "MergeModulelist(dim=0) + Concatenate(dim=1)"),
    "qwen2_moe:Qwen2MoeForCausalLM": ("MergeModulelist(dim=0)",),
    "mixtral:MixtralForCausalLM": ("rename", "MergeModulelist(dim=0) + Concatenate(dim=1)"),
    "minimax_m3_vl:MiniMaxM3SparseForConditionalGeneration": ("Concatenate(dim=0)",),
    "step3p7:Step3p7ForConditionalGeneration": ("Concatenate(dim=1)", f"Chunk(dim=0) + {ROPE}, permute_layer_names="),
    "qwen4_exp:Qwen4ExpForConditionalGeneration": ("Concatenate(dim=0, num_shards_attribute=split_ngram_parts)",),
    "inkling_mm_model:InklingForConditionalGeneration": (
        "Interleave(dim=0) + Chunk(dim=0)",
        "Interleave(dim=1)",
        "Interleave(dim=1) + Chunk(dim=1)",
    ),
    "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration": (
        "ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)",
        "Transpose(dim0=0, dim1=1)",
        "Chunk(dim=0)",
    ),
    "nemo_speechlm:Nemotron3_5TranscribeForConditionalGeneration": ("Transpose(dim0=1, dim1=2)",),
    "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration": ("Transpose(dim0=1, dim1=2, check_dims=True)",),
    "kimi_k25:Kimi_K25ForConditionalGeneration": ("GroupWeightRename", f"Chunk(dim=0) + {ROPE}, permute_layer_names="),
    "mistral_large4:MistralLarge4ForConditionalGeneration": (f"{ROPE})",),
    "molmo2_text:Molmo2TextModel": ("Split(dim=0)", "Concatenate(dim=0)"),
    "clip_text_model:CLIPTextModel": ("PrefixChange",),
    "dinov2:Dinov2Backbone": ("rename",),
    "rf_detr:RfDetrModel": ("Chunk(dim=0)",),
    "llava:LlavaForConditionalGeneration": ("rename",),
    "axk1:AXK1ForCausalLM": ("rename",),
}
"""Class to kinds of rules that take names of it; all kinds of the installed version are among them, or a test fails."""


@pytest.mark.parametrize("label", SUBJECTS)
def test_a_class_is_baked_as_transformers_would_write_it(label: str, tmp_path: Path) -> None:
    subject = Subject.from_label(label)
    if not hasattr(transformers, subject.class_name):
        pytest.skip("not in this version of transformers")
    outcome = check_subject(subject, tmp_path)
    assert (outcome.status, outcome.reason) == ("equal", "")
    for rule in SUBJECTS[label]:
        assert any(found.startswith(rule) for found in outcome.rules), outcome.rules
    if _is_of_this_version():
        assert row_of(outcome) == ROWS[subject.model_type, subject.class_name]


def test_every_kind_of_rule_of_the_page_is_run_here() -> None:
    _, _, table = TEXT.partition("| kind of rule |")
    kinds = {line.split("`")[1] for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")}
    run = {rule for rules in SUBJECTS.values() for rule in rules}
    assert len(kinds) > 15
    assert {kind for kind in kinds if not any(kind.startswith(rule) for rule in run)} == set()


def test_nothing_in_the_page_is_wrong() -> None:
    assert len(ROWS) > 200
    assert "| result: **wrong** | 0 | 0 |" in TEXT
    for status in ("equal", "stock fails", "refused", "not built"):
        found = [key for key, row in ROWS.items() if f" | {status} | " in row]
        line = f"| result: {status} | {len(found)} | {len({model_type for model_type, _ in found})} |"
        assert line in TEXT or not found, line


def test_experts_of_several_files_are_stacked_by_number(tmp_path: Path) -> None:
    """With more than ten experts, spread over files: the order of the text is not that of the numbers."""
    model = build_tiny_subject(Subject("qwen3_moe", "Qwen3MoeForCausalLM"))
    outcome = Outcome("qwen3_moe")
    check_form(outcome, model, "saved", tmp_path, max_shard_size="20KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 5
    assert any(".experts.11." in name for name in read_raw(tmp_path / "source"))
    assert outcome.logits == ["saved"]


def test_names_of_old_checkpoints_are_baked(tmp_path: Path) -> None:
    model = build_tiny_subject(Subject("bert", "BertForPreTraining"))
    assert not has_mapping(model)
    outcome = Outcome("bert")
    check_form(outcome, model, "legacy", tmp_path)
    assert any(name.endswith("LayerNorm.gamma") for name in read_raw(tmp_path / "source"))
    assert (outcome.renamed, outcome.logits) == (["legacy"], ["legacy"])


def test_prefixes_are_undone_for_the_source_alone(tmp_path: Path) -> None:
    model = build_tiny_subject(Subject("clip_text_model", "CLIPTextModel"))
    assert forms_of(model) == ("saved", "prefixed")
    for form in forms_of(model):
        save_source(model, tmp_path / form, form)
    saved, prefixed = read_raw(tmp_path / "saved"), read_raw(tmp_path / "prefixed")
    assert {f"text_model.{name}" for name in saved} == prefixed.keys()
    assert not hasattr(model, "_weight_conversions")


def test_tiny_models_are_random_everywhere() -> None:
    subject = Subject("rf_detr", "RfDetrModel")
    one, two, other = (build_tiny_subject(subject, seed=seed) for seed in (0, 0, 1))
    found = {raw.data for raw in state_of(one).values() if len(raw.data) > 8}
    assert len(found) == len([raw for raw in state_of(one).values() if len(raw.data) > 8])
    assert difference(state_of(two), state_of(one)) == ""
    assert difference(state_of(other), state_of(one)) != ""


def test_what_cannot_be_built_says_why_and_whether_it_matters(tmp_path: Path) -> None:
    subject = Subject("timm_wrapper", "TimmWrapperForImageClassification")
    with pytest.raises(NotBuiltError, match="it needs timm, which kconvert does not"):
        build_tiny_subject(subject)
    assert check_subject(subject, tmp_path).status == "not built"
    assert may_have_mapping(Subject("llava_onevision", "LlavaOnevisionForConditionalGeneration"))
    assert not may_have_mapping(Subject("bert", "BertForPreTraining"))


def _flip_last_byte(output: Path) -> None:
    path = output / "model.kconvert.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bake = bake_outcome.bake

    def bake_wrongly(source: Path, output: Path, work: Path) -> None:
        bake(source, output, work)
        _flip_last_byte(output)

    monkeypatch.setattr(bake_outcome, "bake", bake_wrongly)
    outcome = check_subject(Subject("qwen3_moe", "Qwen3MoeForCausalLM"), tmp_path)
    assert outcome.status == "WRONG"
    assert outcome.reason.startswith("saved: the converted files differ from the reference: 1 tensors have other bytes")


def test_a_model_that_loads_otherwise_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = runtime.load_converted

    def load_wrongly(*args: Any, **kw: Any) -> Any:
        model = load(*args, **kw)
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1
        return model

    monkeypatch.setattr(runtime, "load_converted", load_wrongly)
    outcome = check_subject(Subject("qwen3_moe", "Qwen3MoeForCausalLM"), tmp_path)
    assert (outcome.status, outcome.reason[:50]) == ("WRONG", "saved: the loaded model differs from the stock one")


def test_differences_are_named() -> None:
    one = RawTensor("F32", (1,), b"\0\0\0\0")
    assert difference({"a": one}, {"a": one}) == ""
    assert difference({"a": one}, {"b": one}) == "lacks 1 tensors (b), has too 1 tensors (a)"
    assert difference({"a": one}, {"a": RawTensor("I32", (1,), one.data)}) == "1 tensors have other dtypes (a)"
    assert difference({"a": one}, {"a": RawTensor("F32", (1, 1), one.data)}) == "1 tensors have other shapes (a)"
    assert difference({"a": one}, {"a": RawTensor("F32", (1,), b"\0\0\0\1")}) == "1 tensors have other bytes (a)"


def test_the_exit_code_says_whether_a_class_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "llava:LlavaModel": Outcome(
            "llava", "LlavaModel", "equal", forms=["saved"], renamed=["saved"], rules=["rename"]
        ),
        "llava:LlavaForConditionalGeneration": Outcome("llava", "LlavaForConditionalGeneration", "WRONG", "off by 1"),
    }
    subjects = tuple(Subject.from_label(label) for label in found)
    monkeypatch.setattr("tests.bake.mapped.subjects", lambda: subjects)
    monkeypatch.setattr("tests.bake.sweep.run_isolated", lambda context, label, *rest: found[label])
    before = PAGE.read_bytes()
    assert main(["LlavaModel"]) == 0
    assert main(["llava"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "| `llava` | `LlavaForConditionalGeneration` |  |  |  | WRONG | off by 1 |"
    assert out.splitlines()[0] == "| `llava` | `LlavaModel` | `rename` | saved |  | equal |  |"
    assert PAGE.read_bytes() == before  # named classes only show their rows


def test_the_table_is_written_into_the_page_and_nothing_else_is_touched(tmp_path: Path) -> None:
    outcomes = [
        Outcome(
            "b", "B", "equal", rules=["rename"], renamed=["prefixed"], forms=["saved", "prefixed"], logits=["saved"]
        ),
        Outcome("a", "A", "not built", "too | big"),
        Outcome("c", "C", "no mapping"),
    ]
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBy hand.\n", encoding="utf-8")
    for _ in range(2):
        update_page(page, outcomes, transformers="1", torch="2+cpu")
        page.write_text(page.read_text(encoding="utf-8") + "Below.\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\nBy hand.\n\n<!-- Written by")
    assert text.endswith("<!-- end of the sweep -->\nBelow.\nBelow.\n")
    assert [is_shown(outcome) for outcome in outcomes] == [True, True, False]
    assert list(read_rows(text).values()) == [
        "| `a` | `A` |  |  |  | not built | too \\| big |",
        "| `b` | `B` | `rename` | prefixed, (saved) | yes | equal |  |",
    ]
    assert write_table(outcomes[::-1], transformers="1", torch="2+cpu") in text
    assert "| looked at | 3 | 3 |\n| with a mapping | 2 | 2 |\n| tried: a tiny model was built | 1 | 1 |" in text


def _is_of_this_version() -> bool:
    return f" transformers {transformers.__version__} " in TEXT
