"""What of a stock model can be written down: its names, its classes, and the text of its attention forward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from kconvert.export.attention import NotJoinableError, definition_source, joined_source
from kconvert.export.stock import patchable_reason, read_names
from tests.support import tiny_model

PARTS = ("q_proj", "k_proj", "v_proj")


class Plain(nn.Module):
    """An attention that is called as the stock ones are."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        for name in PARTS:
            self.add_module(name, nn.Linear(4, 4, bias=False))

    def forward(self, hidden: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """A docstring that is left out."""
        query = self.q_proj(hidden)
        key, value = self.k_proj(hidden), self.v_proj(hidden)
        scores: torch.Tensor = helper(query, key)
        result: torch.Tensor = F.softmax(scores, dim=-1) @ value
        return result


def helper(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ key.transpose(-1, -2)


def decorated(function: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    wrapper.__wrapped__ = function  # type: ignore[attr-defined]
    return wrapper


class Decorated(Plain):
    @decorated
    def forward(self, hidden: torch.Tensor, mask: Any = PARTS) -> torch.Tensor:
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        result: torch.Tensor = helper(query, key) @ value
        return result


class Shadowing(Plain):
    def forward(self, hidden: torch.Tensor, home: Any = None) -> torch.Tensor:
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        result: torch.Tensor = helper(query, key) @ value
        return result


class NamesItself(nn.Module):
    def __init__(self) -> None:
        super(NamesItself, self).__init__()  # noqa: UP008 - how older models have it


def test_the_forward_reads_its_own_module_when_it_runs() -> None:
    text = joined_source(Plain, "qkv_proj", PARTS, "home")
    assert text.startswith("def forward(self, hidden, mask=None):\n")
    assert "split_rows(self.qkv_proj(hidden), self.qkv_proj_rows)" in text
    assert "scores = home.helper(query, key)" in text
    assert "F.softmax(" in text, "what every package imports"
    assert "docstring" not in text


def test_the_text_computes_what_the_class_does() -> None:
    from kconvert.export.pieces import pack_children, split_rows

    torch.manual_seed(0)
    module: Any = Plain()
    hidden = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = module(hidden)
        pack_children(module, "qkv_proj", PARTS)
        names: dict[str, Any] = {"split_rows": split_rows, "home": sys.modules[__name__], "F": F}
        exec(joined_source(Plain, "qkv_proj", PARTS, "home"), names)
        assert torch.allclose(names["forward"](module, hidden), expected, atol=1e-6)


def test_decorators_and_defaults_are_those_of_the_stock_module() -> None:
    text = joined_source(Decorated, "qkv_proj", PARTS, "home")
    assert text.startswith("@home.decorated\ndef forward(self, hidden, mask=home.PARTS):\n")
    assert text.count("decorated") == 1


def test_what_cannot_be_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotJoinableError, match="its forward binds home"):
        joined_source(Shadowing, "qkv_proj", PARTS, "home")
    monkeypatch.setattr(Plain, "forward", decorated(Plain.forward))
    with pytest.raises(NotJoinableError, match="wrapped by more than the decorators in its source"):
        joined_source(Plain, "qkv_proj", PARTS, "home")


def test_definitions_are_found_by_name() -> None:
    module = sys.modules[__name__]
    assert definition_source(module, "PARTS") == 'PARTS = ("q_proj", "k_proj", "v_proj")'
    assert definition_source(module, "helper").endswith("return query @ key.transpose(-1, -2)")
    with pytest.raises(LookupError, match="defines no nothing_here"):
        definition_source(module, "nothing_here")


def test_the_names_of_a_model() -> None:
    names = read_names(tiny_model("qwen3"))
    assert names.classes["model.layers.1.mlp"] == "Qwen3MLP"
    assert names.classes[""] == "Qwen3ForCausalLM"
    assert names.models == {"Qwen3ForCausalLM", "Qwen3Model"}
    known = getattr(modeling_qwen3.Qwen3RMSNorm, "kernel_layer_name", None)  # none without the `kernels` library
    assert names.layers.get("Qwen3RMSNorm") == known
    assert "Qwen3MLP" not in names.layers
    assert len(names.of_class("Qwen3RMSNorm")) == 9


def test_a_class_of_transformers_can_be_replaced() -> None:
    assert patchable_reason(tiny_model("qwen3"), "Qwen3MLP") is None


def test_classes_that_transformers_cannot_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"one": Plain(), "two": NamesItself()})
    assert patchable_reason(model, "Plain") == "Plain is no class of transformers, which KernelConfig could replace"
    monkeypatch.setattr(modeling_qwen3, "NamesItself", NamesItself, raising=False)
    monkeypatch.setattr(NamesItself, "__module__", modeling_qwen3.__name__)
    assert patchable_reason(model, "NamesItself") == "the constructor of NamesItself names its own class"
    other = type("Plain", (Plain,), {})
    assert patchable_reason(nn.ModuleList([Plain(), other()]), "Plain") == "the model has 2 classes called Plain"


def test_a_class_that_the_model_takes_from_a_table_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of GPT-J: the attribute of the module would change, and the table not."""
    model = tiny_model("qwen3")
    monkeypatch.setattr(modeling_qwen3, "MLP_CLASSES", {"plain": modeling_qwen3.Qwen3MLP}, raising=False)
    assert patchable_reason(model, "Qwen3MLP") == (
        "the model takes Qwen3MLP from MLP_CLASSES, which KernelConfig does not change"
    )
    assert patchable_reason(model, "Qwen3Attention") is None
    monkeypatch.setattr(modeling_qwen3.Qwen3DecoderLayer, "attention", modeling_qwen3.Qwen3Attention, raising=False)
    assert "from Qwen3DecoderLayer.attention," in str(patchable_reason(model, "Qwen3Attention"))
