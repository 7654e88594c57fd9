"""Every norm of transformers against the committed page, and what the page promises.

Classes are made of their source here, because to import all their files takes minutes; `make sweep-norms` imports them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.norms import outcome as outcome_module
from tests.norms.classes import Build, NormClass, NotBuiltError, builds_of, find_norms, make
from tests.norms.outcome import Outcome, check_norm, outcomes_of
from tests.norms.report import read_rows, row_of, write_report
from tests.norms.sweep import PAGE

TEXT = PAGE.read_text(encoding="utf-8")
NORMS = {(norm.module, norm.name): norm for norm in find_norms()}


def _skip_other_version() -> None:
    if f" transformers {transformers.__version__}:" not in TEXT:
        pytest.skip("the page was written with another version of transformers")


def test_every_norm_does_what_the_page_says() -> None:
    """The proof and the second check of all of them; a class that needs more than its source has to be in the page."""
    _skip_other_version()
    rows = read_rows(TEXT)
    seen = []
    for norm in NORMS.values():
        try:
            outcomes = list(outcomes_of(norm, norm.compiled()))
        except NotBuiltError:
            outcomes = []
        assert "WRONG" not in [outcome.status for outcome in outcomes], outcomes
        if not outcomes or any(outcome.status == "not built" for outcome in outcomes):
            seen += [row for row in rows if f" | `{norm.name}` | " in row]
        else:
            seen += list(map(row_of, outcomes))
    assert seen == rows


def test_nothing_in_the_page_is_wrong() -> None:
    assert "WRONG" not in TEXT
    assert "| **wrong** | 0 |" in TEXT
    assert len(read_rows(TEXT)) > 200


def test_what_is_found_as_a_norm() -> None:
    for module, name in [
        ("llama.modeling_llama", "LlamaRMSNorm"),
        ("t5.modeling_t5", "T5LayerNorm"),
        ("llama4.modeling_llama4", "Llama4TextL2Norm"),
        ("imagegpt.modeling_imagegpt", "ImageGPTLayerNorm"),
        ("mamba2.modeling_mamba2", "MambaRMSNormGated"),
        ("xlstm.modeling_xlstm", "xLSTMRMSNorm"),  # stands inside a condition
    ]:
        assert (module, name) in NORMS
    names = {name for _, name in NORMS}
    assert not names & {"LlamaDecoderLayer", "BertLayer", "DetrFrozenBatchNorm2d", "Aimv2VisionModel"}


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm, T5LayerNorm, MambaRMSNormGated])
def test_a_class_made_of_its_source_is_the_class(cls: type[nn.Module]) -> None:
    norm = NORMS[cls.__module__.removeprefix("transformers.models."), cls.__name__]
    assert norm.load() is cls
    assert list(outcomes_of(norm, norm.compiled())) == list(outcomes_of(norm, cls))


def test_every_way_to_build_a_class() -> None:
    assert [str(build) for build in builds_of(Gemma4RMSNorm)] == ["", "with_scale=False"]
    assert list(make(Gemma4RMSNorm, Build((("with_scale", False),))).parameters()) == []
    with pytest.raises(NotBuiltError, match="asks for in_features"):
        make(nn.Linear, Build())


# --- the second check finds what a proof would have let through ---------------------------------------


@pytest.mark.parametrize(
    ("cls", "claimed"),
    [
        (LlamaRMSNorm, {"cast_first": False}),
        (LlamaRMSNorm, {"offset": 1.0}),
        (Gemma3RMSNorm, {"cast_first": True}),
        (Gemma3RMSNorm, {"offset": 0.0}),
        (T5LayerNorm, {"mixes": True}),
        (MambaRMSNormGated, {"gate_first": False}),
        (MambaRMSNormGated, {"cast_first": False}),
        (MambaRMSNormGated, {"activation": "sigmoid"}),
        (MambaRMSNormGated, {"squeezes": True}),
        (Qwen3NextRMSNormGated, {"gate_first": True}),
        (Qwen3NextRMSNormGated, {"cast_first": False}),
    ],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_a_wrong_variant_is_wrong(
    cls: type[nn.Module], claimed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prove_variant", "prove_gated_variant"):
        prove = getattr(outcome_module, name)
        monkeypatch.setattr(outcome_module, name, lambda module, prove=prove: replace(prove(module), **claimed))
    assert check_norm(cls, Build())[0] == "WRONG"


class _Clamped(LlamaRMSNorm):
    """Differs only where a value is larger than any that the weights of this test are tried on."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states).clamp(-3.0, 3.0)


def test_a_norm_that_is_nearly_one_is_refused() -> None:
    assert check_norm(_Clamped, Build()) == ("refused", "its forward is no known RMSNorm variant")


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_of_some_outcomes() -> None:
    outcomes = [
        Outcome("a.modeling_a", "ARMSNorm", "", "accepted", "no weight"),
        Outcome("a.modeling_a", "ARMSNorm", "bias=True", "refused", "has a bias"),
        Outcome("b.modeling_b", "BRMSNorm", "", "WRONG", "other bits"),
    ]
    text = write_report(outcomes, transformers="5.0", torch="2.0+cpu")
    assert read_rows(text) == [
        "| a | `ARMSNorm` |  | no weight |",
        "| a | `ARMSNorm` | `bias=True` | refused: has a bias |",
        "| b | `BRMSNorm` |  | WRONG: other bits |",
    ]
    for line in ("| classes | 2 |", "| **wrong** | 1 |", "| refused: has a bias | 1 |", " transformers 5.0: "):
        assert line in text


def test_a_class_that_needs_its_module_is_not_built() -> None:
    with pytest.raises(NotBuiltError, match="NameError"):
        NormClass("a.modeling_a", "ANorm", "class ANorm(Elsewhere):\n    pass\n").compiled()
