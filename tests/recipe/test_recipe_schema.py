"""The rules of recipes: keys, types and combinations, each refused with the line it is about."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kconvert.errors import RecipeError
from kconvert.patterns import PathPattern
from kconvert.recipe import KernelRef, Patch, Recipe, parse_recipe

HEAD = "recipe: 1\nname: qwen3\nmodel_type: [qwen3]\npatches:\n"  # patches start on line 5
REPLACE = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
FUSE = """\
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.norm"}
      - {class: Qwen3MLP, path: "model.layers.*.mlp"}
"""


def read(text: str) -> Recipe:
    return parse_recipe(text, "r.yaml")


def entry(text: str) -> Patch:
    return read(HEAD + text).patches[0]


def fault(text: str, line: int, what: str, fix: str = "") -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        read(text)
    error = caught.value
    assert (error.where, what in error.what, fix in (error.fix or "")) == (f"r.yaml:{line}", True, True), str(error)
    assert "\n" not in str(error)
    return error


def entry_fault(text: str, line: int, what: str, fix: str = "") -> RecipeError:
    """As `fault`, for the text of a patch entry; lines count from the entry's own first line."""
    return fault(HEAD + text, line + 4, what, fix)


def test_the_design_examples() -> None:
    recipe = read(
        """\
recipe: 1
name: qwen3
model_type: [qwen3]                    # what it may be applied to
patches:
  - kernel: [cuda_fused_rmsnorm, npu_fused_rmsnorm, cpu_fused_rmsnorm]     # one layout, best first
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}
  - kernel: ./my-kernel:RMSNormMLP
    trust_remote_code: true
    fuse:
      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}
      - {class: Qwen3MLP,     path: "model.layers.*.mlp"}
"""
    )
    first, second = recipe.patches
    assert [ref.text for ref in first.kernels] == ["cuda_fused_rmsnorm", "npu_fused_rmsnorm", "cpu_fused_rmsnorm"]
    assert first.replace is not None
    assert first.targets == (first.replace,)
    assert first.replace.class_name == "Qwen3RMSNorm"
    assert first.replace.path == PathPattern.parse("model.layers.*.input_layernorm")
    assert (first.line, first.where, first.replace.line, first.replace.where) == (5, "r.yaml:5", 6, "r.yaml:6")
    assert first.fuse is None
    assert second.kernels == (KernelRef("local", "./my-kernel:RMSNormMLP", "./my-kernel", "RMSNormMLP"),)
    assert second.trust_remote_code is True
    assert [target.line for target in second.targets] == [10, 11]
    assert second.replace is None


def test_plain_strings_stand_for_lists() -> None:
    recipe = read(HEAD.replace("[qwen3]", "qwen3") + "  - kernel: cpu_fused_swiglu\n" + REPLACE)
    assert recipe.model_type == ("qwen3",)
    assert recipe.patches[0].kernels == (KernelRef("builtin", "cpu_fused_swiglu", "cpu_fused_swiglu"),)


def test_models_are_frozen() -> None:
    recipe = read(HEAD + "  - kernel: a\n" + REPLACE)
    with pytest.raises(ValidationError):
        recipe.name = "other"  # type: ignore[misc]
    assert hash(recipe) == hash(read(HEAD + "  - kernel: a\n" + REPLACE))


