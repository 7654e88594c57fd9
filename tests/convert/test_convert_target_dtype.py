"""`dtype` of a patch entry: what it joins is stored in that dtype, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kconvert import load_converted
from kconvert.cli import main
from kconvert.convert import build_job, prepare
from kconvert.errors import CheckpointError, RecipeError
from kconvert.manifest import load_manifest
from kconvert.names import SINGLE_NAME
from kconvert.recipe import Patch, parse_recipe
from tests.packages.helpers import CUSTOM, FUSED, copy_example
from tests.runtime.pairs import logits
from tests.support import (
    RawTensor,
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    save_tiny,
    write_checkpoint,
    write_recipe,
)

GATE, UP = "model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"
DOWN, PACKED = "model.layers.{}.mlp.down_proj.weight", "model.layers.{}.mlp.gate_up_proj.weight"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in TORCH.items()}
TARGET = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'


def mlp_recipe(folder: Path, dtype: str | None, *, kernel: str = "cpu_fused_swiglu", target: str = TARGET) -> Path:
    key = f"    dtype: {dtype}\n" if dtype is not None else ""
    return write_recipe(folder / "r.yaml", f"  - kernel: {kernel}\n{key}{target}")


def mixed_tensors(gate: str, up: str) -> dict[str, torch.Tensor]:
    """The tensors of a Qwen3 in random values, layer 1 with a gate and an up of these dtypes."""
    torch.manual_seed(5)
    tensors = {name: torch.randn(tensor.shape) for name, tensor in qwen3_tensors().items()}
    tensors[GATE.format(1)] = tensors[GATE.format(1)].to(TORCH[gate])
    tensors[UP.format(1)] = tensors[UP.format(1)].double().mul(1.000000123).to(TORCH[up])
    return tensors


# --- the recipe -------------------------------------------------------------------------------------------


def entry(text: str) -> Patch:
    head = "recipe: 1\nname: test\nmodel_type: [qwen3]\npatches:\n"
    return parse_recipe(f"{head}  - kernel: cpu_fused_swiglu\n{text}{TARGET}", "r.yaml").patches[0]


@pytest.mark.parametrize(("word", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_the_three_words(word: str, stored: str) -> None:
    assert entry(f"    dtype: {word}\n").dtype == stored
    assert entry("").dtype is None


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("    dtype: bfloat\n", 6, "unknown dtype 'bfloat'", "did you mean bfloat16"),
        ("    dtype: bf16\n", 6, "unknown dtype 'bf16'", "did you mean bfloat16"),
        ("    dtype: BFloat16\n", 6, "unknown dtype 'BFloat16'", "did you mean bfloat16"),
        ("    dtype: float8_e4m3fn\n", 6, "unknown dtype 'float8_e4m3fn'", "known dtypes: bfloat16, float16, float32"),
        ("    dtype: int\n", 6, "unknown dtype 'int'", "known dtypes: bfloat16, float16, float32"),
        ("    dtype: ''\n", 6, "unknown dtype ''", "known dtypes: bfloat16, float16, float32"),
        ("    dtype: 16\n", 6, "'dtype' must be a string, not the number 16", "quote it"),
        ("    dtype: [bfloat16]\n", 6, "'dtype' must be a string, not a list", "write a string"),
        ("    dtype:\n", 6, "'dtype' has no value", "give it a value"),
        ("    dytpe: bfloat16\n", 6, "unknown key 'dytpe' in a patch entry", "did you mean 'dtype'"),
    ],
)
def test_other_words(text: str, line: int, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        entry(text)
    assert (caught.value.where, what in caught.value.what, fix in str(caught.value.fix)) == (
        f"r.yaml:{line}",
        True,
        True,
    ), str(caught.value)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("top level", "dtype: bfloat16\n"),
        ("target", '    replace: {class: Qwen3MLP, path: "a.mlp", dtype: bfloat16}\n'),
    ],
)
def test_another_place(place: str, text: str) -> None:
    head = "recipe: 1\nname: test\nmodel_type: [qwen3]\n"
    whole = (
        f"{head}{text}patches:\n  - kernel: a\n{TARGET}"
        if place == "top level"
        else f"{head}patches:\n  - kernel: a\n{text}"
    )
    with pytest.raises(RecipeError, match="key 'dtype' belongs to a patch entry"):
        parse_recipe(whole, "r.yaml")


@pytest.mark.parametrize("model_check", [True, False])
def test_a_layout_that_joins_nothing(qwen3_dir: Path, tmp_path: Path, model_check: bool) -> None:
    target = '    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'
    recipe = mlp_recipe(tmp_path, "bfloat16", kernel="cpu_fused_rmsnorm", target=target)
    words = ["r.yaml:5: 'dtype' beside layout 'rms_norm', which joins no tensors; remove 'dtype'"]
    check_refused(RecipeError, 3, words, recipe, qwen3_dir, tmp_path / "out", model_check=model_check)


def test_a_package_that_joins_nothing(qwen3_dir: Path, tmp_path: Path) -> None:
    target = '    trust_remote_code: true\n    replace: {class: Qwen3RMSNorm, path: "model.norm"}\n'
    copy_example("custom_rms_norm", tmp_path)
    recipe = mlp_recipe(tmp_path, "bfloat16", kernel=CUSTOM, target=target)
    words = ["r.yaml:5: 'dtype' beside layout 'CustomRMSNormLayout', which joins no tensors"]
    check_refused(RecipeError, 3, words, recipe, qwen3_dir, tmp_path / "out", trust_remote_code=True)


# --- what is written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize("word", DTYPES)
@pytest.mark.parametrize(("gate", "up"), [("BF16", "F32"), ("F16", "BF16"), ("F64", "F16"), ("F32", "F32")])
def test_parts_are_converted_and_the_rest_is_as_it_was(
    tmp_path: Path, gate: str, up: str, word: str, model_check: bool
) -> None:
    """B13."""
    tensors = mixed_tensors(gate, up)
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    result = convert(mlp_recipe(tmp_path, word), source, tmp_path / "out", model_check=model_check)
    written = load_file(result.output / SINGLE_NAME)
    for layer in (0, 1):
        expected = torch.cat([tensors[name.format(layer)].to(DTYPES[word]) for name in (GATE, UP)])
        assert raw(written[PACKED.format(layer)]) == raw(expected)
    untouched = [name for name in tensors if "gate_proj" not in name and "up_proj" not in name]
    assert {name: raw(written[name]) for name in untouched} == {name: raw(tensors[name]) for name in untouched}
    records = load_manifest(result.output).tensors_by_target()
    record = records[PACKED.format(1)]
    assert (record.dtype, record.shape) == (NAMES[DTYPES[word]], (24, 8))
    assert [(part.source, part.shape) for part in record.parts] == [(GATE.format(1), (12, 8)), (UP.format(1), (12, 8))]
    assert [(origin.file_name, origin.dtype) for origin in record.origins] == [
        (GATE.format(1), gate),
        (UP.format(1), up),
    ]
    assert [origin.dtype for origin in records[DOWN.format(1)].origins] == [records[DOWN.format(1)].dtype] == ["F32"]


def test_a_mixed_group_without_dtype_names_the_key(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", mixed_tensors("BF16", "F32"), qwen3_config())
    words = [f"{PACKED.format(1)!r} would join different dtypes", "with `dtype:` in the patch entry"]
    check_refused(CheckpointError, 4, words, mlp_recipe(tmp_path, None), source, tmp_path / "out")


@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "U8", "F4", "BOOL"])
def test_a_part_that_is_no_float(tmp_path: Path, dtype: str, model_check: bool) -> None:
    """Named, also where both parts are of the one dtype."""
    data = bytes(96 * {"F8_E4M3": 8, "I32": 32, "U8": 8, "F4": 4, "BOOL": 8}[dtype] // 8)
    narrow = RawTensor(dtype, (12, 8), data)
    for number, names in enumerate(([UP.format(0)], [GATE.format(0), UP.format(0)])):
        tensors: dict[str, torch.Tensor | RawTensor] = {**qwen3_tensors(), **dict.fromkeys(names, narrow)}
        source = write_checkpoint(tmp_path / f"in{number}", tensors, qwen3_config())
        recipe = mlp_recipe(tmp_path, "float32")
        words = [f"{names[0]!r} is {dtype}, which cannot be stored as F32", "r.yaml:5"]
        check_refused(CheckpointError, 4, words, recipe, source, tmp_path / "out", model_check=model_check)
    words = ["would join different dtypes", "store the group in one dtype"]
    check_refused(CheckpointError, 4, words, mlp_recipe(tmp_path, None), tmp_path / "in0", tmp_path / "out")


def test_biases_are_converted_with_their_weights(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "in", "llama", mlp_bias=True)
    target = '    replace: {class: LlamaMLP, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(
        tmp_path / "r.yaml", f"  - kernel: cpu_fused_swiglu\n    dtype: float16\n{target}", model_type="llama"
    )
    written = load_file(convert(recipe, source, tmp_path / "out").output / SINGLE_NAME)
    stock = load_file(source / "model.safetensors")
    for kind in ("weight", "bias"):
        names = [f"model.layers.1.mlp.{name}.{kind}" for name in ("gate_proj", "up_proj")]
        expected = torch.cat([stock[name].half() for name in names])
        assert raw(written[f"model.layers.1.mlp.gate_up_proj.{kind}"]) == raw(expected)
        assert written[f"model.layers.1.mlp.down_proj.{kind}"].dtype == torch.float32


def test_a_package_may_name_one_too(tmp_path: Path) -> None:
    tensors = mixed_tensors("BF16", "F32")
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config())
    fused = (
        "    trust_remote_code: true\n    fuse:\n"
        '      - {class: Qwen3RMSNorm, path: "model.layers.*.post_attention_layernorm"}\n'
        '      - {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    )
    copy_example("norm_mlp", tmp_path)
    recipe = mlp_recipe(tmp_path, "bfloat16", kernel=FUSED, target=fused)
    output = convert(recipe, source, tmp_path / "out", trust_remote_code=True).output
    joined = {name: tensor for name, tensor in load_file(output / SINGLE_NAME).items() if tensor.dtype != torch.float32}
    expected = torch.cat([tensors[name.format(1)].bfloat16() for name in (GATE, UP)])
    assert len(joined) == 2
    assert any(torch.equal(tensor, expected) for tensor in joined.values())


def test_sharded_and_single_sources_give_the_same(tmp_path: Path) -> None:
    tensors = mixed_tensors("F64", "BF16")
    names = list(tensors)
    flat = write_checkpoint(tmp_path / "flat", tensors, qwen3_config())
    cut = names.index(UP.format(1))
    shards = write_checkpoint(tmp_path / "shards", tensors, qwen3_config(), [names[:cut], names[cut:]])
    recipe = mlp_recipe(tmp_path, "float16")
    one, two = (convert(recipe, source, tmp_path / f"{source.name}-out").output for source in (flat, shards))
    assert read_raw(one) == read_raw(two)
    total = json.loads((two / "model.safetensors.index.kconvert.json").read_text())["metadata"]["total_size"]
    assert total == sum(len(tensor.data) for tensor in read_raw(two).values())


def test_sums_count_the_bytes_that_are_written(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", mixed_tensors("BF16", "F32"), qwen3_config())
    recipe = mlp_recipe(tmp_path, "bfloat16")
    seen: list[int] = []
    result = convert(recipe, source, tmp_path / "out", on_progress=seen.append)
    assert result.bytes_transformed == 2 * 24 * 8 * 2
    assert result.bytes_copied + result.bytes_transformed == sum(len(t.data) for t in read_raw(result.output).values())
    on_disk = sum(path.stat().st_size for path in result.output.rglob("*.safetensors"))
    assert sum(seen) == build_job(result.prepared.opened, result.prepared.plan).size_bytes == on_disk


# --- what is said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "up", "word", "rounded"),
    [
        ("BF16", "F32", "bfloat16", ["3 tensors are rounded from F32 to BF16"]),
        ("BF16", "F32", "float32", []),
        ("F16", "BF16", "float32", []),
        ("F64", "F32", "float32", ["1 tensor is rounded from F64 to F32"]),
        ("F16", "BF16", "float16", ["2 tensors are rounded from F32 to F16", "1 tensor is rounded from BF16 to F16"]),
        ("F16", "BF16", "bfloat16", ["2 tensors are rounded from F32 to BF16", "1 tensor is rounded from F16 to BF16"]),
    ],
)  # fmt: skip
def test_rounding_is_warned_of(tmp_path: Path, gate: str, up: str, word: str, rounded: list[str]) -> None:
    source = write_checkpoint(tmp_path / "in", mixed_tensors(gate, up), qwen3_config())
    recipe = mlp_recipe(tmp_path, word)
    for model_check in (True, False):
        warnings = prepare(str(recipe), source, model_check=model_check).warnings
        assert list(warnings) == [f"{text}, the dtype of the entry at {recipe}:5" for text in rounded]


def test_the_command_line_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "in", mixed_tensors("BF16", "F32"), qwen3_config())
    recipe = mlp_recipe(tmp_path, "bfloat16")
    assert main(["plan", str(recipe), str(source), "--no-model-check"]) == 0
    shown = capsys.readouterr()
    assert "      = model.layers.*.mlp.gate_proj.weight\n" in shown.out
    assert "      + model.layers.*.mlp.up_proj.weight, F32 as BF16\n" in shown.out
    assert "      = model.layers.*.mlp.gate_proj.weight, F32 as BF16\n" in shown.out
    assert "warning: 3 tensors are rounded from F32 to BF16" in shown.err
    assert main(["plan", str(recipe), str(source), "--no-model-check", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    (tensor,) = [item for item in value["tensors"] if item["target"] == PACKED.format(1)]
    assert tensor["dtype"] == "BF16"
    assert [origin["dtype"] for origin in tensor["origins"]] == ["BF16", "F32"]
    assert main(["apply", str(recipe), str(source), "-o", str(tmp_path / "out")]) == 0
    assert "warning: 3 tensors are rounded from F32 to BF16" in capsys.readouterr().err


# --- what it loads as -------------------------------------------------------------------------------------


def test_it_loads_and_computes_as_stock_with_the_same_rounding(tmp_path: Path) -> None:
    """The mixed group rounded in the stock checkpoint, read by stock transformers, gives the reference's logits."""
    stock_dir = save_tiny(tmp_path / "stock", "qwen3", dtype=torch.bfloat16)
    tensors: dict[str, Any] = load_file(stock_dir / "model.safetensors")
    wide = dict(tensors)
    wide[UP.format(1)] = tensors[UP.format(1)].float() * (1 + 2**-12)
    config = json.loads((stock_dir / "config.json").read_text())
    source = write_checkpoint(tmp_path / "in", wide, config)
    rounded = {**wide, UP.format(1): wide[UP.format(1)].bfloat16()}
    expected_dir = write_checkpoint(tmp_path / "expected", rounded, config)
    output = convert(mlp_recipe(tmp_path, "bfloat16"), source, tmp_path / "out").output

    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(expected_dir)
    model = load_converted(output, kernels="reference")
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    again = load_manifest(tmp_path / "packed").tensors_by_target()[PACKED.format(1)]
    assert (again.dtype, [origin.dtype for origin in again.origins]) == ("BF16", ["BF16", "F32"])
    assert torch.equal(logits(load_converted(tmp_path / "packed", kernels="reference")), logits(expected))
