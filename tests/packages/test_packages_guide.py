"""What transformers' guide for kernels of two classes promises its authors, and what is stricter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.convert import prepare
from kconvert.errors import KconvertError
from kconvert.runtime.capture import fit_arguments
from tests.packages.helpers import (
    NORM,
    copy_example,
    failure,
    fuse,
    load,
    logits,
    replace,
    run_recipe,
    stock,
    write_package,
)
from tests.support import (
    qwen3_config,
    qwen3_tensors,
    read_raw,
    save_tiny,
    write_checkpoint,
)

GUARDED, SANDWICH = "./guarded_norm:GuardedNorm", "./sandwich_mlp:SandwichMLP"
SANDWICHED = [
    ("Gemma2RMSNorm", "pre_feedforward_layernorm"),
    ("Gemma2MLP", "mlp"),
    ("Gemma2RMSNorm", "post_feedforward_layernorm"),
]


def _refused(directory: Path, patches: str, source: Path, **kw: Any) -> tuple[int, str]:
    with pytest.raises(KconvertError) as caught:
        run_recipe(directory, patches, source, **kw)
    assert not (directory / "out").exists()
    return failure(caught.value)


def _stock_paths(model: Any, cls: str) -> set[str]:
    """The modules of that class that are not patched."""
    return {
        path
        for path, module in model.named_modules()
        if type(module).__name__ == cls and "kconvert_dispatch" not in vars(module)
    }


# --- a package as the guide writes it ---------------------------------------------------------------


IMPORTS_WITHOUT = """
import json, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ImportError("no transformers here")

sys.meta_path.insert(0, Absent())
from kconvert.kernels.packages import copy_package, import_package

