"""A6: heads that are tied to the embedding, in all five forms, against stock transformers on the same directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kconvert import load_converted
from kconvert.checkpoint import compare as compare_module
from kconvert.checkpoint import have_equal_bytes, open_checkpoint
from kconvert.convert import ApplyResult, prepare
from kconvert.errors import CheckpointError, LoadError
from kconvert.manifest import load_manifest
from tests.convert.multimodal import logits as text_logits
from tests.convert.multimodal import text_mlp, tiny
from tests.runtime.pairs import logits
from tests.support import Kind, check_refused, convert, raw, read_raw, save_tiny, write_checkpoint, write_recipe

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
KINDS: dict[str, str] = {"qwen3": "Qwen3MLP", "llama": "LlamaMLP", "qwen2": "Qwen2MLP"}
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    assert found in get_args(Kind)
    return found


@pytest.fixture
def changed(kind: Kind, tmp_path: Path) -> Callable[..., Path]:
    """`changed(change, tie=...)`: a saved tiny model whose stored tensors were changed."""

    def make(change: Change, *, tie: bool = True) -> Path:
        saved = save_tiny(tmp_path / "saved", kind, tie=tie)
        tensors = load_file(saved / "model.safetensors")
        change(tensors)
        return write_checkpoint(tmp_path / "in", tensors, json.loads((saved / "config.json").read_text()))

    return make


def run(kind: str, source: Path, **kw: Any) -> ApplyResult:
    target = f'    replace: {{class: {KINDS[kind]}, path: "model.layers.*.mlp"}}\n'
    recipe = write_recipe(source.parent / "r.yaml", f"  - kernel: cpu_fused_swiglu\n{target}", model_type=kind)
    return convert(recipe, source, source.parent / "out", **kw)


def check_as_stock(source: Path, output: Path, *, tied: bool) -> Any:
    """Identity, values and logits are those of stock; so they are after both kinds of saving, which write what stock does."""
    stock = AutoModelForCausalLM.from_pretrained(source)
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) is tied
    stock.save_pretrained(output.parent / "stock-saved")
    stored = load_file(output.parent / "stock-saved" / "model.safetensors")
    model = load_converted(output, kernels="reference")
    model.save_pretrained(output.parent / "saved")
    model.save_pretrained(output.parent / "packed", variant="kconvert")
    assert read_raw(output.parent / "saved") == {name: raw(tensor) for name, tensor in stored.items()}
    packed = read_raw(output.parent / "packed")
    assert (HEAD in packed, EMBED in packed) == (HEAD in stored, EMBED in stored)
    for each in (model, load_converted(output.parent / "packed", kernels="reference")):
        assert (each.lm_head.weight is each.model.embed_tokens.weight) is tied
        assert (len(dict(each.named_parameters())) < len(each.state_dict())) is tied
        assert torch.equal(each.lm_head.weight, stock.lm_head.weight)
        assert torch.equal(each.model.embed_tokens.weight, stock.model.embed_tokens.weight)
        assert torch.equal(logits(each), logits(stock))
    return model


def test_both_stored_and_equal(kind: Kind, changed: Callable[..., Path]) -> None:
    """(a): stock ties them, and so do we; the file keeps both; nobody is warned."""
    source = changed(lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    result = run(kind, source)
    assert result.prepared.warnings == ()
    written = read_raw(result.output)
    assert written[HEAD] == written[EMBED] == read_raw(source)[EMBED]
    assert load_manifest(result.output).carried == ()
    check_as_stock(source, result.output, tied=True)


@pytest.mark.parametrize("model_check", [True, False])
def test_no_head_stored(kind: Kind, changed: Callable[..., Path], model_check: bool) -> None:
    """(b)."""
    source = changed(lambda tensors: tensors.pop(HEAD, None))
    result = run(kind, source, model_check=model_check)
    assert result.prepared.warnings == ()
    assert HEAD not in read_raw(result.output)
    check_as_stock(source, result.output, tied=True)


def test_no_embedding_stored(kind: Kind, changed: Callable[..., Path]) -> None:
    """(b) turned round: transformers fills the embedding from the head."""
    source = changed(lambda tensors: tensors.update({HEAD: tensors.pop(EMBED)}))
    output = run(kind, source).output
    assert EMBED not in read_raw(output)
    stock = AutoModelForCausalLM.from_pretrained(source)
    model = load_converted(output, kernels="reference")
    for each in (stock, model):
        assert each.lm_head.weight is each.model.embed_tokens.weight
    assert raw(model.model.embed_tokens.weight) == read_raw(source)[HEAD]
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("where", ["first", "last", "sign of zero"])
def test_both_stored_and_different(kind: Kind, changed: Callable[..., Path], where: str) -> None:
    """(c): both values are kept, one warning, and stock's logits; one element is enough, wherever it is."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if where == "sign of zero":
            tensors[EMBED][3, 3] = 0.0
        tensors[HEAD] = tensors[EMBED].clone()
        place = {"first": (0, 0), "last": (-1, -1), "sign of zero": (3, 3)}[where]
        tensors[HEAD][place] = -0.0 if where == "sign of zero" else 7.0

    source = changed(change)
    result = run(kind, source)
    assert result.prepared.warnings == (
        f"{HEAD} and {EMBED} are stored with different values, though the config ties them; both are kept",
    )
    written, before = read_raw(result.output), read_raw(source)
    assert (written[HEAD], written[EMBED]) == (before[HEAD], before[EMBED])
    assert before[HEAD] != before[EMBED]
    if where != "sign of zero":  # which are two bit patterns and one value: stock ties them
        check_as_stock(source, result.output, tied=False)


