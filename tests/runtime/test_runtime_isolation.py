"""Loading changes one model only: no class, no other model, also when it fails, and in threads."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from kconvert.errors import KconvertError
from kconvert.kernels.layout import is_patched
from kconvert.kernels.model import converted_class
from kconvert.manifest import load_manifest
from kconvert.runtime import load_converted
from kconvert.runtime.patching import PatchedOnInit, PatchJob, ResolvedPatch, packings_of, patching, resolve_layout
from tests.runtime.conftest import MakePair
from tests.runtime.pairs import IDS, Pair, edit_config, logits
from tests.support import tiny_config

CLASSES: list[type[Any]] = [
    modeling_qwen3.Qwen3ForCausalLM,
    modeling_qwen3.Qwen3Model,
    modeling_qwen3.Qwen3DecoderLayer,
    modeling_qwen3.Qwen3Attention,
    modeling_qwen3.Qwen3MLP,
    modeling_qwen3.Qwen3RMSNorm,
    PreTrainedModel,
    nn.Module,
    nn.Linear,
]


def snapshot() -> dict[str, dict[str, Any]]:
    found = {cls.__name__: dict(vars(cls)) for cls in CLASSES}
    # what the ABC machinery and lazy attributes keep for themselves
    return {name: {key: value for key, value in values.items() if "_abc_" not in key} for name, values in found.items()}


def assert_stock(model: Any, pair: Pair) -> None:
    """Every module is of the very classes of transformers, under stock names, and computes the stock logits."""
    assert type(model) is modeling_qwen3.Qwen3ForCausalLM
    assert not any(is_patched(module) for module in model.modules())
    layer = model.model.layers[0]
    assert type(layer.mlp) is modeling_qwen3.Qwen3MLP
    assert "forward" not in vars(layer.mlp)
    assert type(layer.input_layernorm) is modeling_qwen3.Qwen3RMSNorm
    names = {name for name, _ in model.named_parameters()}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert not [name for name in names if "gate_up_proj" in name]
    assert model._weight_conversions is None or not model._weight_conversions
    assert isinstance(layer.mlp.gate_proj, nn.Linear)


def test_another_model_of_the_class_stays_stock(qwen3: Pair) -> None:
    before = snapshot()
    earlier = qwen3.stock()
    expected = logits(earlier)
    ours = qwen3.load()
    later = qwen3.stock()
    for model in (earlier, later):
        assert_stock(model, qwen3)
        assert torch.equal(logits(model), expected)
    assert type(ours) is not Qwen3ForCausalLM
    assert isinstance(ours, Qwen3ForCausalLM)
    assert isinstance(ours.model.layers[0].mlp, modeling_qwen3.Qwen3MLP)
    assert type(ours).__name__ == "Qwen3ForCausalLM"
    assert type(ours).__module__ == Qwen3ForCausalLM.__module__
    assert snapshot() == before


def test_every_class_keeps_the_name_that_transformers_looks_for(pair: Pair) -> None:
    ours, stock = pair.load(), pair.stock()
    names = {path: type(module).__name__ for path, module in stock.named_modules()}
    found = {path: type(module).__name__ for path, module in ours.named_modules() if path in names}
    differ = {path: name for path, name in found.items() if name != names[path]}
    if pair.recipe != "qwen3-fused-norm-mlp":
        assert differ == {}
    else:
        assert set(differ.values()) == {"Identity", "NormGatedMLPLayout"}
        assert len(differ) == 4


def damaged_file(directory: Path) -> dict[str, Any]:
    path = directory / "model.kconvert.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return {}


def unknown_kernels(directory: Path) -> dict[str, Any]:
    return {"kernels": ["no_such_kernel"]}


def strict(directory: Path) -> dict[str, Any]:
    return {"kernels": ["cuda_fused_swiglu"], "strict": True}


def other_width(directory: Path) -> dict[str, Any]:
    edit_config(directory, hidden_size=64)
    return {}


def more_layers(directory: Path) -> dict[str, Any]:
    edit_config(directory, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    return {}


@pytest.mark.filterwarnings("ignore:.*config.json was changed")
@pytest.mark.parametrize("fault", [damaged_file, unknown_kernels, strict, other_width, more_layers])
def test_a_load_that_fails_leaves_nothing(qwen3: Pair, tmp_path: Path, fault: Callable[[Path], dict[str, Any]]) -> None:
    expected = logits(qwen3.stock())
    before = snapshot()
    default = torch.get_default_dtype()
    broken = qwen3.copy(tmp_path / "broken")
    kwargs = fault(broken.converted)
    with pytest.raises((KconvertError, RuntimeError)):
        load_converted(broken.converted, **kwargs)
    assert snapshot() == before
    assert torch.get_default_dtype() is default
    stock = qwen3.stock()
    assert_stock(stock, qwen3)
    assert torch.equal(logits(stock), expected)
    assert torch.equal(logits(qwen3.load(kernels="reference")), expected)


def test_an_instance_made_outside_a_load_is_stock(qwen3: Pair) -> None:
    """The class of a converted model holds no instructions."""
    ours = qwen3.load()
    made = type(ours)(ours.config)
    assert "model.layers.0.mlp.gate_proj.weight" in dict(made.named_parameters())
    assert not any(is_patched(module) for module in made.modules())


def test_one_job_patches_one_model(qwen3: Pair) -> None:
    """A model that builds another one of its class while it is loaded gets a stock one."""
    manifest = load_manifest(qwen3.converted)
    packings = packings_of(manifest)
    patches = [
        ResolvedPatch(patch, resolve_layout(patch, packings[number]), None)
        for number, patch in enumerate(manifest.patches)
    ]
    cls = converted_class(PatchedOnInit, Qwen3ForCausalLM)
    config = tiny_config("qwen3")
    with patching(PatchJob(manifest, patches)):
        first, second = cls(config), cls(config)
    third = cls(config)
    assert [sum(map(is_patched, model.modules())) for model in (first, second, third)] == [13, 0, 0]


def test_two_recipes_side_by_side(qwen3: Pair, fused: Pair) -> None:
    one, two = qwen3.load(), fused.load()
    names = [set(dict(model.named_parameters())) for model in (one, two)]
    assert "model.layers.0.mlp.gate_up_proj.weight" in names[0] - names[1]
    assert "model.layers.0.post_attention_layernorm.mlp.gate_up_proj.weight" in names[1] - names[0]
    torch.testing.assert_close(logits(one), logits(two), rtol=0, atol=1e-5)


def test_threads_that_load_at_once(tied: Pair) -> None:
    """transformers swaps global functions while it loads; loads of tied models corrupt each other without a lock."""
    expected = logits(tied.stock())
    found: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def load(number: int) -> None:
        try:
            barrier.wait(timeout=30)
            model = tied.load(kernels="reference")
            assert model.lm_head.weight is model.model.embed_tokens.weight
            found[number] = logits(model)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    assert sorted(found) == [0, 1, 2, 3]
    assert all(torch.equal(each, expected) for each in found.values())
    assert_stock(tied.stock(), tied)


def test_threads_that_run_one_model(qwen3: Pair) -> None:
    model = qwen3.load()
    batches = [(IDS + number) % 64 for number in range(4)]
    expected = [logits(model, ids) for ids in batches]
    found: dict[int, list[torch.Tensor]] = {}

    def run(number: int) -> None:
        found[number] = [logits(model, batches[number]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number in range(4):
        assert all(torch.equal(each, expected[number]) for each in found[number])


def test_patched_modules_pickle(pair: Pair) -> None:
    """A17; whole models of transformers do not pickle while `kernels` is installed, ours are no worse."""
    model = pair.load()
    paths = [path for path, module in model.named_modules() if is_patched(module)]
    assert paths
    hidden = torch.randn(1, 3, model.config.hidden_size)
    for path in (pair.mlp(0), "model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"):
        module = model.get_submodule(path)
        again = pickle.loads(pickle.dumps(module))
        assert type(again) is type(module)
        with torch.no_grad():
            assert torch.equal(again(hidden), module(hidden))
    stock = pair.stock()
    try:
        pickle.dumps(stock)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        with pytest.raises(type(error)):
            pickle.dumps(model)
    else:
        again = pickle.loads(pickle.dumps(model))
        assert type(again) is type(model)
        assert torch.equal(logits(again), logits(model))


def test_printing_shows_the_packed_modules(pair: Pair) -> None:
    text = repr(pair.load())
    assert "(gate_up_proj): Linear(in_features=32, out_features=96" in text
    assert "(gate_proj)" not in text
    assert text.startswith(f"{type(pair.stock()).__name__}(")


def test_train_and_eval_reach_patched_modules(pair: Pair) -> None:
    model = pair.load()
    for mode in (True, False):
        model.train(mode)
        assert {module.training for module in model.modules()} == {mode}


def test_gate_and_up_stay_readable_as_rows(pair: Pair) -> None:
    """`_init_weights` of some models reads `module.gate_proj.weight`."""
    model, stock = pair.load(), pair.stock()
    mlp = model.get_submodule(pair.mlp(0))
    packed = mlp.gate_up_proj.weight
    theirs = stock.model.layers[0].mlp
    assert torch.equal(mlp.gate_proj.weight, packed[:48])
    assert torch.equal(mlp.gate_proj.weight, theirs.gate_proj.weight)
    assert torch.equal(mlp.up_proj.weight, theirs.up_proj.weight)
    assert (mlp.gate_proj.in_features, mlp.gate_proj.out_features, mlp.gate_proj.bias) == (32, 48, None)
    hidden = torch.randn(2, 32)
    with torch.no_grad():
        assert torch.equal(mlp.up_proj(hidden), theirs.up_proj(hidden))
        mlp.gate_proj.weight.fill_(7.0)
        mlp.up_proj.weight[0, 0] = 9.0
    assert packed[:48].eq(7.0).all()
    assert packed[48, 0] == 9.0
    assert not packed[48:].eq(7.0).any()
    for names in (model.state_dict(), dict(model.named_modules()), dict(model.named_parameters())):
        assert not [name for name in names if "gate_proj" in name or "up_proj" in name.replace("gate_up_proj", "")]
    with pytest.raises(AttributeError):
        mlp.gate_proj.weight = packed
    assert not isinstance(mlp.gate_proj, nn.Module)


def test_views_carry_the_flag_that_stops_initialisation(pair: Pair) -> None:
    mlp = pair.load().get_submodule(pair.mlp(0))
    mlp.gate_up_proj.weight._is_hf_initialized = True
    assert mlp.gate_proj.weight._is_hf_initialized
    del mlp.gate_up_proj.weight._is_hf_initialized
    assert not hasattr(mlp.gate_proj.weight, "_is_hf_initialized")


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("recipe", ["qwen3", "qwen3-fused-norm-mlp", "llama"])
def test_loading_draws_nothing(make_pair: MakePair, recipe: str, tie: bool) -> None:
    """What the user draws next is what it is after a stock load."""
    pair = make_pair(recipe, tie=tie)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    pair.stock()
    assert torch.equal(torch.get_rng_state(), before)
    for kernels in ("auto", "reference"):
        pair.load(kernels=kernels)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_packed_projection_of_a_loaded_model_cannot_be_set(pair: Pair) -> None:
    mlp = pair.load().get_submodule(pair.mlp(0))
    for name in ("gate_proj", "up_proj"):
        with pytest.raises(AttributeError, match="packed into gate_up_proj"):
            setattr(mlp, name, nn.Linear(32, 48, bias=False))
    assert "gate_up_proj" in dict(mlp.named_children())