classes = import_package(copy_package(Path(sys.argv[1]), "guarded"), "GuardedNorm")
layout = classes.layout(4, eps=0.0)
output = classes.kernel.forward(layout, __import__("torch").tensor([[3.0, 4.0, 0.0, 0.0]]))
print(json.dumps([classes.layout.__name__, classes.layout.conversion_mapping, output.tolist(), "transformers" in sys.modules]))
"""


def test_a_package_with_guarded_imports_needs_no_transformers(tmp_path: Path) -> None:
    package = copy_example("guarded_norm", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_WITHOUT, str(package)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    name, mapping, output, is_loaded = json.loads(done.stdout)
    assert (name, mapping, is_loaded) == ("GuardedNormLayout", [], False)
    assert output == [pytest.approx([1.2, 1.6, 0.0, 0.0])]  # 3 and 4 over sqrt(25 / 4)


def test_the_guides_form_converts_and_loads(tmp_path: Path, qwen3_dir: Path) -> None:
    """Both classes in `__init__.py`, a class called `layers`, imports from where the guide takes them."""
    copy_example("guarded_norm", tmp_path)
    output = run_recipe(tmp_path, replace(GUARDED), qwen3_dir)
    model = load(output)
    assert model.kconvert_report.to_dict()["kernels"] == {GUARDED: 2}
    assert {layer.input_layernorm.variance_epsilon for layer in model.model.layers} == {1e-6}
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), logits(stock(qwen3_dir)))


# --- constructor arguments --------------------------------------------------------------------------


class Replaced(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6, *, shift: float = 0.0) -> None:
        super().__init__()


class Open(nn.Module):
    def __init__(self, size: int, **more: Any) -> None:
        super().__init__()


def _layout(signature: str) -> type[nn.Module]:
    names: dict[str, Any] = {"nn": nn}
    exec(f"class Layout(nn.Module):\n    def __init__(self, {signature}):\n        super().__init__()\n", names)
    return names["Layout"]  # type: ignore[no-any-return]


EPS = 1e-6
DEFAULTS = ((4, EPS), {"shift": 0.0})


@pytest.mark.parametrize(
    ("signature", "given", "expected"),
    [
        ("size, eps=1e-5, *, shift=1.0", ((4, 2e-5), {"shift": 3.0}), {"size": 4, "eps": 2e-5, "shift": 3.0}),
        ("eps, shift, size", ((4, 2e-5), {"shift": 3.0}), {"size": 4, "eps": 2e-5, "shift": 3.0}),
        ("size, *, eps", ((4, 2e-5), {"shift": 0.0}), {"size": 4, "eps": 2e-5}),
        ("size, bias=False, eps=1e-5", ((4, 2e-5), {"shift": 0.0}), {"size": 4, "eps": 2e-5}),
        ("hidden_size, epsilon=1e-5", ((4, 2e-5), {"shift": 0.0}), {"hidden_size": 4, "epsilon": 2e-5}),
        ("eps, width", ((4, 2e-5), {"shift": 0.0}), {"width": 4, "eps": 2e-5}),
        ("size, **more", ((4, 2e-5), {"shift": 3.0}), {"size": 4, "eps": 2e-5, "shift": 3.0}),
        ("size", ((4, 2e-5), {"shift": 0.0}), {"size": 4, "eps": 2e-5}),
    ],
)
def test_a_layout_gets_each_argument_under_its_name(
    signature: str, given: tuple[tuple[Any, ...], dict[str, Any]], expected: dict[str, Any]
) -> None:
    assert fit_arguments(Replaced, _layout(signature), *given) == ((), expected)


def test_a_default_of_the_replaced_class_is_left_out_where_the_layout_has_no_place() -> None:
    default = Replaced.__init__.__defaults__[0]  # type: ignore[index]
    shift = Replaced.__init__.__kwdefaults__["shift"]  # type: ignore[index]
    assert fit_arguments(Replaced, _layout("size"), (4, default), {"shift": shift}) == ((), {"size": 4})
    assert fit_arguments(Replaced, _layout("size, epsilon=1"), (4, default), {"shift": shift}) == ((), {"size": 4})
    assert fit_arguments(Replaced, _layout("size, eps=1"), (4, default), {"shift": shift}) == (
        (),
        {"size": 4, "eps": 1e-6},
    )


@pytest.mark.parametrize("signature", ["*args", "*args, **more", "size, /, *rest", "size, eps, /"])
def test_a_layout_that_takes_anything_gets_what_was_passed(signature: str) -> None:
    assert fit_arguments(Replaced, _layout(signature), (4, 2e-5), {"shift": 3.0}) == ((4, 2e-5), {"shift": 3.0})


def test_arguments_of_a_class_that_takes_anything() -> None:
    assert fit_arguments(Open, _layout("size, eps"), (4,), {"eps": 2e-5}) == ((), {"size": 4, "eps": 2e-5})


def test_an_argument_that_the_layout_does_not_take_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(
        tmp_path, NORM.replace("hidden_size, eps=1e-6", "hidden_size, *, scale=1.0").replace("= eps", "= 1e-6")
    )
    code, text = _refused(tmp_path, replace("./package:Norm"), qwen3_dir)
    assert code == 3
    assert "'eps'" in text


# --- fusions ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "gemma2", "gemma2")


def _fuse(kernel: str, children: list[tuple[str, str]], layers: str = "*") -> str:
    pairs = "".join(f'      - {{class: {name}, path: "model.layers.{layers}.{child}"}}\n' for name, child in children)
    return f"  - kernel: {kernel}\n    trust_remote_code: true\n    fuse:\n{pairs}"


def test_three_children_become_one_module(tmp_path: Path, gemma2_dir: Path) -> None:
    copy_example("sandwich_mlp", tmp_path)
    output = run_recipe(tmp_path, _fuse(SANDWICH, SANDWICHED), gemma2_dir, model_type="gemma2")
    model, plain = load(output), stock(gemma2_dir)
    before, after = read_raw(gemma2_dir), read_raw(output)
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}"
        gate, up = (before[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert after[f"{prefix}.pre_feedforward_layernorm.gate_up_proj.weight"].data == gate.data + up.data
        assert (
            after[f"{prefix}.pre_feedforward_layernorm.after"] == before[f"{prefix}.post_feedforward_layernorm.weight"]
        )
        assert [type(layer.get_submodule(name)) for _, name in SANDWICHED[1:]] == [nn.Identity, nn.Identity]
    assert model.kconvert_report.to_dict()["kernels"] == {SANDWICH: 2}
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), logits(plain))
    model.save_pretrained(tmp_path / "stock")
    assert read_raw(tmp_path / "stock") == before


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_children_in_another_order_than_they_run_are_no_fusion(
    order: tuple[int, ...], tmp_path: Path, gemma2_dir: Path
) -> None:
    copy_example("sandwich_mlp", tmp_path)
    children = [SANDWICHED[number] for number in order]
    code, text = _refused(tmp_path, _fuse(SANDWICH, children), gemma2_dir, model_type="gemma2")
    assert code == 3
    assert f"{tmp_path / 'recipe.yaml'}:5" in text


@pytest.mark.parametrize(
    ("second", "line"), [("model.layers.*.self_attn.q_norm", 9), ("model.norm", 9), ("model.layers.{0}.mlp", 9)]
)
def test_a_pair_with_another_parent_is_an_error_with_its_line(
    second: str, line: int, tmp_path: Path, qwen3_dir: Path
) -> None:
    copy_example("norm_mlp", tmp_path)
    patches = fuse().replace('"model.layers.*.mlp"', f'"{second}"')
    code, text = _refused(tmp_path, patches, qwen3_dir)
    assert code == 3
    assert text.startswith(f"{tmp_path / 'recipe.yaml'}:{line}: ")
    assert f"'{second}' has another parent than 'model.layers.*.post_attention_layernorm'" in text


# --- which modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["RMSNorm", "Qwen3RMSNor", "Qwen3RMSNorm2", "qwen3rmsnorm", "Module", "Norm"])
def test_a_class_name_is_the_whole_name(name: str, tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, NORM)
    code, text = _refused(tmp_path, replace("./package:Norm", name=name), qwen3_dir)
    assert code == 3
    assert f"'model.layers.0.input_layernorm' is a Qwen3RMSNorm, the recipe names {name}" in text
    assert f"{tmp_path / 'recipe.yaml'}:7" in text


def test_a_subclass_is_another_class(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "gemma3_text")
    write_package(tmp_path, NORM)
    patches = replace("./package:Norm", "model.embed_tokens", "Embedding")
    code, text = _refused(tmp_path, patches, source, model_type="gemma3_text")
    assert code == 3
    assert "is a Gemma3TextScaledWordEmbedding, the recipe names Embedding" in text


def test_dots_of_a_path_are_dots(tmp_path: Path) -> None:
    """In transformers `model.layers.*` is a regular expression whose dots match anything."""
    tensors = qwen3_tensors()
    strangers = {
        name.replace("model.layers.0", other): tensor
        for other in ("modelXlayers.0", "model.layersX0", "model.layers.0X1", "my.model.layers.0")
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.mlp.") or name == "model.layers.0.post_attention_layernorm.weight"
    }
    source = write_checkpoint(tmp_path / "source", {**tensors, **strangers}, qwen3_config())
    copy_example("norm_mlp", tmp_path)
    output = run_recipe(tmp_path, fuse(), source)
    before, after = read_raw(source), read_raw(output)
    assert {name: after[name] for name in strangers} == {name: before[name] for name in strangers}
    prepared = prepare(str(tmp_path / "recipe.yaml"), source, trust_remote_code=True)
    assert {path for claim in prepared.plan.claims for path in claim.paths} == {
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("post_attention_layernorm", "mlp")
    }


def test_a_set_of_layers(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3", num_hidden_layers=8)
    copy_example("norm_mlp", tmp_path)
    output = run_recipe(tmp_path, fuse(layers="{0-3,7}"), source)
    model, plain = load(output), stock(source)
    chosen, others = (0, 1, 2, 3, 7), (4, 5, 6)
    assert [module.path for module in model.kconvert_report.modules] == [
        f"model.layers.{layer}.post_attention_layernorm" for layer in chosen
    ]
    assert _stock_paths(model, "Qwen3MLP") == {f"model.layers.{layer}.mlp" for layer in others}
    assert {name for name in read_raw(output) if "gate_proj" in name} == {
        f"model.layers.{layer}.mlp.gate_proj.weight" for layer in others
    }
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), logits(plain))


# --- mappings that mean more than the entry's modules -----------------------------------------------


def _norm(pattern: str, target: str) -> str:
    return NORM.replace(r'r"input_layernorm\.weight", "input_layernorm.scale"', f'r"{pattern}", r"{target}"')


WIDER = {
    "every weight": (r"weight", "scale", "model.embed_tokens.weight", "model.embed_tokens.scale"),
    "norms and projections": (
        r"(\w+)_(layernorm|proj)\.weight",
        r"\1_layernorm.scale",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_layernorm.scale",
    ),
    "a dot that is any letter": (
        r"layers.(\d+)..+layernorm\.weight",
        r"layers.\1.input_layernorm.scale",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.input_layernorm.scale",
    ),
}


@pytest.mark.parametrize("case", list(WIDER))
def test_a_mapping_that_means_other_modules_too_is_refused(case: str, tmp_path: Path, qwen3_dir: Path) -> None:
    pattern, target, name, renamed = WIDER[case]
    write_package(tmp_path, _norm(pattern, target))
    code, text = _refused(tmp_path, replace("./package:Norm"), qwen3_dir)
    assert code == 3
    assert f"{tmp_path / 'recipe.yaml'}:5" in text
    assert f"'{name}'" in text
    assert f"'{renamed}'" in text


def test_a_module_of_another_class_with_the_same_name(tmp_path: Path) -> None:
    """An encoder's MLPs beside the decoder's: only the decoder's are meant."""
    source = save_tiny(tmp_path / "source", "gemma3")
    body = r"""
class Attention(nn.Module):
    def forward(self, hidden_states):
        raise NotImplementedError

class AttentionLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"self_attn\.q_proj\.", "self_attn.query.")]
"""
    write_package(tmp_path, body)
    patches = replace("./package:Attention", "model.language_model.layers.*.self_attn", "Gemma3Attention")
    code, text = _refused(tmp_path, patches, source, model_type="gemma3")
    assert code == 3
    assert "self_attn.q_proj." in text
    assert "vision_tower" in text
    assert "self_attn.query." in text