@pytest.mark.parametrize(
    ("text", "kind", "source", "class_name"),
    [
        ("cuda_fused_swiglu", "builtin", "cuda_fused_swiglu", None),
        ("a1", "builtin", "a1", None),
        ("./dir:Norm", "local", "./dir", "Norm"),
        ("../a b/dir:Norm", "local", "../a b/dir", "Norm"),
        ("/abs/d:ir:Norm", "local", "/abs/d:ir", "Norm"),
        (".:Norm", "local", ".", "Norm"),
        ("owner/repo:Norm", "hub", "owner/repo", "Norm"),
        ("kernels-community/liger.kernels_2:_Norm2", "hub", "kernels-community/liger.kernels_2", "_Norm2"),
    ],
)
def test_kernel_kinds(text: str, kind: str, source: str, class_name: str | None) -> None:
    ref = entry(f"  - kernel: '{text}'\n" + REPLACE).kernels[0]
    assert (ref.kind, ref.source, ref.class_name, ref.text) == (kind, source, class_name, text)
    assert ref.is_package is (kind != "builtin")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "neither", "built-in ID"),
        ("CudaSwiglu", "neither", "built-in ID"),
        ("cuda-swiglu", "neither", "built-in ID"),
        ("1cuda", "neither", "built-in ID"),
        ("swiglu:Norm", "neither", "built-in ID"),
        ("a/b/c:Norm", "neither", "built-in ID"),
        ("a/..:Norm", "neither", "built-in ID"),
        ("a/b..c:Norm", "neither", "built-in ID"),
        ("~/dir:Norm", "neither", "built-in ID"),
        (".dir:Norm", "neither", "built-in ID"),
        ("owner/repo", "names no class", "write owner/repo:ClassName"),
        ("./dir", "names no class", "write ./dir:ClassName"),
        ("/abs", "names no class", "write /abs:ClassName"),
        ("owner/repo:", "class name ''", "bare class name"),
        ("owner/repo:1Norm", "class name '1Norm'", "bare class name"),
        ("./dir:a.Norm", "class name 'a.Norm'", "bare class name"),
        ("./dir:class", "class name 'class'", "bare class name"),
        ("./dir:Nörm", "class name 'Nörm'", "bare class name"),
        (" swiglu", "blanks", "built-in ID"),
    ],
)
def test_bad_kernels(text: str, what: str, fix: str) -> None:
    entry_fault(f"  - kernel: '{text}'\n" + REPLACE, 1, what, fix)


def test_bad_kernel_in_a_list_has_the_line_of_its_item() -> None:
    entry_fault("  - kernel:\n      - a\n      - B\n" + REPLACE, 3, "kernel 'B' is neither")


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("[]", "'kernel' is an empty list"),
        ("[a, a]", "'kernel' lists 'a' twice"),
        ("[a, 1]", "'kernel' must be a string or a list of strings, not the number 1"),
        ("[a, [b]]", "not a list"),
        ("{a: b}", "not a mapping"),
        ("true", "not true"),
        ("", "not nothing"),
        ("[a, ./dir:Norm]", "package './dir:Norm' stands in a list"),
        ("[owner/repo:Norm, a]", "package 'owner/repo:Norm' stands in a list"),
        ("[owner/repo:Norm, owner/repo:Other]", "stands in a list"),
    ],
)
def test_bad_kernel_lists(kernel: str, what: str) -> None:
    entry_fault(f"  - kernel: {kernel}\n" + REPLACE, 1, what)


def test_a_package_in_a_list_of_one_stands_alone() -> None:
    assert entry("  - kernel: ['owner/repo:Norm']\n    version: 2\n" + REPLACE).version == 2


@pytest.mark.parametrize(
    ("kernel", "pins", "line", "what"),
    [
        ("owner/repo:N", "version: 1\n    revision: main", 3, "'version' and 'revision' exclude each other"),
        ("[a, b]", "version: 1", 2, "'version' beside a list of kernels"),
        ("[a, b]", "revision: main", 2, "'revision' beside a list of kernels"),
        ("a", "version: 1", 2, "'version' beside the built-in kernel 'a'"),
        ("./d:N", "revision: main", 2, "'revision' beside the local package './d:N'"),
        ("owner/repo:N", "version: 0", 2, "'version' must be 1 or more, not the number 0"),
        ("owner/repo:N", "version: '1'", 2, "'version' must be a whole number, not '1'"),
        ("owner/repo:N", "version: 1.0", 2, "'version' must be a whole number, not '1.0'"),
        ("owner/repo:N", "version: true", 2, "'version' must be a whole number, not true"),
        ("owner/repo:N", "version:", 2, "'version' has no value"),
        ("owner/repo:N", "revision: 1234567", 2, "'revision' must be a string, not the number 1234567"),
        ("owner/repo:N", "revision: ''", 2, "revision '' is empty"),
        ("owner/repo:N", "revision: a b", 2, "holds blanks"),
        ("owner/repo:N", "revision: [main]", 2, "'revision' must be a string, not a list"),
    ],
)
def test_version_and_revision(kernel: str, pins: str, line: int, what: str) -> None:
    entry_fault(f"  - kernel: {kernel}\n    {pins}\n" + REPLACE, line, what)


