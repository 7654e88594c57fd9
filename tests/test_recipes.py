"""Every recipe that comes with kconvert, on a tiny model of its type: logits, generation, what is patched, and the way back.

The recipes are read from their folder, so a new one is tested here without an edit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import transformers
from torch import nn

from kconvert import load_converted
from kconvert.kernels.layout import is_patched
from kconvert.manifest import load_manifest
from kconvert.recipe import load_recipe, shipped_recipes
from tests.support import Kind, convert, read_raw, save_tiny, tiny_model
from tests.sweep.outcome import aligned

RECIPES = shipped_recipes()
IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11], [2, 4, 8, 16, 32, 5, 6]])
VARIANTS: dict[str, tuple[bool, int | str, torch.dtype]] = {
    "untied, one file, float32": (False, "1GB", torch.float32),
    "tied, shards, float32": (True, 10_000, torch.float32),
    "untied, shards, bfloat16": (False, 10_000, torch.bfloat16),
    "tied, one file, bfloat16": (True, "1GB", torch.bfloat16),
}
KINDS = ("RMSNorm", "Attention", "MLP", "Experts", "Router")
EXPERTS = {
    "qwen2-moe": "mlp.experts",
    "qwen3-moe": "mlp.experts",
    "qwen3-moe-devices": "mlp.experts",
    "mixtral": "block_sparse_moe",
    "olmoe": "mlp.experts",
    "deepseek-v3": "mlp.experts",
}
"""Recipes of types whose experts are stored one by one, and what the files call them."""
DEVICES = {"qwen3-moe-devices": "cpu"}
"""Recipes with entries for some devices, and the one that is tried here."""
LEFT_OUT = {
    "phi3": {"Phi3Attention"},
    "deepseek-v3": {"DeepseekV3Attention"},
    "gpt-oss": {"GptOssMLP"},
}
"""Recipes that leave classes of a model as they are."""


@dataclass(frozen=True)
class Case:
    """A stock checkpoint and what a recipe made of it."""

    source: Path
    output: Path
    stock: Any
    dtype: torch.dtype

    def load(self, **kw: Any) -> Any:
        """The converted model."""
        return load_converted(self.output, **kw)


Make = Callable[..., Case]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make(recipe, variant)`, cached."""
    made: dict[tuple[str, str], Case] = {}

    def case(recipe: str, variant: str = "untied, one file, float32") -> Case:
        if (recipe, variant) not in made:
            tie, size, dtype = VARIANTS[variant]
            directory = tmp_path_factory.mktemp("case")
            source = save_tiny(directory / "source", kind_of(recipe), dtype=dtype, tie=tie, max_shard_size=size)
            output = convert(recipe, source, directory / "converted", device=DEVICES.get(recipe)).output
            stock: Any = type(tiny_model(kind_of(recipe))).from_pretrained(source, dtype="auto")
            made[recipe, variant] = Case(source, output, stock, dtype)
        return made[recipe, variant]

    return case


def kind_of(recipe: str) -> Kind:
    """The model type that the recipe is tried on."""
    types = load_recipe(RECIPES[recipe]).model_type
    assert set(types) <= set(get_args(Kind)), f"tests.support.tiny_model cannot make {types} of recipe {recipe}"
    return cast("Kind", types[0])


def logits(model: Any) -> torch.Tensor:
    """With the weights in memory of their own: experts are read from a file here, and joined into fresh memory by stock."""
    with torch.no_grad():
        return aligned(model)(input_ids=IDS).logits  # type: ignore[no-any-return]


def test_there_are_recipes() -> None:
    promised = {"qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3", "phi3", "granite", "olmo2"}
    assert RECIPES.keys() == promised | EXPERTS.keys() | {
        "gpt-oss",
        "qwen3-fused-norm-mlp",
        "qwen3-layers",
        "gemma3-vision",
    }


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_head_of_a_recipe(recipe: str) -> None:
    found = load_recipe(RECIPES[recipe])
    assert found.name == recipe
    assert found.text.startswith("# ")
    assert kind_of(recipe)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_reference_has_the_bits_of_stock_and_kernels_are_near(make: Make, recipe: str, variant: str) -> None:
    case, (tie, size, dtype) = make(recipe, variant), VARIANTS[variant]
    assert (len(list(case.output.glob("model.kconvert*.safetensors"))) > 1) == (size == 10_000)
    expected = logits(case.stock)
    assert expected.dtype is dtype
    assert expected.std() > 0.01
    for kernels in ("reference", "auto"):
        model = case.load(kernels=kernels)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tie
        found = logits(model)
        if kernels == "reference":
            assert torch.equal(found, expected)
            continue
        scale = max(1.0, float(expected.abs().max()))
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(
            found, expected, rtol=0, atol=tolerance if dtype is torch.float32 else tolerance * scale
        )


