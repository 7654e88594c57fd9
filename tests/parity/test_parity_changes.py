"""What `verify` must not be fooled by, and what it must not blame on a healthy conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kconvert.cli import main
from kconvert.errors import VerificationError
from kconvert.names import PARITY_NAME
from kconvert.parity import verify
from tests.support import convert, save_tiny, write_recipe

MLP = """\
  - kernel: cpu_fused_swiglu
    dtype: {dtype}
    replace: {{class: LlamaMLP, path: "model.layers.*.mlp"}}
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_that_a_recipe_asks_for_is_no_fault(tmp_path: Path, llama_dir: Path, dtype: str) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", MLP.format(dtype=dtype), model_type="llama")
    output = convert(recipe, llama_dir, tmp_path / "converted").output
    report = verify(output, source=llama_dir, levels=("modules", "logits"))
    assert report.failures == ()


def test_rounding_that_a_recipe_asks_for_is_that_of_the_stored_values(tmp_path: Path, llama_dir: Path) -> None:
    """Stored in float32, a bfloat16 model: by way of float16 some values are others than straight to bfloat16."""
    source = shutil.copytree(llama_dir, tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    recipe = write_recipe(tmp_path / "r.yaml", MLP.format(dtype="float16"), model_type="llama")
    output = convert(recipe, source, tmp_path / "converted").output
    name = "model.layers.0.mlp.gate_proj.weight"
    stored = load_file(source / "model.safetensors")[name]
    assert not torch.equal(stored.bfloat16(), stored.half().bfloat16())
    assert verify(output, source=source, levels=("modules", "logits")).failures == ()


def test_rounding_does_not_hide_another_weight(tmp_path: Path, llama_dir: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", MLP.format(dtype="bfloat16"), model_type="llama")
    output = convert(recipe, llama_dir, tmp_path / "converted").output
    other = save_tiny(tmp_path / "other", "llama", seed=1)
    assert verify(output, source=other).failures


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 1e-5), ("max_position_embeddings", 32), ("eos_token_id", 5), ("vocab_size", 63)]
)
def test_a_config_that_was_changed_after_the_conversion(
    tmp_path: Path, converted_qwen3_dir: Path, qwen3_dir: Path, key: str, value: object
) -> None:
    shutil.copytree(converted_qwen3_dir, tmp_path / "converted")
    config = json.loads((tmp_path / "converted" / "config.json").read_text(encoding="utf-8"))
    assert config[key] != value
    (tmp_path / "converted" / "config.json").write_text(json.dumps({**config, key: value}), encoding="utf-8")
    for source in (None, qwen3_dir):
        with pytest.raises(VerificationError, match=r"config\.json was changed") as caught:
            verify(tmp_path / "converted", source=source)
        assert caught.value.exit_code == 5


def test_the_report_is_never_written_through_a_link(
    tmp_path: Path, converted_qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted_qwen3_dir, tmp_path / "converted")
    precious = tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    for name in (PARITY_NAME, f"{PARITY_NAME}.partial"):
        (tmp_path / "converted" / name).symlink_to(precious)
    assert main(["verify", str(tmp_path / "converted")]) == 0, capsys.readouterr().err
    assert precious.read_text(encoding="utf-8") == "mine"
    report = tmp_path / "converted" / PARITY_NAME
    assert report.is_file()
    assert not report.is_symlink()
