"""What a package must declare: the names of its classes, and a conversion mapping that has a byte form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Concatenate, ConversionOps, PermuteForRope, WeightConverter, WeightRenaming
from transformers.core_model_loading import Transpose as StockTranspose

from kconvert.convert.adapter import rules_from_mapping
from kconvert.errors import CheckpointError, KconvertError, RecipeError
from kconvert.manifest import load_manifest
from kconvert.transforms import BoundRule, MappingRule, PermuteHeads, bind_mapping
from kconvert.transforms import Concatenate as Concatenated
from tests.packages.helpers import (
    NORM,
    NORM_KERNEL,
    NORM_LAYOUT,
    failure,
    fuse,
    load,
    logits,
    replace,
    run_recipe,
    stock,
    write_package,
)
from tests.support import read_raw

NORM_PATH, MLP_PATH = "model.layers.0.post_attention_layernorm", "model.layers.0.mlp"
MLP_NAMES = [f"{MLP_PATH}.{name}_proj.weight" for name in ("down", "gate", "up")]


def _refused(directory: Path, body: str, source: Path, patches: str) -> tuple[int, str]:
    write_package(directory, body)
    with pytest.raises(KconvertError) as caught:
        run_recipe(directory, patches, source)
    assert not (directory / "out").exists()
    return failure(caught.value)


# --- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kernel", "said"),
    [
        (NORM, "./package:norm", "no class norm"),
        (NORM, "./package:NormLayout", "NormLayout is the layout of Norm; name the kernel, Norm"),
        (NORM_KERNEL, "./package:Norm", "no torch.nn.Module class NormLayout"),
        (NORM_LAYOUT, "./package:Norm", "no class Norm"),
        (NORM.replace("class NormLayout(nn.Module)", "class NormLayout"), "./package:Norm", "no torch.nn.Module"),
        (NORM.replace("def forward", "def run"), "./package:Norm", "has no forward"),
        (NORM + "\nNorm = 3\n", "./package:Norm", "no class Norm"),
    ],
)
def test_both_classes_are_wanted_under_their_names(
    body: str, kernel: str, said: str, tmp_path: Path, qwen3_dir: Path
) -> None:
    code, text = _refused(tmp_path, body, qwen3_dir, replace(kernel))
    assert code == 3, text
    assert said in text
    assert f"{tmp_path / 'recipe.yaml'}:5" in text


def test_layout_in_another_module_is_not_found(tmp_path: Path, qwen3_dir: Path) -> None:
    package = write_package(tmp_path, NORM_KERNEL)
    (package / "__init__.py").write_text("from .other import NormLayout\n", encoding="utf-8")
    (package / "other.py").write_text(
        "import torch\nfrom torch import nn\nclass NormLayout(nn.Module): pass\n", encoding="utf-8"
    )
    with pytest.raises(RecipeError, match="NormLayout beside Norm") as caught:
        run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    assert caught.value.exit_code == 3


def test_neither_init_nor_layers(tmp_path: Path, qwen3_dir: Path) -> None:
    package = write_package(tmp_path, NORM)
    (package / "layers.py").rename(package / "other.py")
    with pytest.raises(RecipeError, match=r"neither __init__\.py nor layers\.py"):
        run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)


@pytest.mark.parametrize("home", ["layers", "init"])
def test_package_with_relative_imports(home: str, tmp_path: Path, qwen3_dir: Path) -> None:
    package = write_package(tmp_path, NORM.replace("1e-6", "EPS") + "\n")
    text = (package / "layers.py").read_text(encoding="utf-8")
    (package / "layers.py").write_text("from .inner.numbers import EPS\n" + text, encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "inner").mkdir()
    (package / "inner" / "numbers.py").write_text("EPS = 1e-6\n", encoding="utf-8")
    if home == "init":
        (package / "layers.py").replace(package / "__init__.py")
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    torch.testing.assert_close(logits(load(output)), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_relative_imports_without_an_init(tmp_path: Path, qwen3_dir: Path) -> None:
    package = write_package(tmp_path, NORM.replace("1e-6", "EPS") + "\n")
    text = (package / "layers.py").read_text(encoding="utf-8")
    (package / "layers.py").write_text("from .util import EPS\nfrom . import util\n" + text, encoding="utf-8")
    (package / "util.py").write_text("from .inner.numbers import EPS\n", encoding="utf-8")
    (package / "inner").mkdir()
    (package / "inner" / "numbers.py").write_text("EPS = 1e-6\n", encoding="utf-8")
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    model = load(output)
    assert {module.kernel for module in model.kconvert_report.modules} == {"./package:Norm"}
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_a_package_that_is_further_down_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    """As the sources of the Hub's kernels lay theirs out."""
    write_package(tmp_path / "package", NORM, "torch-ext/norm")
    with pytest.raises(
        RecipeError, match=r"neither __init__\.py nor layers\.py.*name the folder.*, torch-ext/norm"
    ) as caught:
        run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    assert failure(caught.value)[0] == 3
    run_recipe(tmp_path, replace("./package/torch-ext/norm:Norm"), qwen3_dir)