@pytest.mark.parametrize("revision", ["main", "v1.0", "1.0", "0123456", "refs/pr/3"])
def test_revisions_stay_as_written(revision: str) -> None:
    assert entry(f"  - kernel: owner/repo:N\n    revision: {revision}\n" + REPLACE).revision == revision


@pytest.mark.parametrize("kernel", ["a", "[a, b]"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_trust_is_for_packages(kernel: str, value: str) -> None:
    text = f"  - kernel: {kernel}\n" + REPLACE + f"    trust_remote_code: {value}\n"
    entry_fault(text, 3, "only built-in kernels", "remove it")


@pytest.mark.parametrize("value", ["yes", "on", "True", "1", "'true'"])
def test_trust_takes_true_or_false_only(value: str) -> None:
    text = f"  - kernel: ./d:N\n    trust_remote_code: {value}\n" + REPLACE
    entry_fault(text, 2, "'trust_remote_code' must be true or false", "lower case")


@pytest.mark.parametrize("value", [True, False])
def test_trust_on_a_package(value: bool) -> None:
    assert (
        entry(f"  - kernel: ./d:N\n    trust_remote_code: {str(value).lower()}\n" + REPLACE).trust_remote_code is value
    )
    assert entry("  - kernel: ./d:N\n" + REPLACE).trust_remote_code is False


def test_replace_or_fuse() -> None:
    entry_fault("  - kernel: a\n" + REPLACE + FUSE, 3, "'replace' and 'fuse' exclude each other")
    entry_fault("  - kernel: a\n", 1, "names no modules", "add 'replace'")
    entry_fault("  - kernel: a\n    replace:\n", 2, "'replace' has no value", "indented deeper")


def fuse(*paths: str) -> str:
    return "  - kernel: a\n    fuse:\n" + "".join(f"      - class: C\n        path: '{path}'\n" for path in paths)


@pytest.mark.parametrize(
    ("paths", "line", "what"),
    [
        (("model.layers.*.mlp",), 2, "'fuse' needs two targets or more, not 1"),
        ((), 2, "has no value"),
        (("a.*.x", "b.*.y"), 6, "fused path 'b.*.y' has another parent than 'a.*.x'"),
        (("a.*.x", "a.{0-3}.y"), 6, "another parent"),
        (("a.x", "a.b.y"), 6, "another parent"),
        (("a.x", "a.y", "a.x"), 8, "fused path 'a.x' appears twice"),
        (("a.x", "a.*"), 6, "does not end in a literal name"),
        (("a.{0,1}", "a.y"), 4, "does not end in a literal name"),
    ],
)
def test_fused_paths(paths: tuple[str, ...], line: int, what: str) -> None:
    entry_fault(fuse(*paths), line, what)


def test_good_fusions() -> None:
    patch = entry(fuse("a.{0-1,2}.x", "a.{0-2}.y", "a.{2,0-1}.z"))
    assert patch.fuse is not None
    assert [target.path.last for target in patch.fuse] == ["x", "y", "z"]
    assert len(entry(fuse("norm", "mlp")).targets) == 2


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("{class: Qwen3-MLP, path: a}", "class name 'Qwen3-MLP'"),
        ("{class: transformers.Qwen3MLP, path: a}", "no Python identifier"),
        ("{class: 3, path: a}", "'class' must be a string, not the number 3"),
        ("{class: C, path: 3}", "'path' must be a string, not the number 3"),
        ("{class: C, path: [a]}", "'path' must be a string, not a list"),
        ("{class: C, path: ''}", "path pattern '' is empty"),
        ("{class: C, path: a..b}", "segment '' is not literal"),
        ("{class: C, path: 'a.**.b'}", "segment '**' is not literal"),
        ("{class: C, path: 'a.{3-1}.b'}", "runs backwards"),
        ("{class: C}", "key 'path' is missing from a target"),
        ("{path: a}", "key 'class' is missing from a target"),
        ("{class: C, path: a, kernel: b}", "key 'kernel' belongs to a patch entry, not to a target"),
        ("{clas: C, path: a}", "unknown key 'clas' in a target"),
        ("[{class: C, path: a}]", "'replace' must be a mapping, not a list"),
        ("C", "'replace' must be a mapping, not 'C'"),
    ],
)
def test_bad_targets(target: str, what: str) -> None:
    error = entry_fault(f"  - kernel: a\n    replace: {target}\n", 2, what)
    assert "more problem" not in str(error)


