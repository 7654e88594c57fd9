"""Names that no model of today has, and a header may hold: very long, very deep, of any letters."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kconvert.checkpoint import open_checkpoint
from kconvert.errors import CheckpointError
from kconvert.names import modules_above, natural_key
from kconvert.plan import build_plan, module_paths_of
from kconvert.plan.sharding import execution_rank
from tests.plan.generated import MLP, plan
from tests.support import RawTensor, convert, qwen3_config, qwen3_tensors, read_raw, write_checkpoint, write_recipe

NAMES = {
    "accents": "model.wörter.gewicht",
    "a letter and its mark": "model.a\u0308.weight",
    "no letters": "🙂.🙂🙂",
    "right to left": "model.משקל.0",
    "other digits": "model.layers.٣.weight",
    "many digits": f"model.layers.{'9' * 40}.weight",
    "zeros in front": "model.layers.007.weight",
    "blanks": " model . weight ",
    "lines": "model\u2028weight\nbias\tx",
    "quotes": 'model."weight"\\',
    "nothing between dots": "..model..weight..",
    "one dot": ".",
    "no name at all": "",
    "control": "model.\x00\x1b[31m\x7f",
    "the widest letter": "\U0010ffff" * 50,
    "like a path": "../../etc/passwd",
    "long": "model." + "weight" * 5000,
    "deep": "a." * 5000 + "weight",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_name_comes_through(tmp_path: Path, name: str) -> None:
    tensors: dict[str, Any] = {**qwen3_tensors(1), name: torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(1))
    recipe = write_recipe(tmp_path / "r.yaml", MLP.replace("layers.*", "layers.{0}"))
    output = convert(recipe, source, tmp_path / "out", model_check=False).output
    assert read_raw(output)[name] == read_raw(source)[name]
    with safe_open(output / "model.kconvert.safetensors", framework="np") as opened:
        assert name in opened.keys()  # noqa: SIM118 - not a dict


def test_all_of_them_in_shards(tmp_path: Path) -> None:
    odd = {name: RawTensor("U8", (3,), bytes([number] * 3)) for number, name in enumerate(NAMES.values())}
    tensors: dict[str, Any] = {**odd, **qwen3_tensors(1)}
    source = write_checkpoint(tmp_path / "source", tensors, qwen3_config(1), [list(odd), list(qwen3_tensors(1))])
    made = plan(source, MLP, 7)
    assert sorted(step.target for shard in made.shards for step in shard.steps) == sorted(made.by_target())
    assert {step.target for step in made.steps} >= set(odd)


@pytest.mark.parametrize("name", [NAMES["no letters"], NAMES["long"], NAMES["deep"]], ids=["odd", "long", "deep"])
def test_inside_a_module_that_is_taken_the_name_is_told(tmp_path: Path, name: str) -> None:
    stray = f"model.layers.0.mlp.{name}"
    source = write_checkpoint(tmp_path, {**qwen3_tensors(1), stray: torch.zeros(1)}, qwen3_config(1))
    with pytest.raises(CheckpointError) as caught:
        plan(source, MLP)
    assert f"has no place for {stray!r}"[:3000] in str(caught.value)
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_different_names_have_different_keys(name: str) -> None:
    others = [other for other in (*NAMES.values(), f"{name}.", f".{name}", f"{name}0", name.upper()) if other != name]
    assert natural_key(name) not in [natural_key(other) for other in others]
    assert sorted([*others, name], key=natural_key) == sorted([name, *others], key=natural_key)


def test_number_order_is_that_of_the_numbers_up_to_eighteen_digits() -> None:
    names = ["l.2", "l.10", f"l.{'9' * 18}", f"l.{'1'.zfill(19)}", "l.a"]
    assert sorted({*names}, key=natural_key) == names


def test_a_name_of_very_many_segments_costs_no_more_than_its_length() -> None:
    """Every prefix of this one would take 500 MB."""
    name = "a." * 16_000 + "weight"
    tracemalloc.start()
    paths = module_paths_of([name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert paths == tuple(".".join(["a"] * count) for count in range(1, 33))
    assert peak < 1_000_000
    assert execution_rank(name) == execution_rank("model.norm.weight")


def test_the_modules_above_a_tensor() -> None:
    assert list(modules_above("a.b.c")) == ["a", "a.b"]
    assert list(modules_above("weight")) == []
    assert list(modules_above(".")) == [""]
    assert list(modules_above("a..b")) == ["a", "a."]


def test_a_deep_module_is_not_taken_for_another(tmp_path: Path) -> None:
    """A path pattern has so many segments, and nothing below or above them matches."""
    deep = {f"model.layers.0.mlp.{name}_proj.inner.weight": torch.zeros(2, 2) for name in ("gate", "up")}
    source = write_checkpoint(tmp_path, {**deep, "x": torch.zeros(1)}, qwen3_config(1))
    assert build_plan(open_checkpoint(source), ()).bytes_transformed == 0
    assert module_paths_of(sorted(deep))[-1] == "model.layers.0.mlp.up_proj.inner"
