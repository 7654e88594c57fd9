"""Session-wide sources and conversions.  They are shared: read them, copy them, never write into them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A job in the background ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports Triton: where no GPU driver is, kernels run in its interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, float32, one file."""
    from tests.support import save_tiny

    return save_tiny(tmp_path_factory.mktemp("source") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def qwen3_sharded_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tiny Qwen3 in several shards, with gate and up of layers in different ones."""
    from tests.support import save_tiny

    return save_tiny(tmp_path_factory.mktemp("source") / "qwen3-sharded", "qwen3", max_shard_size=10_000)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, float32, one file."""
    from tests.support import save_tiny

    return save_tiny(tmp_path_factory.mktemp("source") / "llama", "llama")


@pytest.fixture(scope="session")
def converted_qwen3_dir(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3_dir` by the recipe `qwen3`."""
    from tests.support import convert

    return convert("qwen3", qwen3_dir, tmp_path_factory.mktemp("converted") / "qwen3").output


@pytest.fixture(scope="session")
def converted_sharded_dir(qwen3_sharded_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3_sharded_dir` by the recipe `qwen3`."""
    from tests.support import convert

    return convert("qwen3", qwen3_sharded_dir, tmp_path_factory.mktemp("converted") / "qwen3-sharded").output


@pytest.fixture(scope="session")
def converted_fused_dir(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3_dir` by the recipe `qwen3-fused-norm-mlp`."""
    from tests.support import convert

    return convert("qwen3-fused-norm-mlp", qwen3_dir, tmp_path_factory.mktemp("converted") / "qwen3-fused").output


@pytest.fixture(scope="session")
def converted_llama_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama_dir` by the recipe `llama`."""
    from tests.support import convert

    return convert("llama", llama_dir, tmp_path_factory.mktemp("converted") / "llama").output