def test_fuse_must_be_a_list_of_mappings() -> None:
    entry_fault("  - kernel: a\n    fuse: {class: C, path: a}\n", 2, "'fuse' must be a list, not a mapping")
    entry_fault("  - kernel: a\n    fuse:\n      - a\n      - b\n", 3, "item 1 of 'fuse' must be a mapping, not 'a'")


def test_unknown_keys_get_near_misses_and_the_list() -> None:
    error = entry_fault(
        "  - kernals: a\n" + REPLACE, 1, "unknown key 'kernals' in a patch entry", "did you mean 'kernel'? "
    )
    assert "known keys: kernel, for, replace, fuse, version, revision, dtype, optional, trust_remote_code" in (
        error.fix or ""
    )
    assert "more problem" not in str(error), "the missing `kernel` follows from the misspelling"
    later = "  - replace: {class: C, path: a}\n    KERNEL: a\n"
    entry_fault(later, 2, "unknown key 'KERNEL'", "did you mean 'kernel'?")
    fault(HEAD.replace("model_type", "model-type") + "  - kernel: a\n" + REPLACE, 3, "'model-type'", "'model_type'")
    far = entry_fault("  - kernel: a\n    group_0: b\n" + REPLACE, 2, "unknown key 'group_0'", "known keys: kernel")
    assert "did you mean" not in str(far)


def test_internal_fields_are_no_keys() -> None:
    for key in ("line", "where", "_line", "kernels", "targets"):
        entry_fault(f"  - kernel: a\n    {key}: 3\n" + REPLACE, 2, f"unknown key '{key}'")
    for key in ("text", "where"):
        fault(f"{key}: x\n" + HEAD + "  - kernel: a\n" + REPLACE, 1, f"unknown key '{key}' in the recipe")
    fault("path: x\n" + HEAD + "  - kernel: a\n" + REPLACE, 1, "key 'path' belongs to a target")
    entry_fault("  - kernel: a\n    replace: {class_name: C, path: a}\n", 2, "unknown key 'class_name' in a target")


def test_bake() -> None:
    patch = "  - kernel: a\n" + REPLACE
    assert (read(HEAD + patch).bake, read("bake: true\n" + HEAD + patch).bake) == (False, True)
    alone = read("bake: true\n" + HEAD.replace("patches:\n", "patches: []\n"))
    assert (alone.bake, alone.patches) == (True, ())
    for text in ("", "bake: false\n"):
        lines = text.count("\n")
        fault(
            text + HEAD.replace("patches:\n", "patches: []\n"), 4 + lines, "'patches' is an empty list", "or bake: true"
        )
    fault("bake: 1\n" + HEAD + patch, 1, "'bake' must be true or false, not the number 1")
    entry_fault("  - kernel: a\n    bake: true\n" + REPLACE, 2, "'bake' belongs to the recipe")


def test_optional() -> None:
    assert entry("  - kernel: a\n" + REPLACE).optional is False
    assert entry("  - kernel: a\n    optional: true\n" + REPLACE).optional is True
    entry_fault('  - kernel: a\n    optional: "yes"\n' + REPLACE, 2, "'optional' must be true or false")


def test_keys_at_the_wrong_level() -> None:
    error = entry_fault(
        "  - kernel: a\n    class: C\n    path: b\n", 2, "'class' belongs to a target, not to a patch entry"
    )
    assert "(and 1 more problem)" in error.what
    assert error.fix == "move it into 'replace' or into an item of 'fuse'"
    entry_fault("  - kernel: a\n    model_type: b\n" + REPLACE, 2, "'model_type' belongs to the recipe", "top level")
    fault("kernel: a\n" + HEAD + "  - kernel: a\n" + REPLACE, 1, "'kernel' belongs to a patch entry", "'patches'")


