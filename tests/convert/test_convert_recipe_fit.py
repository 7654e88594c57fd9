"""Recipes that do not fit: each is an error of the recipe, with file and line, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconvert.convert.resolve import resolve_recipe
from kconvert.errors import RecipeError, UnknownKernelError
from kconvert.kernels.specs import kernel_specs
from kconvert.recipe import parse_recipe
from tests.support import check_refused, convert, qwen3_config, qwen3_tensors, write_checkpoint, write_recipe

MLP = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
SWIGLU = "  - kernel: cpu_fused_swiglu\n"
RMSNORM = "  - kernel: cpu_fused_rmsnorm\n"


def expect_refused(
    source: Path,
    tmp_path: Path,
    patches: str,
    line: int,
    *words: str,
    error: type[RecipeError] = RecipeError,
    **kw: bool,
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", patches)
    for model_check in (True, False) if not kw else (kw["model_check"],):
        found = check_refused(error, 3, words, recipe, source, tmp_path / "out", model_check=model_check)
        assert found.where == f"{recipe}:{line}"


def test_no_match(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = SWIGLU + '    replace: {class: Qwen3MLP, path: "model.layers.*.mpl"}\n'
    words = ["path pattern 'model.layers.*.mpl' matches no module", "did you mean", "model.layers.*.mlp"]
    expect_refused(qwen3_dir, tmp_path, patches, 6, *words)


@pytest.mark.parametrize("path", ["model.layers.mlp", "model.layers.*", "layers.*.mlp", "model.layers.{2-9}.mlp"])
def test_no_match_of_a_whole_path(qwen3_dir: Path, tmp_path: Path, path: str) -> None:
    patches = SWIGLU + f'    replace: {{class: Qwen3MLP, path: "{path}"}}\n'
    recipe = write_recipe(tmp_path / "r.yaml", patches)
    check_refused(RecipeError, 3, ["r.yaml:6"], recipe, qwen3_dir, tmp_path / "out")


def test_another_class(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = SWIGLU + '    replace: {class: LlamaMLP, path: "model.layers.*.mlp"}\n'
    words = ["'model.layers.0.mlp' is a Qwen3MLP, the recipe names LlamaMLP"]
    expect_refused(qwen3_dir, tmp_path, patches, 6, *words, model_check=True)


def test_a_module_taken_twice(qwen3_dir: Path, tmp_path: Path) -> None:
    second = SWIGLU + '    replace: {class: Qwen3MLP, path: "model.layers.{1}.mlp"}\n'
    words = ["'model.layers.1.mlp' is already taken by the entry at", "r.yaml:5"]
    expect_refused(qwen3_dir, tmp_path, SWIGLU + MLP + second, 7, *words)


@pytest.mark.parametrize("turned", [False, True])
def test_a_module_and_a_part_of_it(qwen3_dir: Path, tmp_path: Path, turned: bool) -> None:
    patches = [
        SWIGLU + '    replace: {class: Qwen3Attention, path: "model.layers.*.self_attn"}\n',
        RMSNORM + '    replace: {class: Qwen3RMSNorm, path: "model.layers.*.self_attn.q_norm"}\n',
    ]
    part, whole = (5, 7) if turned else (7, 5)
    words = ["'model.layers.0.self_attn.q_norm' is already taken by the entry at", f"r.yaml:{whole};"]
    expect_refused(qwen3_dir, tmp_path, "".join(patches[::-1] if turned else patches), part, *words)


def test_a_fusion_and_a_replacement_of_one_of_its_modules(qwen3_dir: Path, tmp_path: Path) -> None:
    fuse = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
    expect_refused(
        qwen3_dir, tmp_path, fuse + SWIGLU + MLP, 9, "'model.layers.0.mlp' is already taken by the entry at", "r.yaml:5"
    )


def test_a_fused_sibling_that_is_missing(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.{0-1}.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.{0-1}.mpl"}
"""
    expect_refused(qwen3_dir, tmp_path, patches, 8, "'model.layers.{0-1}.mpl' matches no module")


