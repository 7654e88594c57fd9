"""Conversions by the example packages.  They are shared: read them, copy them, never write into them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def qwen3_bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in bfloat16, one file."""
    from tests.support import save_tiny

    return save_tiny(tmp_path_factory.mktemp("source") / "qwen3-bf16", "qwen3", dtype=torch.bfloat16)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with fresh copies of both example packages."""
    from tests.packages.helpers import copy_example

    copy_example("custom_rms_norm", tmp_path)
    copy_example("norm_mlp", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def converted_both_dir(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3_dir` with both example packages: norms replaced, norm and MLP fused."""
    from tests.packages.helpers import copy_example, fuse, replace, run_recipe

    directory = tmp_path_factory.mktemp("both")
    copy_example("custom_rms_norm", directory)
    copy_example("norm_mlp", directory)
    return run_recipe(directory, replace() + fuse(), qwen3_dir)