def test_patches_at_the_wrong_shape() -> None:
    fault(
        HEAD + "  kernel: a\n" + REPLACE[2:], 4, "'patches' must be a list, not a mapping", "start each item with '- '"
    )
    fault(HEAD, 4, "'patches' has no value")
    fault(HEAD.replace("patches:", "patches: []"), 4, "'patches' is an empty list", "- kernel:")
    fault(HEAD.replace("patches:", "patches: a"), 4, "'patches' must be a list, not 'a'")
    fault(
        HEAD + "  - a\n",
        5,
        "item 1 of 'patches' must be a mapping, not 'a'",
        "keys of a patch entry: kernel, for, replace",
    )
    fault(HEAD + "  -\n", 5, "item 1 of 'patches' has no value")


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("recipe: 1", "recipe: 2", 1, "'recipe' must be the version 1, not the number 2"),
        ("recipe: 1", "recipe: true", 1, "'recipe' must be the version 1, not true"),
        ("recipe: 1", "recipe: '1'", 1, "'recipe' must be the version 1, not '1'"),
        ("recipe: 1", "recipe: 1.0", 1, "'recipe' must be the version 1, not '1.0'"),
        ("recipe: 1\n", "", 1, "key 'recipe' is missing from the recipe"),
        ("name: qwen3\n", "", 1, "key 'name' is missing from the recipe"),
        ("name: qwen3", "name:", 2, "'name' has no value"),
        ("name: qwen3", "name: a/b", 2, "name 'a/b' is no simple name"),
        ("name: qwen3", "name: ..", 2, "name '..' is no simple name"),
        ("name: qwen3", "name: ''", 2, "name '' is no simple name"),
        ("name: qwen3", "name: |\n  qwen3", 2, r"name 'qwen3\n' is no simple name"),
        ("name: qwen3", "name: qwén", 2, "no simple name"),
        ("model_type: [qwen3]", "model_type: []", 3, "'model_type' is an empty list"),
        ("model_type: [qwen3]", "model_type: [a, a]", 3, "'model_type' lists 'a' twice"),
        ("model_type: [qwen3]", "model_type: [3]", 3, "not the number 3"),
        ("model_type: [qwen3]", "model_type:\n  - a\n  - b c", 5, "model type 'b c' is no simple name"),
        ("model_type: [qwen3]", "model_type:", 3, "not nothing"),
        ("model_type: [qwen3]", "model_type: ''", 3, "model type '' is no simple name"),
    ],
)
def test_top_level(old: str, new: str, line: int, what: str) -> None:
    assert old in HEAD
    fault(HEAD.replace(old, new) + "  - kernel: a\n" + REPLACE, line, what)


def test_the_root_must_be_a_mapping() -> None:
    fault("- a\n", 1, "the recipe must be a mapping, not a list", "keys of the recipe: recipe, name")
    fault("\n\nqwen3\n", 3, "the recipe must be a mapping, not 'qwen3'")


def test_the_first_problem_by_line_wins() -> None:
    text = HEAD.replace("name: qwen3", "name: a/b") + "  - kernel: B\n    nope: 1\n" + REPLACE
    error = fault(text, 2, "name 'a/b'")
    assert "(and 2 more problems)" in error.what


def test_missing_keys_of_blocks_point_to_their_key() -> None:
    fault(HEAD + "  - kernel: a\n    replace:\n      class: C\n", 6, "key 'path' is missing", 'add `path: "model')


def test_python_callers_get_the_same_rules() -> None:
    ok = Patch.model_validate({"kernel": ["a", "b"], "replace": {"class": "C", "path": "a.*"}})
    assert (ok.line, ok.where, len(ok.kernels)) == (0, "recipe", 2)
    with pytest.raises(ValidationError, match="names no modules"):
        Patch.model_validate({"kernel": "a"})