def test_a_parent_with_only_one_of_the_two(tmp_path: Path) -> None:
    """Layer 1 has no MLP of its own, as where dense and expert layers are mixed."""
    tensors = {name: tensor for name, tensor in qwen3_tensors().items() if "layers.1.mlp." not in name}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    words = ["'model.layers.1.post_attention_layernorm' has no sibling for 'model.layers.*.mlp'", "{0-3}"]
    recipe = "qwen3-fused-norm-mlp"
    check_refused(RecipeError, 3, words, recipe, source, tmp_path / "out", model_check=False)


def test_kernels_of_different_layouts(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = "  - kernel: [cpu_fused_swiglu, cpu_fused_rmsnorm]\n" + MLP
    words = ["different layouts", "cpu_fused_swiglu has gated_mlp", "cpu_fused_rmsnorm has rms_norm"]
    expect_refused(qwen3_dir, tmp_path, patches, 5, *words)


def test_too_few_and_too_many_modules(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = "  - kernel: cpu_fused_rmsnorm_swiglu\n" + MLP
    expect_refused(
        qwen3_dir, tmp_path, patches, 5, "takes 2 modules, the entry names 1", "use fuse: with 2 modules (norm, mlp)"
    )
    patches = (
        SWIGLU
        + """\
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""
    )
    expect_refused(qwen3_dir, tmp_path, patches, 5, "takes 1 modules, the entry names 2", "use replace:")


@pytest.mark.parametrize(
    ("kernel", "near"),
    [
        ("cpu_fused_swigl", "cpu_fused_swiglu"),
        ("cpu_fused_rms_norm", "cpu_fused_rmsnorm"),
        ("xyz", "`kconvert list-kernels`"),
    ],
)
def test_an_unknown_kernel(qwen3_dir: Path, tmp_path: Path, kernel: str, near: str) -> None:
    words = [f"unknown kernel {kernel!r}", near]
    expect_refused(qwen3_dir, tmp_path, f"  - kernel: {kernel}\n{MLP}", 5, *words, error=UnknownKernelError)
    listed = f"  - kernel: [cpu_fused_swiglu, {kernel}]\n{MLP}"
    expect_refused(qwen3_dir, tmp_path, listed, 5, *words, error=UnknownKernelError)


def test_another_model_type(qwen3_dir: Path, llama_dir: Path, tmp_path: Path) -> None:
    for recipe, source, kind in (("llama", qwen3_dir, "qwen3"), ("qwen3", llama_dir, "llama")):
        words = [f"recipe {recipe!r} is for model type {recipe}", f"is {kind}"]
        for model_check in (True, False):
            check_refused(RecipeError, 3, words, recipe, source, tmp_path / "out", model_check=model_check)


def test_no_such_recipe(qwen3_dir: Path, tmp_path: Path) -> None:
    check_refused(RecipeError, 3, ["'qwen4'", "did you mean 'qwen3'"], "qwen4", qwen3_dir, tmp_path / "out")


def test_a_layout_that_does_not_fit_the_class(qwen3_dir: Path, tmp_path: Path) -> None:
    """A norm layout on an MLP: the recipe is wrong, and not the checkpoint."""
    patches = RMSNORM + MLP
    recipe = write_recipe(tmp_path / "r.yaml", patches)
    for model_check in (True, False):
        words = [f"{recipe}:5", "layout 'rms_norm' does not fit 'model.layers.0.mlp'"]
        check_refused(RecipeError, 3, words, recipe, qwen3_dir, tmp_path / "out", model_check=model_check)


@pytest.mark.parametrize(
    ("kernel", "name", "path", "layout"),
    [
        ("cpu_fused_swiglu", "Qwen3Attention", "model.layers.*.self_attn", "gated_mlp"),
        ("cpu_fused_swiglu", "Qwen3RMSNorm", "model.norm", "gated_mlp"),
        ("cpu_fused_rmsnorm", "Qwen3Attention", "model.layers.*.self_attn", "rms_norm"),
    ],
)
def test_a_kernel_for_another_kind_of_module(
    qwen3_dir: Path, tmp_path: Path, kernel: str, name: str, path: str, layout: str
) -> None:
    """In the second entry, after one that fits: file and line are those of the entry at fault."""
    patches = f'{SWIGLU}{MLP}  - kernel: {kernel}\n    replace: {{class: {name}, path: "{path}"}}\n'
    expect_refused(qwen3_dir, tmp_path, patches, 7, f"layout {layout!r} does not fit {path.replace('*', '0')!r}")


def test_a_fusion_with_its_modules_swapped(qwen3_dir: Path, tmp_path: Path) -> None:
    patches = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
"""
    words = ["layout 'norm_gated_mlp' does not fit 'model.layers.0.mlp' and 'model.layers.0.post_attention_layernorm'"]
    expect_refused(qwen3_dir, tmp_path, patches, 5, *words)


@pytest.mark.parametrize(
    ("numbers", "absent", "there"),
    [("{0-2}", 2, "0, 1"), ("{1,7}", 7, "1"), ("{0-1,3-5}", 3, "0, 1"), ("{0-999999999}", 2, "0, 1")],
)
def test_a_number_that_no_module_has(qwen3_dir: Path, tmp_path: Path, numbers: str, absent: int, there: str) -> None:
    path = f"model.layers.{numbers}.mlp"
    patches = SWIGLU + f'    replace: {{class: Qwen3MLP, path: "{path}"}}\n'
    words = [f"path pattern {path!r} names {absent}, and no module is there", f"the numbers that match are {there}"]
    expect_refused(qwen3_dir, tmp_path, patches, 6, *words)


def test_a_number_that_only_one_of_two_fused_modules_has(tmp_path: Path) -> None:
    """Layer 1 has no MLP of its own: the set of the MLP is at fault, on its own line."""
    tensors = {name: tensor for name, tensor in qwen3_tensors().items() if "layers.1.mlp." not in name}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    patches = """\
  - kernel: cpu_fused_rmsnorm_swiglu
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.{0-1}.post_attention_layernorm"}
      - {class: Qwen3MLP, path: "model.layers.{0-1}.mlp"}
"""
    words = ["path pattern 'model.layers.{0-1}.mlp' names 1, and no module is there"]
    expect_refused(source, tmp_path, patches, 8, *words, model_check=False)


def test_a_number_set_that_is_all_there(qwen3_dir: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml", SWIGLU + '    replace: {class: Qwen3MLP, path: "model.layers.{1,0-1}.mlp"}\n'
    )
    for number, model_check in enumerate((True, False)):
        result = convert(recipe, qwen3_dir, tmp_path / f"out{number}", model_check=model_check)
        assert [claim.paths for claim in result.prepared.plan.claims] == [
            ("model.layers.0.mlp",),
            ("model.layers.1.mlp",),
        ]


def test_every_built_in_kernel_resolves_to_its_layout() -> None:
    for kernel_id, (spec, _) in kernel_specs().items():
        target = '{class: A, path: "x.a"}'
        fuse = f"    fuse: [{', '.join(f'{{class: A, path: x.a{n}}}' for n in range(len(spec.members)))}]\n"
        text = f"  - kernel: {kernel_id}\n" + (fuse if spec.is_fusion else f"    replace: {target}\n")
        (entry,) = resolve_recipe(
            parse_recipe(f"recipe: 1\nname: t\nmodel_type: t\npatches:\n{text}", "r.yaml")
        ).entries
        assert (entry.kernels, entry.layout.name, entry.layout.version) == ((kernel_id,), spec.name, spec.version)
        assert entry.kind == ("fuse" if spec.is_fusion else "replace")
        assert entry.changes_parameters is spec.changes_parameters