def test_two_dtypes(kind: Kind, changed: Callable[..., Path]) -> None:
    source = changed(lambda tensors: tensors.update({HEAD: tensors[EMBED].double() + 1e-9}))
    result = run(kind, source)
    assert [text for text in result.prepared.warnings if "with different values" in text]
    written = read_raw(result.output)
    assert (written[HEAD].dtype, written[EMBED].dtype) == ("F64", "F32")


def test_not_tied_and_no_head(kind: Kind, changed: Callable[..., Path]) -> None:
    """(e): refused before a byte is written, or, without the model, at load."""
    source = changed(lambda tensors: tensors.pop(HEAD), tie=False)
    recipe = write_recipe(
        source.parent / "r.yaml",
        f'  - kernel: cpu_fused_swiglu\n    replace: {{class: {KINDS[kind]}, path: "model.layers.*.mlp"}}\n',
        model_type=kind,
    )
    words = [f"the model needs {HEAD!r}, which the checkpoint does not give (1 missing)"]
    check_refused(CheckpointError, 4, words, recipe, source, source.parent / "out")
    output = convert(recipe, source, source.parent / "out", model_check=False).output
    with pytest.raises(LoadError, match=rf"1 missing keys while loading, e\.g\. {HEAD}") as caught:
        load_converted(output)
    assert caught.value.exit_code == 5


# --- (d) a flag in the text config ------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("outer", "inner"), [(None, True), (None, False), (False, True)])
@pytest.mark.parametrize("model_type", ["gemma3", "llava", "internvl", "qwen3_vl"])
def test_the_flag_of_a_text_config(
    tmp_path: Path, model_type: str, outer: bool | None, inner: bool, stored: bool
) -> None:
    """Whatever stock makes of the two flags: the same identity and logits, or, where its head is random, an error."""
    model = tiny(model_type)
    path, name = text_mlp(model)
    model.save_pretrained(tmp_path / "saved")
    tensors = {key: value.clone() for key, value in model.state_dict().items() if stored or key != HEAD}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if outer is not None:
        config["tie_word_embeddings"] = outer
    config["text_config"]["tie_word_embeddings"] = inner
    source = write_checkpoint(tmp_path / "in", tensors, config)
    target = f'    replace: {{class: {name}, path: "{path}"}}\n'
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: cpu_fused_swiglu\n{target}", model_type=model_type)
    stock, info = type(model).from_pretrained(source, output_loading_info=True)
    if info["missing_keys"]:
        words = [f"the model needs {HEAD!r}, which the checkpoint does not give"]
        check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "out")
        return
    converted = load_converted(convert(recipe, source, tmp_path / "out").output, kernels="reference")
    identities = [each.lm_head.weight is each.get_input_embeddings().weight for each in (stock, converted)]
    assert identities[0] == identities[1]
    assert identities[0] or stored
    assert torch.equal(text_logits(converted), text_logits(stock))


# --- the comparison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [None, 0, 6, 7, 8, 20])
def test_bytes_are_compared_to_the_end_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int | None
) -> None:
    monkeypatch.setattr(compare_module, "_BLOCK_BYTES", 7)
    one = torch.arange(21, dtype=torch.uint8)
    other = one.clone()
    if place is not None:
        other[place] += 1
    tensors = {"pad": torch.zeros(3, dtype=torch.uint8), "one": one, "other": other, "reshaped": one.reshape(3, 7)}
    source = write_checkpoint(tmp_path / "in", tensors, {}, [["pad", "one"], ["reshaped", "other"]])
    checkpoint = open_checkpoint(source)
    found = checkpoint.tensors
    assert have_equal_bytes(checkpoint, found["one"], found["other"]) is (place is None)
    assert have_equal_bytes(checkpoint, found["one"], found["one"])
    assert not have_equal_bytes(checkpoint, found["one"], found["reshaped"])


def test_a_file_that_is_cut_or_gone_meanwhile(tmp_path: Path) -> None:
    tensors = {"one": torch.zeros(8), "other": torch.zeros(8)}
    source = write_checkpoint(tmp_path / "in", tensors, {}, [["one"], ["other"]])
    checkpoint = open_checkpoint(source)
    pair = checkpoint.tensors["one"], checkpoint.tensors["other"]
    file = source / pair[1].file
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"ends early: 'one' or 'other' is not whole"):
        have_equal_bytes(checkpoint, *pair)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read"):
        have_equal_bytes(checkpoint, *pair)


def test_a_plan_says_it_too(tmp_path: Path, qwen3_dir: Path) -> None:
    """Without the model check ties are not known, and nothing is read."""
    tensors = load_file(qwen3_dir / "model.safetensors")
    config = {**json.loads((qwen3_dir / "config.json").read_text()), "tie_word_embeddings": True}
    source = write_checkpoint(tmp_path / "in", tensors, config)
    assert [text for text in prepare("qwen3", source).warnings if "with different values" in text]
    assert prepare("qwen3", source, model_check=False).warnings == ()
