"""Every dtype and every shape goes through as bytes: nothing is cast, nothing is promoted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kconvert import load_converted
from kconvert.errors import CheckpointError, UsageError
from kconvert.manifest import load_manifest
from kconvert.names import SINGLE_NAME
from tests.support import (
    RawTensor,
    check_refused,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    write_checkpoint,
)

GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
PACKED = "model.layers.1.mlp.gate_up_proj.weight"
NARROW = {
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BF16": 16,
    "F16": 16,
    "F64": 64,
    "C64": 64,
    "BOOL": 8,
}


def filled(dtype: str, shape: tuple[int, ...], start: int = 1) -> RawTensor:
    """Bytes that count up: as numbers they may be NaN, infinite or denormal."""
    count = 1
    for size in shape:
        count *= size
    return RawTensor(dtype, shape, bytes((start + number) % 251 for number in range(count * NARROW[dtype] // 8)))


@pytest.mark.parametrize("dtype", NARROW)
def test_any_dtype_passes_through(tmp_path: Path, dtype: str) -> None:
    """B14, with the model checked: a tensor that the model does not know is carried as it is."""
    extra = filled(dtype, (2, 8))
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), "extra": extra}, qwen3_config())
    output = convert("qwen3", source, tmp_path / "out").output
    assert read_raw(output)["extra"] == extra
    manifest = load_manifest(output)
    assert manifest.carried == ("extra",)
    assert manifest.tensors_by_target()["extra"].dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_any_dtype_is_packed_as_raw_bytes(tmp_path: Path, dtype: str) -> None:
    gate, up = filled(dtype, (12, 8), 1), filled(dtype, (12, 8), 100)
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), GATE: gate, UP: up}, qwen3_config())
    written = read_raw(convert("qwen3", source, tmp_path / "out").output)
    assert written[PACKED] == RawTensor(dtype, (24, 8), gate.data + up.data)
    assert written[PACKED.replace("1.mlp", "0.mlp")].dtype == "F32"


@pytest.mark.parametrize("dtype", NARROW)
def test_any_dtype_is_let_be_by_a_load(tmp_path: Path, dtype: str) -> None:
    """B14, B16: beside scalars and empty tensors; none of them has a place in the model."""
    model = load_converted(convert("qwen3", with_extra(tmp_path, dtype), tmp_path / "out").output)
    assert not {"extra", "none", "scale"} & model.state_dict().keys()


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if not dtype.startswith("F6")])
def test_any_dtype_is_kept_by_a_packed_save(tmp_path: Path, dtype: str) -> None:
    """B14, B16: what the model has no place for goes from file to file."""
    source = with_extra(tmp_path, dtype)
    model = load_converted(convert("qwen3", source, tmp_path / "out").output)
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    before, written = read_raw(source), read_raw(tmp_path / "packed")
    extra = [name for name in ("extra", "none", "scale") if name in before]
    assert [written[name] for name in extra] == [before[name] for name in extra]
    assert load_manifest(tmp_path / "packed").carried == tuple(extra)


def with_extra(folder: Path, dtype: str) -> Path:
    """A source with a tensor of this dtype, an empty one, and a scalar where that is whole bytes."""
    extra = {"extra": filled(dtype, (2, 8)), "none": filled(dtype, (0, 8))}
    if NARROW[dtype] >= 8:
        extra["scale"] = filled(dtype, ())
    return write_checkpoint(folder / "in", {**qwen3_tensors(), **extra}, qwen3_config())


def test_packed_bfloat16_is_what_torch_would_make(tmp_path: Path) -> None:
    tensors = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in qwen3_tensors().items()}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(dtype="bfloat16"))
    output = convert("qwen3", source, tmp_path / "out").output
    assert torch.equal(load_file(output / SINGLE_NAME)[PACKED], torch.cat([tensors[GATE], tensors[UP]]))


def test_a_float32_tensor_in_a_bfloat16_model_stays_float32(tmp_path: Path) -> None:
    """B13: a norm that the recipe takes, one that it does not, and a tensor that the model does not have."""
    special = {
        "model.norm.weight": torch.full((8,), 1.0 + 2**-20),
        "lm_head.weight": torch.full((10, 8), 1.0 + 2**-21),
        "model.layers.0.mlp_gate.e_score_correction_bias": torch.full((3,), 1.0 + 2**-22),
    }
    tensors = {**qwen3_tensors(dtype=torch.bfloat16), **special}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(dtype="bfloat16"))
    written = read_raw(convert("qwen3", source, tmp_path / "out").output)
    assert {name: written[name] for name in special} == {name: raw(tensor) for name, tensor in special.items()}
    assert {tensor.dtype for name, tensor in written.items() if name not in special} == {"BF16"}


@pytest.mark.parametrize("model_check", [True, False])
@pytest.mark.parametrize(("gate", "up"), [("BF16", "F32"), ("F16", "BF16"), ("F8_E4M3", "F8_E5M2"), ("F32", "BF16")])
def test_mixed_dtypes_in_a_group(tmp_path: Path, gate: str, up: str, model_check: bool) -> None:
    kinds = {**NARROW, "F32": 32}
    made = {name: RawTensor(dtype, (12, 8), bytes(96 * kinds[dtype] // 8)) for name, dtype in ((GATE, gate), (UP, up))}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **made}, qwen3_config())
    words = [f"{PACKED!r} would join different dtypes", f"{GATE} {gate}", f"{UP} {up}"]
    check_refused(CheckpointError, 4, words, "qwen3", source, tmp_path / "out", model_check=model_check)


@pytest.mark.parametrize("sharded", [False, True])
def test_scalars_and_empty_tensors(tmp_path: Path, sharded: bool) -> None:
    """B16."""
    extra: dict[str, torch.Tensor] = {
        "logit_scale": torch.tensor(2.5),
        "model.layers.0.step": torch.tensor(7, dtype=torch.int64),
        "flag": torch.tensor(True),
        "empty_a": torch.zeros(0, 3),
        "empty_b": torch.zeros(3, 0, dtype=torch.bfloat16),
        "empty_c": torch.zeros(0),
    }
    tensors = {**extra, **qwen3_tensors()}
    shards = [list(extra)[::2], [*list(extra)[1::2], *qwen3_tensors()]] if sharded else None
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(), shards)
    output = convert("qwen3", source, tmp_path / "out").output
    written = read_raw(output)
    assert {name: written[name] for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    assert set(load_manifest(output).carried) == set(extra)
    records = load_manifest(output).tensors_by_target()
    assert [records[name].parts[0].shape for name in ("logit_scale", "empty_a", "empty_b")] == [(), (0, 3), (3, 0)]


def test_a_shard_of_empty_tensors_only(tmp_path: Path) -> None:
    tensors = {"nothing": torch.zeros(0, 3), **qwen3_tensors()}
    source = write_checkpoint(tmp_path / "in", tensors, qwen3_config(), [["nothing"], list(qwen3_tensors())])
    written = read_raw(convert("qwen3", source, tmp_path / "out").output)
    assert written["nothing"] == RawTensor("F32", (0, 3), b"")


def test_scalars_do_not_join(tmp_path: Path) -> None:
    made = {GATE: torch.tensor(1.0), UP: torch.tensor(2.0)}
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), **made}, qwen3_config())
    words = [f"{PACKED!r} cannot be made of", "no axis 0"]
    check_refused(CheckpointError, 4, words, "qwen3", source, tmp_path / "out", model_check=False)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_torch_does_not_have_and_a_packed_save(tmp_path: Path, dtype: str) -> None:
    """B14: what cannot be kept is not left out without a word."""
    extra = RawTensor(dtype, (2, 8), bytes(range(12)))
    source = write_checkpoint(tmp_path / "in", {**qwen3_tensors(), "extra": extra}, qwen3_config())
    model = load_converted(convert("qwen3", source, tmp_path / "out").output)
    with pytest.raises(UsageError, match="'extra', outside the model, cannot be saved"):
        model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert not (tmp_path / "packed").exists()