@pytest.mark.parametrize("named", ["./package:Norm", "./package/build/torch-cpu:Norm"])
def test_a_package_that_is_built(named: str, tmp_path: Path, qwen3_dir: Path) -> None:
    """As the Hub has them: by the package's own folder, or by that of the variant."""
    write_package(tmp_path / "package", NORM, "build/torch-cpu")
    model = load(run_recipe(tmp_path, replace(named), qwen3_dir))
    assert {module.kernel for module in model.kconvert_report.modules} == {named}


# --- the adapter ------------------------------------------------------------------------------------


class Shuffle(ConversionOps):
    """An op of an author's own."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Transpose(StockTranspose):
    """Called like one of transformers' ops, and not one of them."""


@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ([Shuffle()], f"Shuffle of {__name__}"),
        ([Concatenate(dim=0), Shuffle()], f"Shuffle of {__name__}"),
        ([Transpose(0, 1)], f"Transpose of {__name__}"),
    ],
)
def test_an_op_that_is_not_known_is_named(operations: list[Any], named: str) -> None:
    rule = WeightConverter(["a", "b"], "c", operations=operations)
    with pytest.raises(RecipeError, match=named) as caught:
        rules_from_mapping([rule], "recipe.yaml:5")
    code, text = failure(caught.value)
    assert code == 3
    assert text.startswith("recipe.yaml:5: ")


def test_an_op_that_reads_the_config_needs_the_model() -> None:
    rule = WeightConverter(["a"], "c", operations=[PermuteForRope()])
    with pytest.raises(RecipeError, match="reads the model's config, which is not there without the model") as caught:
        rules_from_mapping([rule], "recipe.yaml:5")
    assert "leave out --no-model-check" in failure(caught.value)[1]
    config = SimpleNamespace(num_attention_heads=4)
    (made,) = rules_from_mapping([rule], "recipe.yaml:5", config_of=lambda: config)
    assert made.operations == (PermuteHeads(4),)