@pytest.mark.parametrize(
    ("pattern", "target", "path"),
    [
        (r"norm\.weight", "norm.scale", "model.norm"),
        (r"layernorm\.weight", "layernorm.scale", "model.layers.*.input_layernorm"),
    ],
)
def test_a_mapping_that_begins_inside_a_segment_is_refused(
    pattern: str, target: str, path: str, tmp_path: Path, qwen3_dir: Path
) -> None:
    write_package(tmp_path, _norm(pattern, target))
    code, text = _refused(tmp_path, replace("./package:Norm", path), qwen3_dir)
    assert code == 3
    assert f"{tmp_path / 'recipe.yaml'}:5" in text
    assert "model.layers.0." in text
    assert pattern.replace("\\", "\\\\") in text


def test_modules_of_the_same_class_may_be_left_out(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, _norm(r"(input|post_attention)_layernorm\.weight", r"\1_layernorm.scale"))
    patches = "".join(
        replace("./package:Norm", f"model.layers.{{{layer}}}.{name}")
        for layer, name in ((0, "input_layernorm"), (1, "post_attention_layernorm"))
    )
    model = load(run_recipe(tmp_path, patches, qwen3_dir))
    assert [module.path for module in model.kconvert_report.modules] == [
        "model.layers.0.input_layernorm",
        "model.layers.1.post_attention_layernorm",
    ]
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


