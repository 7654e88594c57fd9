"""Device code on a GPU where there is one, and else in Triton's interpreter, which `tests/conftest.py` has chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors go that a kernel is given."""
    return "cuda" if torch.cuda.is_available() else "cpu"