class Custom(WeightConverter):
    """A rule of an author's own may match as it likes."""


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (3, "no list of rules"),
        (["a"], "rule str"),
        ([{"a": "b"}], "rule dict"),
        ([Custom(["a"], "c", operations=[Concatenate(dim=0)])], "rule Custom"),
    ],
)
def test_what_is_no_rule_is_refused(mapping: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        rules_from_mapping(mapping, "recipe.yaml:5")


def test_a_scoped_rule_is_refused() -> None:
    rule = WeightRenaming("a", "b")
    rule.scope_prefix = "model"
    with pytest.raises(RecipeError, match="scope prefix"):
        rules_from_mapping([rule], "recipe.yaml:5")


def test_rules_become_data() -> None:
    rename, join = rules_from_mapping(
        [
            WeightRenaming(r"norm\.weight", "norm.scale"),
            WeightConverter([r"b\.w", r"a\.w"], "c.w", operations=[Concatenate(dim=1)]),
        ],
        "recipe.yaml:5",
    )
    assert (rename.operations, rename.sources, rename.targets) == ((), (r"norm\.weight",), ("norm.scale",))
    assert (join.operations, join.sources, join.targets) == ((Concatenated(1),), (r"b\.w", r"a\.w"), ("c.w",))


def _rules(*mapping: Any) -> tuple[MappingRule, ...]:
    return rules_from_mapping(mapping, "recipe.yaml:5")


def _gate_up(*order: str, target: str = "post_attention_layernorm.gate_up_proj.weight") -> WeightConverter:
    return WeightConverter([rf"mlp\.{name}_proj\.weight" for name in order], target, operations=[Concatenate(dim=0)])


DOWN = WeightRenaming(r"mlp\.down_proj\.weight", "post_attention_layernorm.down_proj.weight")


@pytest.mark.parametrize("order", [("gate", "up"), ("up", "gate")])
@pytest.mark.parametrize("reverse", [False, True])
def test_parts_come_in_the_order_of_the_patterns_whatever_the_file_order(order: tuple[str, str], reverse: bool) -> None:
    names = sorted(MLP_NAMES, reverse=reverse)
    bound = bind_mapping(_rules(_gate_up(*order), DOWN), (NORM_PATH, MLP_PATH), names)
    joined = next(rule for rule in bound if not rule.is_rename)
    assert joined.sources == tuple(f"{MLP_PATH}.{name}_proj.weight" for name in order)
    assert (joined.target, joined.operations) == (f"{NORM_PATH}.gate_up_proj.weight", (Concatenated(0),))
    assert len(bound) == 2


def test_incomplete_group_names_target_and_pattern() -> None:
    names = [name for name in MLP_NAMES if "up_proj" not in name]
    with pytest.raises(CheckpointError) as caught:
        bind_mapping(_rules(_gate_up("gate", "up"), DOWN), (NORM_PATH, MLP_PATH), names)
    code, text = failure(caught.value)
    assert code == 4
    assert f"{NORM_PATH}.gate_up_proj.weight" in text
    assert r"mlp\\.up_proj\\.weight" in text


def test_pattern_that_begins_inside_a_segment_shows_both() -> None:
    path = "model.layers.0.input_layernorm"
    with pytest.raises(RecipeError) as caught:
        bind_mapping(_rules(WeightRenaming("layernorm.weight", "layernorm.scale")), (path,), [f"{path}.weight"])
    code, text = failure(caught.value)
    assert code == 3
    assert "'layernorm.weight'" in text
    assert f"'{path}.weight'" in text


def test_pattern_ends_at_a_word_boundary() -> None:
    path = "model.layers.0.input_layernorm"
    (kept,) = bind_mapping(
        _rules(WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale")),
        (path,),
        [f"{path}.weight_scale_inv"],
    )
    assert kept == BoundRule.renamed(f"{path}.weight_scale_inv", f"{path}.weight_scale_inv")


def test_escaped_dots_are_dots() -> None:
    path = "model.inputXlayernorm"
    rules = _rules(WeightRenaming(r"input\.layernorm\.weight", "input.layernorm.scale"))
    (kept,) = bind_mapping(rules, (path,), [f"{path}.weight"])
    assert kept.target == f"{path}.weight"
    (renamed,) = bind_mapping(rules, ("model.input.layernorm",), ["model.input.layernorm.weight"])
    assert renamed.target == "model.input.layernorm.scale"


def test_target_outside_the_first_module_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        bind_mapping(
            _rules(_gate_up("gate", "up", target="mlp.gate_up_proj.weight"), DOWN), (NORM_PATH, MLP_PATH), MLP_NAMES
        )
    code, text = failure(caught.value)
    assert code == 3
    assert f"'{MLP_PATH}.gate_up_proj.weight', outside the module '{NORM_PATH}'" in text


def test_tensors_outside_the_modules_are_not_touched() -> None:
    names = [
        *MLP_NAMES,
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.0.mlp_extra.gate_proj.weight",
        "mlp.gate_proj.weight",
    ]
    bound = bind_mapping(_rules(_gate_up("gate", "up"), DOWN), (NORM_PATH, MLP_PATH), names)
    assert {source for rule in bound for source in rule.sources} == set(MLP_NAMES)


def test_two_tensors_with_one_target_are_refused() -> None:
    path = "model.layers.0.input_layernorm"
    rule = WeightRenaming(r"input_layernorm\.(weight|bias)", "input_layernorm.scale")
    with pytest.raises(RecipeError, match="both") as caught:
        bind_mapping(_rules(rule), (path,), [f"{path}.weight", f"{path}.bias"])
    assert f"{path}.bias" in str(caught.value)


def test_a_group_in_the_pattern_is_put_into_the_target() -> None:
    path = "model.layers.0.input_layernorm"
    rule = WeightRenaming(r"layers\.(\d+)\.input_layernorm\.weight", r"layers.\1.input_layernorm.scale")
    (bound,) = bind_mapping(_rules(rule), (path,), [f"{path}.weight"])
    assert bound.target == f"{path}.scale"


# --- the same through a recipe ----------------------------------------------------------------------


MLP_PACKAGE = r"""
class Fused:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        up, gate = self.packed.chunk(2)
        normed = self.scale * wide.to(hidden_states.dtype)
        inner = nn.functional.silu(normed @ gate.T) * (normed @ up.T)
        return self.down_proj(inner)

class FusedLayout(nn.Module):
    conversion_mapping = [
        WeightRenaming(r"post_attention_layernorm\.weight", "post_attention_layernorm.scale"),
        WeightRenaming(r"mlp\.down_proj\.weight", "post_attention_layernorm.down_proj.weight"),
        WeightConverter(
            [r"mlp\.up_proj\.weight", r"mlp\.gate_proj\.weight"],
            "post_attention_layernorm.packed",
            operations=[Concatenate(dim=DIM)],
        ),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.scale, self.eps, self.down_proj = nn.Parameter(torch.ones(32)), norm.variance_epsilon, mlp.down_proj
        self.packed = nn.Parameter(torch.zeros(96, 32))
"""


def test_up_first_where_the_author_says_so(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, MLP_PACKAGE.replace("DIM", "0"))
    output = run_recipe(tmp_path, fuse("./package:Fused"), qwen3_dir)
    before, after = read_raw(qwen3_dir), read_raw(output)
    for layer in (0, 1):
        up, gate = (before[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("up", "gate"))
        assert after[f"model.layers.{layer}.post_attention_layernorm.packed"].data == up.data + gate.data
    record = next(item for item in load_manifest(output).tensors if item.target == f"{NORM_PATH}.packed")
    assert [part.source for part in record.parts] == [f"{MLP_PATH}.up_proj.weight", f"{MLP_PATH}.gate_proj.weight"]
    expected = logits(stock(qwen3_dir))
    torch.testing.assert_close(logits(load(output)), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(load(output, kernels="reference")), expected)


@pytest.mark.parametrize("dim", ["-1", "2", "1"])
def test_a_concatenation_that_does_not_fit_is_an_error(dim: str, tmp_path: Path, qwen3_dir: Path) -> None:
    code, text = _refused(tmp_path, MLP_PACKAGE.replace("DIM", dim), qwen3_dir, fuse("./package:Fused"))
    assert code == (3 if dim == "2" else 4)  # joined columns are a tensor, and not one of the layout's shape
    assert "packed" in text


def test_unconsumed_tensor_inside_a_claim_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    body = NORM.replace(r"input_layernorm\.weight", r"input_layernorm\.other")
    code, text = _refused(tmp_path, body, qwen3_dir, replace("./package:Norm"))
    assert code == 4
    assert "model.layers.0.input_layernorm" in text


def test_unconsumed_tensor_of_the_second_module_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    body = MLP_PACKAGE.replace("DIM", "0").replace(r"mlp\.down_proj\.weight", r"mlp\.nothing\.weight")
    code, text = _refused(tmp_path, body, qwen3_dir, fuse("./package:Fused"))
    assert code == 3
    assert f"{MLP_PATH}.down_proj.weight" in text


def test_layout_parameter_that_nothing_fills_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    body = NORM.replace("self.eps = eps", "self.eps, self.more = eps, nn.Parameter(torch.ones(2))")
    code, text = _refused(tmp_path, body, qwen3_dir, replace("./package:Norm"))
    assert code == 4
    assert "input_layernorm.more" in text


def test_layout_parameter_of_another_shape_is_named(tmp_path: Path, qwen3_dir: Path) -> None:
    body = NORM.replace("torch.ones(hidden_size)", "torch.ones(hidden_size + 1)")
    code, text = _refused(tmp_path, body, qwen3_dir, replace("./package:Norm"))
    assert code == 4
    assert "input_layernorm.scale" in text
    assert "[32]" in text
    assert "[33]" in text


def test_a_layout_that_does_not_take_the_arguments_is_one_line(tmp_path: Path, qwen3_dir: Path) -> None:
    body = NORM.replace("def __init__(self, hidden_size, eps=1e-6)", "def __init__(self, hidden_size, eps, more)")
    code, text = _refused(tmp_path, body, qwen3_dir, replace("./package:Norm"))
    assert code == 3
    assert "more" in text


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ("Transpose(0, 1)", "transpose(0, 1): one tensor is wanted, and there are 2"),
        ("Chunk(0)", "chunk(0): one tensor is wanted, and there are 2"),
        ("MergeModulelist(0)", "comes with 'mlp"),
        ("Concatenate(2)", "concatenate(2): no axis 2"),
    ],
)
def test_ops_that_do_not_fit_what_they_are_given(operation: str, said: str, tmp_path: Path, qwen3_dir: Path) -> None:
    body = MLP_PACKAGE.replace("Concatenate(dim=DIM)", operation)
    imports = f"from transformers.core_model_loading import {operation.partition('(')[0]}\n"
    code, text = _refused(tmp_path, imports + body, qwen3_dir, fuse("./package:Fused"))
    assert code == 3, text
    assert said in text
    assert f"{NORM_PATH}.packed" in text
    assert f"{tmp_path / 'recipe.yaml'}:5" in text


def test_a_folder_that_looks_like_a_repository(tmp_path: Path, qwen3_dir: Path) -> None:
    """Without ./ the Hub would be asked for it."""
    write_package(tmp_path / "mine", NORM, "norm")
    with pytest.raises(KconvertError) as caught:
        run_recipe(tmp_path, replace("mine/norm:Norm"), qwen3_dir)
    code, text = failure(caught.value)
    assert code == 3
    assert "'mine/norm' is a folder beside the recipe" in text
    assert "write ./mine/norm:Norm" in text
