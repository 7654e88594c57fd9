"""Reverting what the shipped recipes, and others, make of tiny models: every file of the source, byte for byte."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch

from kconvert.convert import prepare_revert
from kconvert.errors import VerificationError
from kconvert.manifest import load_manifest
from tests.packages.helpers import run_recipe
from tests.packages.test_packages_ops import PRESENT, convert_case
from tests.revert.checks import check_given_back
from tests.support import (
    Kind,
    RawTensor,
    bake_recipe,
    convert,
    qwen3_config,
    qwen3_tensors,
    read_raw,
    save_tiny,
    write_checkpoint,
    write_recipe,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MLP = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_the_shipped_recipe(
    qwen3_dir: Path,
    qwen3_sharded_dir: Path,
    converted_qwen3_dir: Path,
    converted_sharded_dir: Path,
    tmp_path: Path,
    sharded: bool,
) -> None:
    source, converted = (qwen3_sharded_dir, converted_sharded_dir) if sharded else (qwen3_dir, converted_qwen3_dir)
    result = check_given_back(source, converted, tmp_path / "back")
    assert (result.prepared.index is not None, len(result.prepared.files) > 5) == (sharded, sharded)


def test_files_beside_the_weights(qwen3_dir: Path, tmp_path: Path) -> None:
    """B25: tokenizer, templates, subfolders; weights in other formats stay behind, and are listed."""
    source = Path(shutil.copytree(qwen3_dir, tmp_path / "source"))
    for name in ("tokenizer.model", "chat_template.jinja", "sub/deep/größe.json", "modeling_x.py", "empty"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"" if name == "empty" else name.encode() * 3)
    for name in ("pytorch_model.bin", "sub/model.safetensors"):
        (source / name).write_bytes(b"weights")
    converted = convert("qwen3", source, tmp_path / "converted", model_check=False).output
    left_out = ["pytorch_model.bin", "sub/model.safetensors"]
    result = check_given_back(source, converted, tmp_path / "back", left_out=left_out)
    for item in result.prepared.not_restored:
        assert item.reason.startswith("was not brought over: a stock loader could take it for weights")


@pytest.mark.parametrize("max_shard_bytes", [1, 3_000, 10**9])
def test_another_sharding(qwen3_sharded_dir: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    converted = convert(
        "qwen3", qwen3_sharded_dir, tmp_path / "converted", model_check=False, max_shard_bytes=max_shard_bytes
    ).output
    files = len(load_manifest(converted).weight_files)
    assert files == 1 if max_shard_bytes == 10**9 else files > 5
    check_given_back(qwen3_sharded_dir, converted, tmp_path / "back")


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("reuse", ["copy", "hardlink"])
def test_other_ways_to_write(qwen3_sharded_dir: Path, tmp_path: Path, digests: bool, reuse: str) -> None:
    source = Path(shutil.copytree(qwen3_sharded_dir, tmp_path / "source"))
    converted = convert("qwen3", source, tmp_path / "converted", model_check=False, reuse=reuse, digests=digests).output
    check_given_back(source, converted, tmp_path / "back")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_experts(kind: Kind, tmp_path: Path) -> None:
    """Baked: an expert's tensors are in the middle of a stack, under other names; bfloat16, in shards."""
    source = save_tiny(tmp_path / "source", kind, dtype=torch.bfloat16, max_shard_size=30_000)
    recipe = kind.replace("_", "-")
    converted = convert(recipe, source, tmp_path / "converted").output
    assert {record.op for record in load_manifest(converted).tensors} > {"copy"}
    check_given_back(source, converted, tmp_path / "back")


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3"])
def test_baked_alone(kind: Kind, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", kind)
    converted = convert(bake_recipe(tmp_path, kind), source, tmp_path / "converted").output
    check_given_back(source, converted, tmp_path / "back")


@pytest.mark.parametrize("name", PRESENT)
def test_the_ops_of_packages(name: str, qwen3_dir: Path, tmp_path: Path) -> None:
    """As the mapping of a package has them; its vendored code is no part of the source."""
    converted = convert_case(name, qwen3_dir, tmp_path / "package")
    assert (converted / "kconvert_kernels").is_dir()
    check_given_back(qwen3_dir, converted, tmp_path / "back")


def test_both_copies_of_a_tied_tensor(tmp_path: Path) -> None:
    """A6: stored twice, with one value or with two, they come back twice; stored once, once."""
    tensors = qwen3_tensors()
    for number, head in enumerate([tensors[EMBED], tensors[EMBED] + 1, None]):
        held = {**tensors, HEAD: head} if head is not None else {k: v for k, v in tensors.items() if k != HEAD}
        source = write_checkpoint(tmp_path / f"source{number}", held, qwen3_config(tie_word_embeddings=True))
        converted = convert("qwen3", source, tmp_path / f"converted{number}").output
        check_given_back(source, converted, tmp_path / f"back{number}")


def test_tensors_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": torch.randn(3, 5), "draft.scale": torch.tensor(3, dtype=torch.int32)}
    source = write_checkpoint(tmp_path / "source", {**extra, **qwen3_tensors()}, qwen3_config())
    converted = convert("qwen3", source, tmp_path / "converted").output
    assert load_manifest(converted).carried
    check_given_back(source, converted, tmp_path / "back")


# --- dtypes -----------------------------------------------------------------------------------------------


def halves(dtype: str) -> bytes:
    """Every half that there is: each NaN, both infinities, numbers below the smallest normal one."""
    assert dtype in ("F16", "BF16")
    return struct.pack("<65536H", *range(65536))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_halves_in_float32_come_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """`dtype: float32` of a recipe widens and rounds nothing."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in qwen3_tensors().items()}
    shapes = {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (256, 256)}
    held = {
        name: RawTensor(dtype, shapes[part], halves(dtype)) if (part := name.split(".")[-2]) in shapes else tensor
        for name, tensor in tensors.items()
    }
    source = write_checkpoint(tmp_path / "source", held, qwen3_config())
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: cpu_fused_swiglu\n    dtype: float32\n{MLP}")
    converted = convert(recipe, source, tmp_path / "converted", model_check=False).output
    assert read_raw(converted)["model.layers.0.mlp.gate_up_proj.weight"].dtype == "F32"
    check_given_back(source, converted, tmp_path / "back")


def test_a_mix_of_dtypes_in_float32(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    gate = "model.layers.0.mlp.gate_proj.weight"
    source = write_checkpoint(tmp_path / "source", {**tensors, gate: tensors[gate].half()}, qwen3_config())
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: cpu_fused_swiglu\n    dtype: float32\n{MLP}")
    converted = convert(recipe, source, tmp_path / "converted", model_check=False).output
    check_given_back(source, converted, tmp_path / "back")


def test_what_transformers_computes_is_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    from tests.packages.helpers import replace, write_package
    from tests.packages.test_packages_ops import COMPUTED

    write_package(tmp_path, COMPUTED)
    converted = run_recipe(tmp_path, replace("./package:Norm", name="Qwen3RMSNorm"), qwen3_dir)
    with pytest.raises(VerificationError) as caught:
        prepare_revert(converted)
    assert str(caught.value) == (
        f"{converted}: 'model.layers.0.input_layernorm.scale' (and 1 more) was made by compute(SubtractOne), which has "
        "no exact inverse; use the source itself"
    )
