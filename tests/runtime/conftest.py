"""Converted directories, made once per session and only read; `Pair.copy` gives one to write into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.runtime.pairs import Pair
from tests.support import Kind, convert, save_tiny

MakePair = Callable[..., Pair]


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """`make_pair(recipe, dtype=..., tie=..., sharded=...)`, cached."""
    cache: dict[tuple[Any, ...], Pair] = {}

    def make(recipe: str, *, dtype: torch.dtype = torch.float32, tie: bool = False, sharded: bool = False) -> Pair:
        key = (recipe, dtype, tie, sharded)
        if key not in cache:
            kind: Kind = "llama" if recipe == "llama" else "qwen3"
            directory = tmp_path_factory.mktemp("pair")
            size: int | str = 10_000 if sharded else "1GB"
            source = save_tiny(directory / "source", kind, dtype=dtype, tie=tie, max_shard_size=size)
            cache[key] = Pair(recipe, source, convert(recipe, source, directory / "converted").output)
        return cache[key]

    return make


@pytest.fixture(scope="session", params=["qwen3", "qwen3-fused-norm-mlp", "llama"])
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    """Each shipped recipe on a float32 model whose head is not tied."""
    return make_pair(request.param)


@pytest.fixture(scope="session")
def qwen3(make_pair: MakePair) -> Pair:
    """The plain recipe, untied."""
    return make_pair("qwen3")


@pytest.fixture(scope="session")
def tied(make_pair: MakePair) -> Pair:
    """The plain recipe on a model whose head is tied."""
    return make_pair("qwen3", tie=True)


@pytest.fixture(scope="session")
def fused(make_pair: MakePair) -> Pair:
    """The fusing recipe, untied."""
    return make_pair("qwen3-fused-norm-mlp")


@pytest.fixture(scope="session")
def sharded(make_pair: MakePair) -> Pair:
    """The plain recipe on several shards."""
    return make_pair("qwen3", sharded=True)
