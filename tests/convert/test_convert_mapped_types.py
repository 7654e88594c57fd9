"""Types whose file names are not their module names need the model; told without importing anything heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kconvert.convert import mapped_types
from kconvert.convert.mapped_types import check_unmapped
from kconvert.errors import CheckpointError
from tests.support import check_refused, write_checkpoint, write_recipe

HEAVY = """
import sys
from pathlib import Path
from kconvert.convert.mapped_types import check_unmapped
check_unmapped("qwen3", Path("x"))
try:
    check_unmapped("mixtral", Path("x"))
except ValueError as error:
    print(error.exit_code)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral", "qwen2"])
def test_types_that_keep_their_names(model_type: str, tmp_path: Path) -> None:
    check_unmapped(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_types_that_do_not(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_unmapped(model_type, tmp_path)
    assert f"renames or joins tensors of model type {model_type!r}" in str(caught.value)
    assert "leave out --no-model-check" in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("model_type", [".*", "mixtra", "ixtral", 'x"]'])
def test_a_type_is_not_a_pattern(model_type: str, tmp_path: Path) -> None:
    check_unmapped(model_type, tmp_path)


def test_nothing_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["4", "[]"]


@pytest.mark.parametrize(
    "found",
    [None, ModuleSpec("transformers", None, origin=None), ModuleSpec("transformers", None, origin="/none/x.py")],
)
def test_without_transformers_nothing_is_known(
    found: ModuleSpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_types, "find_spec", lambda name: found)
    with pytest.raises(CheckpointError, match="transformers' conversion mapping was not found"):
        check_unmapped("qwen3", tmp_path)


def test_apply_asks(tmp_path: Path) -> None:
    import torch

    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    source = write_checkpoint(tmp_path / "in", {"model.norm.weight": torch.ones(2)}, config)
    patch = '  - kernel: cpu_fused_rmsnorm\n    replace: {class: MixtralRMSNorm, path: "model.norm"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", patch, model_type="mixtral")
    check_refused(CheckpointError, 4, ["'mixtral'"], recipe, source, tmp_path / "out", model_check=False)