# --- flags ------------------------------------------------------------------------------------------


LOUD = NORM.replace("return self.scale *", "return 3.0 * self.scale *").replace(
    "class Norm:", "class Norm:\n    FLAG\n"
)


def _flagged(directory: Path, source: Path, flag: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A norm whose kernel gives three times the stock result: the model, and its layer's two possible outputs."""
    write_package(directory, LOUD.replace("FLAG", flag))
    model = load(run_recipe(directory, replace("./package:Norm"), source))
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    expected = stock(source).model.layers[0].input_layernorm(hidden)
    return model.model.layers[0].input_layernorm, hidden, expected.detach()


@pytest.mark.parametrize(
    ("flag", "is_used"), [("has_backward = False", False), ("has_backward = True", True), ("pass", True)]
)
def test_a_kernel_without_a_backward_runs_only_where_none_is_needed(
    flag: str, is_used: bool, tmp_path: Path, qwen3_dir: Path
) -> None:
    norm, hidden, expected = _flagged(tmp_path, qwen3_dir, flag)
    with torch.no_grad():
        torch.testing.assert_close(norm(hidden), 3 * expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(hidden).detach(), (3 if is_used else 1) * expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("flag", "is_used"), [("can_torch_compile = False", False), ("can_torch_compile = True", True), ("pass", False)]
)
def test_a_kernel_runs_in_a_compiled_model_only_where_it_says_that_it_can(
    flag: str, is_used: bool, tmp_path: Path, qwen3_dir: Path
) -> None:
    norm, hidden, expected = _flagged(tmp_path, qwen3_dir, flag)
    torch._dynamo.reset()
    compiled: Any = torch.compile(norm, backend="eager", fullgraph=is_used)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden), (3 if is_used else 1) * expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm(hidden), 3 * expected, rtol=1e-5, atol=1e-6)