def text_modules(model: Any) -> dict[str, nn.Module]:
    """Norms, attentions, MLPs, experts and routers of the text model, by path in the whole one."""
    inside = {id(module) for module in model.get_decoder().modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in inside and type(module).__name__.endswith(KINDS)
    }


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - {"qwen3-layers"}))
def test_all_that_has_a_layout_is_patched_or_the_recipe_says_why_not(make: Make, recipe: str) -> None:
    case = make(recipe)
    manifest = load_manifest(case.output)
    taken = {path for patch in manifest.patches for paths in patch.modules for path in paths}
    wanted = text_modules(case.stock)
    layers = case.stock.config.get_text_config().num_hidden_layers
    assert sum("Attention" in type(module).__name__ for module in wanted.values()) == layers == 2
    assert taken <= wanted.keys()
    left_out = {type(wanted[path]).__name__ for path in wanted.keys() - taken}
    comment = " ".join(line[1:].strip() for line in load_recipe(RECIPES[recipe]).text.splitlines() if line[:1] == "#")
    for name in left_out:
        words = {"RMSNorm": "norm", "Attention": "q/k/v", "MLP": "MLP", "Experts": "experts", "Router": "router"}
        word = words[next(kind for kind in KINDS if name.endswith(kind))]
        assert any(word in part and "left as" in part for part in comment.split(". ")), (name, comment)
    assert left_out == LEFT_OUT.get(recipe, set())
    model = case.load(strict=True)
    patched = {path for path, module in model.named_modules() if is_patched(module)}
    first = {paths[0] for patch in manifest.patches for paths in patch.modules}
    assert {path for path in patched if path in wanted} == first
    report = {item.path: item.kernel for item in model.kconvert_report.modules}
    assert report.keys() == first
    for patch in manifest.patches:
        for paths in patch.modules:
            assert report[paths[0]] in patch.kernels
            assert report[paths[0]].startswith("cpu_")


def test_whole_layers_are_patched_with_their_parts(make: Make) -> None:
    model = make("qwen3-layers").load(strict=True)
    patched = {path for path, module in model.named_modules() if is_patched(module)}
    parts = ("", ".self_attn", ".mlp", ".input_layernorm", ".post_attention_layernorm")
    assert patched == {f"model.layers.{layer}{part}" for layer in (0, 1) for part in parts} | {"model.norm"}
    assert {item.kernel for item in model.kconvert_report.modules} == {
        "cpu_fused_decoder_layer",
        "cpu_fused_qkv",
        "cpu_fused_swiglu",
        "cpu_fused_rmsnorm",
    }


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_greedy_generation_is_the_same(make: Make, recipe: str) -> None:
    case = make(recipe)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = case.stock.generate(IDS, **settings)
    assert expected.shape == (2, 13)
    for kernels in ("auto", "reference"):
        assert torch.equal(case.load(kernels=kernels).generate(IDS, **settings), expected)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "float32" in name or "shards" in name])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_saving_gives_the_source_back(make: Make, recipe: str, variant: str, tmp_path: Path) -> None:
    """Under the source's own names; transformers stores the tensors of Gemma 3 under older ones than the model's."""
    case = make(recipe, variant)
    model = case.load()
    model.save_pretrained(tmp_path / "stock")
    parts = [part for record in load_manifest(case.output).tensors for part in record.parts]
    before = read_raw(case.source)
    names = [(part.source, origin.file_name) for part in parts for origin in part.origins]
    wanted = {name for name in before if recipe in EXPERTS and f".{EXPERTS[recipe]}." in name}
    assert {file_name for name, file_name in names if file_name != name} == (
        set(before) if recipe == "gemma3-vision" else wanted
    )
    assert read_raw(tmp_path / "stock") == before
    again = type(case.stock).from_pretrained(tmp_path / "stock", dtype="auto")
    assert torch.equal(logits(again), logits(case.stock))
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == read_raw(case.output)
    assert torch.equal(logits(load_converted(tmp_path / "packed")), logits(model))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_what_a_recipe_does_not_take_is_not_changed(make: Make, recipe: str) -> None:
    case = make(recipe)
    before, after, manifest = read_raw(case.source), read_raw(case.output), load_manifest(case.output)
    seen: set[str] = set()
    for record in manifest.tensors:
        sources = [before[origin.file_name] for origin in record.origins]
        assert after[record.target].data == b"".join(tensor.data for tensor in sources)
        assert record.op in ("copy", "rename", "concatenate(0)", "stack(0)", "stack(0), concatenate(1)")
        seen.update(origin.file_name for origin in record.origins)
    assert seen == before.keys()
    assert {record.target for record in manifest.tensors} == after.keys()
    joined = {record.target.split(".")[-2] for record in manifest.tensors if record.op == "concatenate(0)"}
    parts_of = {"RMSNorm": set[str](), "Attention": {"qkv_proj"}, "MLP": {"gate_up_proj"}, "Experts": set[str]()}
    parts_of["DecoderLayer"] = {"qkv_proj", "gate_up_proj"}
    packed = {
        name
        for patch in manifest.patches
        for kind, names in parts_of.items()
        for name in names
        if patch.classes[-1].endswith(kind)
    }
    assert joined == (set() if recipe == "phi3" else packed)
    stacked = {record.target.split(".")[-1] for record in manifest.tensors if record.op.startswith("stack")}
    assert stacked == ({"gate_up_proj", "down_proj"} if recipe in EXPERTS else set())


def test_what_is_trained_packed_passes_through_and_its_kernel_runs(make: Make) -> None:
    """Phi-3: the same tensors under the same names, and no view of parts that its own code does not ask for."""
    case = make("phi3")
    assert read_raw(case.output) == read_raw(case.source)
    model, stock = case.load(), case.stock
    assert {item.kernel for item in model.kconvert_report.modules if item.layout == "gated_mlp"} == {"cpu_fused_swiglu"}
    assert list(model.state_dict()) == list(stock.state_dict())
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, type(stock.model.layers[0].mlp))
    for name in ("gate_proj", "up_proj"):
        with pytest.raises(AttributeError):
            getattr(mlp, name)
    mlp.gate_up_proj = nn.Linear(32, 96, bias=False)  # the author's own child, so it may be replaced
    assert not torch.equal(logits(model), logits(stock))
    assert model.load_state_dict(stock.state_dict()).missing_keys == []
    torch.testing.assert_close(logits(model), logits(stock), rtol=0, atol=1e-5)
